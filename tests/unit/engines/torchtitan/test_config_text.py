"""Configurations of torchtitan are read as text: what they state is found, and nothing of them runs."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from textwrap import dedent

import pytest

from meshwright.engines.torchtitan.config_text import calls
from meshwright.engines.torchtitan.config_text.modules import ProjectModules
from meshwright.engines.torchtitan.config_text.tree import read_tree
from meshwright.errors import InputError

HEAD = """
from dataclasses import dataclass, field, replace
import os
from functools import partial

@dataclass
class Training:
    steps: int = 10
    lengths: list = field(default_factory=lambda: [1, 2])
    name: str = "x"

"""


@pytest.fixture
def read(tmp_path):
    """`read(body)`: the tree of `train()`, whose body this is."""

    def tree(body: str, *, head: str = HEAD) -> dict:
        indented = "\n".join(f"    {line}" for line in dedent(body).strip().splitlines())
        (tmp_path / "mine.py").write_text(f"{head}\ndef train():\n{indented}\n")
        return read_tree(str(tmp_path / "mine.py"), "train")

    return tree


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ("return Training(steps=2 * 5 + 2**3)", {"steps": 18}),
        ("made = Training()\nmade.steps = 7\nreturn made", {"steps": 7}),
        ("return replace(Training(name='a'), steps=3)", {"steps": 3, "name": "a"}),
        ("return Training(lengths=[i * i for i in range(4) if i % 2])", {"lengths": [1, 9]}),
        ("sizes = {'small': 3}\nreturn Training(**{'steps': sizes['small']})", {"steps": 3}),
        ("def inner(n, *, k=2):\n    return n * k\nreturn Training(steps=inner(4))", {"steps": 8}),
        ("return Training(steps=partial(max, 4)(9))", {"steps": 9}),
        ("made = Training()\nmade.lengths += [3]\nreturn made", {"lengths": [1, 2, 3]}),
        ("def some():\n    yield 1\n    yield from (5,)\nreturn Training(lengths=[*some()])", {"lengths": [1, 5]}),
        ("try:\n    {}['a']\nexcept KeyError:\n    return Training(name='none')", {"name": "none"}),
        ("name = 'b'\nreturn Training(name=f'{name}-{3:02d}')", {"name": "b-03"}),
        ("if isinstance(Training(), Training) and not os.name:\n    pass\nreturn Training()", None),
        ("return Training(name=str.join('-', ['a', 'b']))", {"name": "a-b"}),
        ("return Training(lengths=[*dict.fromkeys([2, 1, 2])])", {"lengths": [2, 1]}),
        ("return Training(lengths=sorted([3, 1], key=partial(max, 2), reverse=True))", {"lengths": [3, 1]}),
        ("n = 0\nwhile n < 5:\n    n += 2\nelse:\n    n += 1\nreturn Training(steps=n)", {"steps": 7}),
    ],
)  # fmt: skip
def test_what_the_text_states_is_read_as_python_reads_it(read, body, fields):
    if fields is None:  # an unknown condition
        body, fields = body.replace("and not os.name", ""), {}
    tree = read(body)
    assert tree["is"] == "Training"
    assert tree["fields"] == {"steps": 10, "lengths": [1, 2], "name": "x"} | fields
    assert set(tree["given"]) == set(fields)
    names: dict = {}
    exec(f"{HEAD}\ndef train():\n" + "\n".join(f"    {line}" for line in body.splitlines()), names)  # the reference
    assert vars(names["train"]()) == tree["fields"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return Training(steps=int(os.environ['STEPS']), name=os.getenv('N'))",
            ["steps = int(os.environ", "name = os.getenv"],
        ),
        ("if os.environ.get('BIG'):\n    return Training(steps=9)", ["depends on a value that its text"]),
        ("import other\nother.patch(made := Training())\nreturn made", ["a call that may change the configuration"]),
        ("for one in os.listdir('.'):\n    pass\nreturn Training()", ["a loop over a value", "os.listdir"]),
        ("return Training(stops=1)", ["unexpected keyword argument 'stops'", "cannot build"]),
        ("raise ValueError('not here')", ["ValueError: not here"]),
        ("return open('/etc/passwd').read()", ["open"]),
        ("match 3:\n    case 3:\n        return Training()", ["a statement that is not read: got 'match'"]),
    ],
)  # fmt: skip
def test_what_the_text_does_not_state_is_named(read, body, words):
    with pytest.raises(InputError) as caught:
        read(body)
    assert all(word in str(caught.value) for word in words), str(caught.value)


HOSTILE = {
    "a process": "import os\nos.system('touch ran')\nos.mkdir('ran')\nraise SystemExit(9)",
    "a built-in": "open('ran', 'w').write('x')\n__import__('os').mkdir('ran')\nexec('x = 1')\neval('1')",
    "classes": "().__class__.__base__.__subclasses__()[0]('ran')",
    "a frame": "(lambda: 0).__globals__['os'].mkdir('ran')",
    "format": "'{0.__class__}'.format(3)\nstr.format('{0.__class__}', 3)",
    "a path": "from pathlib import Path\nPath('ran').write_text('x')\nPath('ran').mkdir()",
    "a method of a type": "type('x', (), {})\nint.__subclasses__()\nstr.mro()",
    "big numbers": "n = 9 ** 9 ** 9 ** 9\nm = 1 << 10 ** 12",
    "big text": "s = 'x' * 10 ** 12\nt = f'{3:999999999d}'",
    "doubled text": "s = 'ab'\nwhile True:\n    s = s + s",
    "replaced text": "s = 'a' * 10 ** 6\nfor i in range(9):\n    s = s.replace('a', s)",
    "joined text": "s = 'a' * 10 ** 6\nt = s.join([s] * 10 ** 6)",
    "a big list": "a = [0] * 10 ** 12\nb = list(range(10 ** 15))",
    "an endless loop": "while True:\n    pass",
    "endless recursion": "def f():\n    return f()\nf()",
    "a deep graph": "a = [1]\nfor i in range(100):\n    a = [a, a]\nb = a == a\nc = str(a)\nd = [a]",
    "a circle": "a = []\na.append(a)\nreturn a",
    "a compared circle": "a = []\na.append(a)\nb = a == a",
    "sorted graphs": "a = [1]\nfor i in range(100):\n    a = [a, a]\nreturn sorted([a, a])",
    "a returned graph": "a = [1]\nfor i in range(100):\n    a = [a, a]\nreturn a",
    "hashed tuples": "a = (1,)\nfor i in range(100):\n    a = (a, a)\nreturn {a: 1}",
    "an endless iterator": "return list(iter(int, 1))",
    "products": "import math\nreturn math.prod([10 ** 300] * 10 ** 6)",
    "joined names": "import other\nn = other.f()\nwhile True:\n    n = f'{n}{n}'",
    "many digits": "return int('9' * 10 ** 6)",
    "a growing name": "import other\nn = other\nwhile True:\n    n = n.x",
    "a growing item": "import other\nn = other\nwhile True:\n    n = n[0]",
    "many ranges": "while True:\n    n = max(range(2_000_000))",
    "many texts": "s = 'x' * 10 ** 6\nwhile True:\n    n = s == s + 'y'",
    "a long sum": "return sum([[0] * 1000] * 10 ** 6, [])",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_run_nothing_and_end(read, tmp_path, monkeypatch, body):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with pytest.raises(InputError):
        read(f"{body}\nraise ValueError")
    assert time.process_time() - start < 30
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py"}


GRAPH = "def deep():\n    a = [1]\n    for i in range(60):\n        a = [a, a]\n    return a\n"
TUPLES = GRAPH.replace("[1]", "(1,)").replace("[a, a]", "(a, a)")
LONG = "1, " * 20_000
IN_FEW_STEPS = {
    "a doubled name": "import other\nn = other.f()\nwhile True:\n    n = max(n, n)",
    "unknown graphs": "import other\nx = y = other.f()\nfor i in range(60):\n    x = other.f(x, x)\n"
    "    y = other.f(y, y)\nb = [x] == [y]",
    "a raised graph": f"{GRAPH}raise ValueError(deep())",
    "an asserted graph": f"{GRAPH}assert False, deep()",
    "the index of a graph": f"{GRAPH}[1].index(deep())",
    "views of graphs": f"{GRAPH}b = {{1: deep()}}.items() == {{1: deep()}}.items()",
    "iterated graphs": f"{GRAPH}b = max(iter([deep(), deep()]))",
    "graphs as sorting keys": f"{GRAPH}b = sorted([1, 2], key=lambda i: deep())",
    "graphs that a list sorts by": f"{GRAPH}[1, 2].sort(key=lambda i: deep())",
    "a graph by default": "class Deep:\n    pass\n@dataclass\nclass T:\n    a: object = None\n    b: object = None\n"
    "def deep():\n    x = T()\n    for i in range(60):\n        x = T(x, x)\n    return x\n"
    "@dataclass\nclass U:\n    a: object = field(default_factory=deep)\nreturn U()",
    "a hashed graph": f"{TUPLES}b = {{}}.get(deep())",
    "a graph in a set": f"{TUPLES}set().add(deep())",
    "graphs in a union": f"{TUPLES}set().union([deep()])",
    "graphs as iterated keys": f"{TUPLES}b = dict(iter([(deep(), 1)]))",
    "a rounded number": "b = round(1, -10 ** 9)",
    "joined paths": "from pathlib import Path\np = Path('a' * 8)\nwhile True:\n    p = p.joinpath(p)",
    "divided paths": "from pathlib import Path\np = Path('a' * 8)\nwhile True:\n    p = p / p",
    "paths of paths": "from pathlib import Path\np = Path('a' * 8)\nwhile True:\n    p = Path(p, p)",
    "iterated text": "s = 'x' * 10 ** 5\nt = s.join(iter([s] * 10 ** 5))",
    "a method of text": "s = 'x' * 10 ** 5\nt = str.join(s, [s] * 10 ** 5)",
    "copies": "import copy\na = [0] * 10 ** 5\nb = []\nwhile True:\n    b.append(copy.copy(a))",
    "filters": "a = [0] * 10 ** 5\nwhile True:\n    next(filter(None, a), 0)",
    "subsets": "a = [0] * 10 ** 5\nb = set()\nwhile True:\n    b.issubset(a)",
    "an expression that is not read": f"while True:\n    x = (yield [{LONG}])",
    "a context that is not read": f"while True:\n    with f([{LONG}]) as x:\n        pass",
    "an annotation": f"while True:\n    class A:\n        x: [{LONG}]",
    "a chain of classes": "\n".join(["class C0: pass", *(f"class C{i + 1}(C{i}): pass" for i in range(3000))]),
    "wide classes": "@dataclass\nclass A:\n" + "\n".join(f"    f{i}: int = 0" for i in range(5000)) + "\n"
    + "\n".join(f"class B{i}(A): pass" for i in range(5000)),
    "wide functions": "def f(" + ", ".join(f"a{i}=0" for i in range(5000)) + "): return 0\nwhile True:\n    f()",
    "a wide enum": "from enum import Enum\nclass E(Enum):\n" + "\n".join(f"    A{i} = {i}" for i in range(5000))
    + "\nwhile True:\n    E(4999)",
    "long paths of keys": "s = 'x' * 10 ** 5\na = {}\nfor i in range(500):\n    a = {s: a}\nreturn a",
}  # fmt: skip


@pytest.mark.parametrize("body", IN_FEW_STEPS.values(), ids=IN_FEW_STEPS)
def test_a_step_is_small(read, monkeypatch, body):
    """Time and memory of a program are bounded by its steps, so none of them may do much."""
    monkeypatch.setattr(calls, "MOST_STEPS", 300_000)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as caught:
        read(f"{body}\nraise ValueError")
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB
    assert "MemoryError" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_numbers_that_grow_by_sums_are_refused(read):
    with pytest.raises(InputError, match="more than 4096 bits"):
        read("n = 1\nfor i in range(5000):\n    n = n + n")


def test_of_many_unknown_values_some_are_named(read):
    with pytest.raises(InputError, match=r"state 5000 of its values") as caught:
        read("import other\nreturn [other.f(i) for i in range(5000)]")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", ["(" * 300, "-" * 50_000 + "1", "x = '\0'", "def train(:", "\ud800"])
def test_what_is_no_python_is_refused(tmp_path, text):
    (tmp_path / "mine.py").write_text(text, errors="surrogatepass")
    with pytest.raises(InputError):
        read_tree(str(tmp_path / "mine.py"), "train")


def test_modules_of_the_project_are_read_and_those_outside_of_it_are_not(tmp_path):
    package = tmp_path / "project" / "pkg"
    package.mkdir(parents=True)
    (tmp_path / "secret.py").write_text("STEPS = 5\n")
    (package / "__init__.py").write_text("from .sizes import *\n")
    (package / "sizes.py").write_text(f"{HEAD}\nSTEPS = 3\n")
    (package / "linked.py").symlink_to(tmp_path / "secret.py")
    (package / "runs.py").write_text(
        "from . import Training, STEPS\nfrom .linked import STEPS as OTHER\n"
        "def train():\n    return Training(steps=STEPS)\n"
        "def linked():\n    return Training(steps=OTHER + 1)\n"
    )
    assert read_tree(str(package / "runs.py"), "train")["fields"]["steps"] == 3
    with pytest.raises(InputError, match=r"does not state 1 of its values.*steps = OTHER \+ 1"):
        read_tree(str(package / "runs.py"), "linked")
    assert ProjectModules(tmp_path / "project").find("pkg.linked") is None
    assert ProjectModules(tmp_path / "project").find("...secret") is None


def test_a_changed_module_is_read_again(tmp_path):
    for steps in (3, 4):
        path = Path(tmp_path / "mine.py")
        path.write_text(f"{HEAD}\n\ndef train():\n    return Training(steps={steps})\n")
        os.utime(path, ns=(steps, steps))
        assert read_tree(str(path), "train")["fields"]["steps"] == steps


def test_classes_and_enums_are_those_of_python(read):
    head = f"{HEAD}from enum import Enum, StrEnum\n" + dedent("""
        class Axis(StrEnum):
            DATA = "dp"

        class Size(Enum):
            SMALL = 1
            LARGE = 2

        class Named:
            def label(self):
                return "named"

            @property
            def twice(self):
                return 2 * self.steps

            @classmethod
            def of(cls, steps):
                return cls(steps=steps)

        @dataclass(kw_only=True, slots=True)
        class Long(Named, Training):
            rest: int
            shared: ClassVar[int] = 3

            def __post_init__(self):
                self.name = super().label() + str(self.twice)
    """)
    tree = read(
        "made = Long(rest=Size(2).value, steps=4)\nmade.lengths = {Axis.DATA: Size.LARGE}\nreturn made", head=head
    )
    assert tree["is"] == "Long"
    assert tree["fields"] == {"steps": 4, "lengths": {"dp": "LARGE"}, "name": "named8", "rest": 2}
    assert tree["given"] == ["steps", "lengths", "name", "rest"]


@pytest.mark.parametrize(
    "body",
    [
        "from enum import Enum\nclass E(Enum):\n    A = 1\nE._convert_('X', 'os', lambda name: True)",
        "from enum import StrEnum\nclass E(StrEnum):\n    A = 'a'\n    def b(self):\n        return super().upper()\n"
        "assert E.A.b()",
        "Training.__init__.__globals__",
        "Training().__class__.__base__",
        "setattr(Training(), '__class__', int)",
        "@dataclass\nclass A:\n    __class__: object = Training\nassert isinstance(A(), Training)",
        "return type(Training)('x', (), {}).mro()",
        "map(partial(list), [range(3)]).__reduce__()",
    ],
)
def test_of_python_only_what_is_named_is_reached(read, body):
    with pytest.raises(InputError, match=r"AttributeError|AssertionError|TypeError|does not state"):
        read(f"{body}\nreturn Training()")
