"""Files that a test or a document depends on, read from the sources without importing them.

A file depends on

- what it imports, at its top and inside functions, but not for type checkers alone;
- modules that its strings name (`"meshwright.cli.plan:run"`): the command line and the API import these when used;
- commands (`"plan"` in a test, `meshwright plan` in a document) and names of the Python API (`mw.plan`);
- the `conftest.py` files above a test, what the fixtures that it takes use there, and the data of a module's package;
- tests, pages, run files and other files of the repository that a test or a page names, and all of a folder that a
  test names and looks through.

The graph errs on the large side in all but one place: other imports of a `conftest.py`, and those of a server of warm
processes, count only for tests in the same folder. Such a file prepares many tests, and few need all that it imports.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "meshwright"
COMMANDS = f"{PACKAGE}.cli.main"
"""The module that opens commands by name. Tests depend on the commands that they run alone."""
DECLARATIONS = f"{PACKAGE}.cli.commands"
"""The package with a module for each command."""
ENGINES = f"{PACKAGE}.catalog.engines"
"""The module that opens engines by name. Plans depend on each engine's facts, and trainings on the engine they name."""
MODULE_NAME = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::[\w.]+)?")
COMMAND_LINE = re.compile(rf"\b{PACKAGE} ([a-z]+)")
API_NAME = re.compile(r"\bmw\.(\w+)|\bimport meshwright as mw\b")
FOLDERS = ("src", "tests", "benchmarks", "scripts")
FOLDERS_OF_FILES = (".ci", "docs", "examples", "benchmarks", "scripts", "containers", "tests")
"""Folders of files that a test names and does not import. Those at the top of the repository are among them, too."""
LOOKS_THROUGH = frozenset({"glob", "rglob", "iterdir", "walk", "listdir"})
PATH_IN_TEXT = re.compile(r"[\w.-]+(?:/[\w.-]+)+|[\w-]+\.(?:yaml|jsonl?|ipynb|py|csv|toml)\b")
SHARED = re.compile(r"(.*/)?(conftest|warm\w*)\.py")
"""Files that prepare tests. What they import counts for tests in the same folder."""


