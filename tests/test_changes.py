"""Tests that the default lane leaves out, and tests that a change touches, on a small project in a git repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import test as touched_tests
from tests.changes import RULES, WHEN_TOUCHED, changed_files, untouched, upstream_base
from tests.import_graph import ImportGraph

ROOT = Path(__file__).parents[1]
COPIED = ("scripts/test.py", "scripts/check.py", "tests/changes.py", "tests/import_graph.py", "tests/profiles.py")
FILES = {
    "pyproject.toml": '[project.entry-points."meshwright.engines"]\nfast = "meshwright.fast.contract"\n'
    'native = "meshwright.native.contract"\n',
    "src/meshwright/__init__.py": "",
    "src/meshwright/__init__.pyi": "from meshwright.api import plan as plan\n",
    "src/meshwright/api.py": "import meshwright.cost",
    "src/meshwright/cost.py": "if TYPE_CHECKING:\n    import meshwright.report\n",
    "src/meshwright/report.py": "",
    "src/meshwright/cli/__init__.py": "",
    "src/meshwright/cli/main.py": "VERBS = ['meshwright.cli.commands.plan:c', 'meshwright.cli.commands.train:c']",
    "src/meshwright/cli/commands/__init__.py": "",
    "src/meshwright/cli/commands/plan.py": "BODY = 'meshwright.api:run'",
    "src/meshwright/cli/commands/train.py": "def run():\n    from meshwright.catalog import rows\n",
    "src/meshwright/catalog/__init__.py": "",
    "src/meshwright/catalog/engines.py": "",
    "src/meshwright/catalog/rows.py": "",
    "src/meshwright/catalog/data/rows.csv": "",
    "src/meshwright/fast/contract.py": "",
    "src/meshwright/fast/keys.json": "{}",
    "src/meshwright/fast/in_other/worker.py": "",
    "src/meshwright/__main__.py": "import meshwright.cost",
    "src/meshwright/native/contract.py": "",
    "docs/plan.md": "```bash\nmeshwright plan --json\n```",
    "docs/train.md": "```bash\nmeshwright train RUN.yaml\n```",
    "docs/python.md": "```python\nimport meshwright as mw\nmw.plan()\n```",
    "docs/fast.md": "engine: fast",
    "docs/example.md": "see examples/runs/tiny.yaml, with `scripts/renew.py`",
    "examples/runs/tiny.yaml": "",
    "examples/runs/unread.yaml": "",
    "scripts/renew.py": "import meshwright.cost",
    "README.md": "",
    ".ci/run": "",
    "tests/test_run.py": "COMMAND = ROOT / '.ci' / 'run'",
    "conftest.py": "import meshwright.report",
    "tests/conftest.py": "import meshwright.report",
    "tests/page/conftest.py": "def text(): return 'plan'\n"
    "class Run:\n    command = 'train'\ndef run(text): return Run()\ndef other(): return 'plan'\n",
    "tests/page/on/test_page.py": "PAGE = 'docs/train.md'",
    "tests/page/on/test_again.py": "AGAIN = 'tests/page/on/test_page.py::test_one'",
    "tests/page/on/test_pages.py": "def test_one(run): ...",
    "tests/page/on/test_text.py": "def test_one(other): ...",
    "tests/page/on/test_marked.py": "pytestmark = pytest.mark.usefixtures('run')",
    "tests/page/on/test_folder.py": "FILES = (ROOT / 'examples' / 'runs').glob('*')",
    "tests/page/on/test_module.py": "COMMAND = ['-m', 'meshwright']",
    "tests/page/on/test_api.py": "NAMES = mw.__all__",
    "tests/test_cost.py": "from meshwright import cost",
    "tests/test_train.py": "meshwright('train')",
    "tests/warm_shell.py": "import meshwright.report",
    "tests/deep/test_deep.py": "import meshwright.native.contract",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project as a clone whose upstream is `origin`, without changes."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    for name, text in FILES.items():
        path = origin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(origin, "init", "-q", "-b", "main")
    commit(origin)
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    return clone


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


@pytest.mark.parametrize(
    ("file", "depends", "not_on"),
    [
        ("docs/plan.md", {"commands/plan.py", "api.py", "cost.py"}, {"report.py", "commands/train.py", "rows.csv"}),
        ("docs/train.md", {"commands/train.py", "data/rows.csv", "catalog/__init__.py"}, {"cost.py"}),
        ("docs/python.md", {"api.py", "cost.py"}, {"cli/commands/plan.py"}),
        ("docs/fast.md", {"fast/contract.py"}, {"native/contract.py"}),
        ("tests/test_cost.py", {"cost.py", "report.py"}, {"api.py"}),  # the conftest of its folder imports the report
        ("tests/test_train.py", {"catalog/rows.py"}, {"cost.py"}),
        ("tests/deep/test_deep.py", {"native/contract.py"}, {"report.py", "fast/contract.py"}),
        ("tests/page/on/test_page.py", {"docs/train.md", "commands/train.py"}, {"commands/plan.py", "docs/plan.md"}),
        ("tests/page/on/test_again.py", {"docs/train.md"}, {"commands/plan.py"}),
        ("tests/page/on/test_pages.py", {"commands/train.py", "commands/plan.py"}, {"src/meshwright/report.py", ".md"}),
        ("tests/page/on/test_marked.py", {"commands/train.py"}, {"src/meshwright/report.py"}),
        ("tests/page/on/test_folder.py", {"runs/tiny.yaml", "runs/unread.yaml"}, {"docs/train.md"}),
        ("tests/page/on/test_module.py", {"src/meshwright/__main__.py", "cost.py"}, {"api.py"}),
        ("tests/page/on/test_api.py", {"src/meshwright/api.py"}, {"commands/plan.py"}),
        ("docs/example.md", {"runs/tiny.yaml", "scripts/renew.py", "cost.py"}, {"unread.yaml", "api.py"}),
        ("docs/fast.md", {"fast/keys.json", "fast/in_other/worker.py"}, set()),
        ("tests/page/on/test_text.py", {"commands/plan.py"}, {"commands/train.py"}),
        ("tests/test_run.py", {".ci/run"}, {"commands/plan.py"}),
    ],
)  # fmt: skip
def test_a_file_depends_on_what_it_imports_and_the_commands_that_it_runs(project, file, depends, not_on):
    reached = set(ImportGraph(project).distances(file))
    assert all(any(name.endswith(end) for name in reached) for end in depends), reached
    assert not any(name.endswith(end) for name in reached for end in not_on), reached


def test_nothing_is_left_out_without_an_upstream_and_all_candidates_are_where_nothing_changed(project):
    assert upstream_base(project.parent / "origin") is None
    assert upstream_base(project / "src") is None
    base = upstream_base(project)
    assert changed_files(project, base) == frozenset()
    documents = ["docs/plan.md", "docs/train.md"]
    assert untouched(project, documents, changed=frozenset()) == frozenset(documents)


def test_a_change_brings_back_what_depends_on_it_committed_or_not(project):
    base = upstream_base(project)
    documents = ["docs/plan.md", "docs/train.md"]

    def left_out() -> frozenset[str]:
        return untouched(project, documents, changed=changed_files(project, base))

    (project / "src/meshwright/cost.py").write_text("CHANGED = 1")
    assert left_out() == {"docs/train.md"}
    commit(project)
    assert left_out() == {"docs/train.md"}
    (project / "src/meshwright/catalog/data/new.csv").touch()
    assert left_out() == frozenset()
    git(project, "clean", "-qfd")
    assert left_out() == {"docs/train.md"}
    git(project, "rm", "-q", "src/meshwright/catalog/data/rows.csv")
    assert upstream_base(project) == base
    assert left_out() == frozenset()  # nobody knows what depended on it
    git(project, "reset", "-q", "--hard", base)
    git(project, "mv", "src/meshwright/catalog/rows.py", "src/meshwright/catalog/lines.py")
    assert left_out() == frozenset()
    git(project, "reset", "-q", "--hard", base)
    (project / "src/meshwright/catalog/data/größe 1.csv").touch()
    assert left_out() == {"docs/plan.md"}
    (project / "src/meshwright/catalog/rows.py").write_text("def f(:")
    assert left_out() == {"docs/plan.md"}
    (project / "pyproject.toml").write_text(FILES["pyproject.toml"] + "# a version\n")
    assert left_out() == frozenset()


def test_the_nearest_tests_of_a_change_come_first(project):
    changed = frozenset({"src/meshwright/cost.py"})
    assert touched_tests.nearest(project, changed, distance=1) == {"tests/test_cost.py": 1}
    further = touched_tests.nearest(project, changed, distance=3)
    assert next(iter(further.items())) == ("tests/test_cost.py", 1)
    assert further["docs/plan.md"] == 3
    assert "docs/train.md" not in further


def test_the_graph_of_this_checkout_has_its_tests():
    """Those of one test that depends on few files."""
    reached = ImportGraph(ROOT).distances("tests/unit/accuracy/test_wording.py")
    assert reached["src/meshwright/accuracy/wording.py"] == 1


def test_any_change_touches_the_rules_of_the_sources(project):
    """They read each file that there is, and import none of them."""
    (project / "examples/new.yaml").touch()
    changed = changed_files(project, upstream_base(project))
    assert untouched(project, [*RULES, "docs/plan.md"], changed=changed) == {"docs/plan.md"}
    assert untouched(project, RULES, changed=frozenset()) == RULES


@pytest.mark.when_touched  # by any change of what it looks at, as its own file depends on all of it
@pytest.mark.parametrize(
    ("file", "depends"),
    [
        ("tests/benchmarks/test_gpu.py", {"benchmarks/gpu.py"}),
        ("tests/benchmarks/test_gpu_results.py", {"benchmarks/gpu_apply.py", "scripts/renew_kernels.py"}),
        ("tests/test_bundle.py", {"scripts/bundle.py"}),
        ("tests/test_check.py", {".ci/run", "scripts/check.py"}),
        ("tests/test_containers.py", {"containers/install.sh", "containers/cuda.Dockerfile"}),
        ("tests/test_rehearse_node.py", {"scripts/rehearse_node.py", "scripts/bundle.py"}),
        ("tests/test_versions.py", {"scripts/test_versions.py"}),
        ("tests/unit/engines/maxtext/test_importing.py", {"src/meshwright/engines/maxtext/lower.py"}),
        ("tests/unit/engines/megatron/test_importing.py", {"src/meshwright/engines/megatron/contract.py"}),
        ("tests/unit/engines/torchtitan/test_lower.py", {"src/meshwright/engines/torchtitan/lower.py"}),
    ],
)
def test_what_is_left_out_depends_on_what_it_tests(graph, file, depends):
    assert file.startswith(WHEN_TOUCHED)
    assert depends <= set(graph.distances(file))


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    """The graph of this checkout."""
    return ImportGraph(ROOT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["src/meshwright/cost.py", "--list"], "1 tests/test_cost.py"),
        (["--changed", "--since", "no-such-commit"], "no commit: no-such-commit"),
        (["absent.py"], "no such file in this checkout: "),
        (["../"], "no such file in this checkout: "),
        ([], "--changed"),
    ],
)
def test_the_script_lists_tests_and_refuses_bad_input(project, arguments, words):
    """Its copy in the small project: the graph of this checkout takes seconds."""
    for name in COPIED:
        (project / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    done = subprocess.run([sys.executable, "scripts/test.py", *arguments], cwd=project, text=True, capture_output=True)
    assert words in done.stdout + done.stderr
    assert done.returncode == (0 if "--list" in arguments else 2)