class ImportGraph:
    """Dependencies between the files below `root`. Paths are relative to it, with slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def distances(self, file: str) -> dict[str, int]:
        """Return each file that `file` depends on, with the number of imports between them. `file` itself has 0."""
        distance, waiting = {file: 0}, deque([file])
        while waiting:
            name = waiting.popleft()
            if SHARED.fullmatch(name) and Path(name).parent != Path(file).parent:
                continue
            for found in self._dependencies(name):
                if found not in distance:
                    distance[found] = distance[name] + 1
                    waiting.append(found)
        return distance

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each module."""
        found = {}
        for folder in FOLDERS:
            for path in (self.root / folder).rglob("*.py"):
                name = path.relative_to(self.root / folder if folder == "src" else self.root).with_suffix("")
                parts = name.parts[:-1] if name.name == "__init__" else name.parts
                found[".".join(parts)] = path.relative_to(self.root).as_posix()
        return found

    @cached_property
    def _modules(self) -> dict[str, str]:
        """The module of each file."""
        return {file: module for module, file in self._files.items()}

    @cached_property
    def _commands(self) -> dict[str, str]:
        """The module that declares each command."""
        return {m.rpartition(".")[2].strip("_"): m for m in self._files if m.startswith(f"{DECLARATIONS}.")}

    @cached_property
    def _api(self) -> dict[str, str]:
        """The module of each name of the Python API."""
        stub = (self.root / self._files[PACKAGE]).with_suffix(".pyi")
        return {name: self._home(module, name) for module, name in Source.read(stub).imports}

    @cached_property
    def _engines(self) -> dict[str, str]:
        """The module of each engine's contract."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["entry-points"][f"{PACKAGE}.engines"]

    @cache  # noqa: B019 - a graph lives as long as its process
    def _dependencies(self, file: str) -> tuple[str, ...]:
        path = self.root / file
        if file == self._files[PACKAGE]:
            return ()  # it imports what its user names
        if file.endswith(".md"):
            names = self._names_in_document(path)
        elif path.suffix == ".py":
            names = self._names_in_source(file)
        else:
            names = iter(())
        files = {self._files[name] for name in names if name in self._files}
        return tuple(sorted((files | set(self._beside(file)) | set(self._named_files(file))) - {file}))

    def _names_in_document(self, path: Path) -> Iterator[str]:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from ("tests.warm_shell", COMMANDS)
        yield from self._named(COMMAND_LINE.findall(text))
        yield from (module for name, module in self._engines.items() if re.search(rf"\b{name}\b", text))
        yield from (self._api[name] for name in API_NAME.findall(text) if name in self._api)
        yield from MODULE_NAME.findall(text)

    def _names_in_source(self, file: str) -> Iterator[str]:
        for source in self._sources(file):
            yield from self._names_of(source, file)

    @cache  # noqa: B019 - as above
    def _sources(self, file: str) -> tuple[Source, ...]:
        """Return a file's own source, and what the fixtures that a test takes use in each `conftest.py` above it."""
        own = Source.read(self.root / file)
        if not file.startswith("tests/") or SHARED.fullmatch(file):
            return (own,)
        above = [name for name in self._beside(file) if name.endswith("/conftest.py")]
        fixtures = own.parameters | own.strings  # of usefixtures
        return (own, *(self._conftest(name).used_by(fixtures) for name in above))

    @cache  # noqa: B019 - as above
    def _conftest(self, file: str) -> Definitions:
        return Definitions.read(self.root / file)

    def _named_files(self, file: str) -> Iterator[str]:
        """Yield the files that a page, a test or a script names: tests by their path, others by its end."""
        if file.startswith("src/"):
            return
        if not file.endswith(".py"):
            if file.endswith(".md"):
                text = (self.root / file).read_text(encoding="utf-8", errors="replace")
                words = {word for word in PATH_IN_TEXT.findall(text) if not word.endswith(".md")}
                yield from self._with_ends(words)  # a link to a page runs none of its commands
            return
        sources = self._sources(file)
        words = {word for source in sources for word in source.strings}
        yield from self._with_ends(words)
        for word in words:
            test = word.partition("::")[0]
            if test.startswith("tests/"):
                yield from (name for name in self._modules if name == test or name.startswith(f"{test}/"))
        if any(source.attributes & LOOKS_THROUGH for source in sources):
            folders = {f"/{word.strip('./')}/" for word in words if word.strip("./")}
            for names in self._others.values():
                yield from (name for name in names if any(folder in f"/{name}" for folder in folders))

    def _with_ends(self, words: Iterable[str]) -> Iterator[str]:
        for word in words:
            end = word.lstrip("./")
            yield from (name for name in self._others.get(Path(end).name, ()) if f"/{name}".endswith(f"/{end}"))
            if end in self._modules and not end.startswith(("src/", "tests/")):
                yield end

    @cached_property
    def _others(self) -> dict[str, list[str]]:
        """Files that are no Python source, by name."""
        found = defaultdict[str, list[str]](list)
        below = (path for folder in FOLDERS_OF_FILES for path in (self.root / folder).rglob("*"))
        for path in (*self.root.glob("*.*"), *below):
            if path.suffix not in {".py", ".pyc"} and path.is_file():
                found[path.name].append(path.relative_to(self.root).as_posix())
        return found

    def _names_of(self, source: Source, file: str) -> Iterator[str]:
        for module, name in source.imports:
            of_api = self._api.get(name) if module == PACKAGE else None
            yield of_api or self._home(module, name)
            if name == "engine_contract":
                yield self._engines["native"]  # other engines are named where they are used
        yield from (self._api.get(name, PACKAGE) for name in source.names_of_api)
        if "__all__" in source.names_of_api:
            yield from self._api.values()
        if file == self._files.get(ENGINES):
            yield from (f"{contract.rpartition('.')[0]}.facts" for contract in self._engines.values())
        if file != self._files[COMMANDS]:
            yield from (m[1] for text in source.strings if (m := MODULE_NAME.fullmatch(text)))
        if not file.startswith("src/"):
            yield from self._named(source.strings)
            if PACKAGE in source.strings:  # python -m meshwright
                yield f"{PACKAGE}.__main__"

    def _named(self, words: Iterable[str]) -> Iterator[str]:
        """Yield the modules of commands and engines among `words`."""
        for word in words:
            yield from (table[word] for table in (self._commands, self._engines) if word in table)

    def _home(self, module: str, name: str) -> str:
        """Return the module that an imported name is, or the module that holds it."""
        whole = f"{module}.{name}"
        return whole if whole in self._files else module

    def _beside(self, file: str) -> Iterator[str]:
        """Packages above a module, `conftest.py` above a test, and data of the module's package."""
        parts = Path(file).parts
        for depth in range(1, len(parts)):
            for name in ("__init__.py", "conftest.py"):
                above = "/".join((*parts[:depth], name))
                if (self.root / above).is_file():
                    yield above
        if parts[0] == "tests" or file.endswith(".md"):
            yield "conftest.py"
        if file.endswith(".py"):
            yield from self._data_of(str(Path(file).parent))
        if parts[:2] == ("tests", "engines") and len(parts) > 3:  # programs and shims that processes of a test start
            yield from (name for name in self._modules if name.startswith("/".join(parts[:3])) and "test_" not in name)

    @cache  # noqa: B019 - as above
    def _data_of(self, folder: str) -> tuple[str, ...]:
        """Files of a package that are no modules of it: beside them, in `data`, and code for other programs."""
        top = self.root / folder
        found = [*top.glob("*.*"), *(top / "data").rglob("*"), *top.glob("in_*/**/*.py")]
        others = [p for p in found if p.is_file() and (p.suffix not in {".py", ".pyc"} or p.parent != top)]
        return tuple(p.relative_to(self.root).as_posix() for p in others if p.suffix != ".pyc")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Imports and names in a Python file."""

    imports: frozenset[tuple[str, str]]
    """Modules and what is imported from them, without imports that type checkers alone read."""
    strings: frozenset[str]
    names_of_api: frozenset[str]
    """`plan` in `mw.plan`."""
    parameters: frozenset[str]
    """Parameters of all functions. Those of a test are fixtures."""
    names: frozenset[str]
    attributes: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read the file. One that is no Python, as an editor leaves it, names nothing."""
        try:
            return cls.of([ast.parse(path.read_text(encoding="utf-8"))])
        except (SyntaxError, ValueError):
            return cls.of([])

    @classmethod
    def joined(cls, sources: Iterable[Source]) -> Source:
        """Return the sources as one."""
        listed = [cls.of([]), *sources]
        return cls(**{f.name: frozenset().union(*(getattr(s, f.name) for s in listed)) for f in fields(cls)})

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> Source:
        """Read these parts of a file in one pass."""
        imports, for_types = set[tuple[str, str]](), set[tuple[str, str]]()
        strings, names_of_api, parameters = set[str](), set[str](), set[str]()
        names, attributes = set[str](), set[str]()
        waiting: list[tuple[ast.AST, set[tuple[str, str]]]] = [(node, imports) for node in nodes]
        while waiting:
            node, found = waiting.pop()
            match node:
                case ast.Import():
                    found |= {(alias.name, "") for alias in node.names}
                case ast.ImportFrom(module=str(module)):
                    found |= {(module, alias.name) for alias in node.names}
                case ast.Constant(value=str(text)):
                    strings.add(text)
                case ast.Attribute(value=ast.Name(id="mw"), attr=name):
                    names_of_api.add(name)
                case ast.Attribute(attr=name):
                    attributes.add(name)
                case ast.arg(arg=name):
                    parameters.add(name)
                case ast.Name(id=name):
                    names.add(name)
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.iter_child_nodes(node):
                in_block = is_for_types and child not in node.orelse
                waiting.append((child, for_types if in_block else found))
        return cls(
            imports=frozenset(imports),
            strings=frozenset(strings),
            names_of_api=frozenset(names_of_api),
            parameters=frozenset(parameters),
            names=frozenset(names),
            attributes=frozenset(attributes),
        )


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """Definitions and imports at the top of a `conftest.py`, by name."""

    sources: dict[str, Source]

    @classmethod
    def read(cls, path: Path) -> Definitions:
        """Read the file. One that is no Python has none."""
        nodes = dict[str, ast.AST]()
        try:
            body = ast.parse(path.read_text(encoding="utf-8")).body
        except (SyntaxError, ValueError):
            body = []
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    nodes[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]):
                    nodes[name] = node
                case ast.Import(names=names):
                    nodes |= {alias.asname or alias.name: ast.Import(names=[alias]) for alias in names}
                case ast.ImportFrom(module=module, names=names):
                    nodes |= {
                        alias.asname or alias.name: ast.ImportFrom(module=module, names=[alias]) for alias in names
                    }
        return cls(sources={name: Source.of([node]) for name, node in nodes.items()})

    def used_by(self, names: Iterable[str]) -> Source:
        """Return the fixtures of these names, with all that they use here, fixtures that they take included."""
        taken, waiting = dict[str, Source](), [name for name in names if name in self.sources]
        while waiting:
            name = waiting.pop()
            if name not in taken:
                taken[name] = self.sources[name]
                waiting += [n for n in taken[name].names | taken[name].parameters if n in self.sources]
        return Source.joined(taken.values())
