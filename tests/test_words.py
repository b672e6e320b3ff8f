"""The vocabulary of the source: identifiers and docstrings use the terms of docs/glossary.md, and names are unique."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
GLOSSARY = ROOT / "docs" / "glossary.md"

NOT = re.compile(r"\*Not: (?P<terms>[^*]+)\.\*")
INDIRECT = re.compile(r"^(?:What|How|Where|Whether|Who|Which|Why|When)\b")
UNCLEAR = (
    "adding_up", "alone", "beside", "crowd", "crowded", "damage", "described", "divided", "exchange", "first_weight",
    "left_out", "meeting", "nobody", "stretch", "surface", "told", "twin", "words",
)  # fmt: skip
"""Parts of names that had to be explained to new readers; the glossary has the field's terms for them."""

THEIR_TERMS = {
    "job": ("launch", "cli/launch.py", "training/processes.py"),  # schedulers and torchrun call it so
    "strategy": ("engines",),  # an option of theirs
    "words": ("engines/megatron/megatron_lm", "engines/megatron/shell_scripts"),  # POSIX: what a shell splits into
}

UNNAMED = (ast.expr_context, ast.Constant, ast.operator, ast.boolop, ast.unaryop)
"""Nodes that hold no definition."""
SCHEDULERS = ("tests/engines/launch", "tests/unit/launch")
"""Tests of what schedulers run, who call it a job."""


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Names in a module, without its syntax tree, which would stay in memory for all later tests."""

    where: str  # below the package
    defined: tuple[tuple[int, str], ...]  # line and name; the first is the module's
    docstrings: tuple[tuple[int, str], ...]  # line and first line
    public_classes: tuple[str, ...]


@cache
def modules() -> tuple[ModuleNames, ...]:
    return tuple(names_of(path, root=SOURCE) for path in sorted(SOURCE.rglob("*.py")))


@cache
def others() -> tuple[ModuleNames, ...]:
    """Tests, benchmarks and scripts."""
    folders = (ROOT / name for name in ("benchmarks", "scripts", "tests"))
    return tuple(names_of(path, root=ROOT) for folder in folders for path in sorted(folder.rglob("*.py")))


def names_of(path: Path, *, root: Path) -> ModuleNames:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.parent.name if path.name == "__init__.py" else path.stem
    defined, docstrings = [(1, name)], []
    for node in nodes_of(tree):
        defined += names_in(node)
        docstrings += docstrings_in(node)
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    return ModuleNames(
        where=path.relative_to(root).as_posix(),
        defined=tuple(defined),
        docstrings=tuple(docstrings),
        public_classes=tuple(classes),
    )


def nodes_of(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node but loads and constants, in half the time of `ast.walk`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.__dict__.values():
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, UNNAMED):
                waiting.append(value)


def docstrings_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first line of a docstring of a module, class or function, or below a constant or field."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield getattr(node, "lineno", 1), docstring.strip().splitlines()[0]
    for before, after in pairwise(body):
        match before, after:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield after.lineno, text.strip().splitlines()[0]


def banned() -> frozenset[str]:
    """Terms that the glossary rejects, as parts of identifiers, and those of `UNCLEAR`."""
    return rejected() | frozenset(UNCLEAR)


@cache
def rejected() -> frozenset[str]:
    """Terms that the glossary rejects, as parts of identifiers."""
    lists = (m["terms"] for m in NOT.finditer(GLOSSARY.read_text(encoding="utf-8")))
    terms = (term.strip() for listed in lists for term in listed.split(","))
    return frozenset(term.replace(" ", "_").replace("-", "_").lower() for term in terms)


def parts(name: str) -> str:
    """`name` in snake case, with a bar at each end: `_StepLog` is `_step_log_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower().strip('_')}_"


@cache
def banned_part(name: str, terms: frozenset[str]) -> str | None:
    """The banned term that `name` holds, in singular or plural."""
    found = re.search(rf"_({'|'.join(sorted(terms))})s?_", parts(name))
    return found and found[1]


def names_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of a definition: class, function, parameter, variable, field."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.lineno, node.name
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.id


def test_parts_of_names():
    assert parts("_StepLog") == "_step_log_"
    assert banned_part("MeasuredExchanges", frozenset({"exchange"})) == "exchange"
    assert banned_part("words_of", frozenset({"word"})) == "word"
    assert banned_part("password", frozenset({"word"})) is None


def test_identifiers_use_the_terms_of_the_glossary():
    terms, found = banned(), []
    for module in modules():
        allowed = {term for term, rooms in THEIR_TERMS.items() if module.where.startswith(rooms)}
        for line, name in module.defined:
            if (term := banned_part(name, terms - allowed)) is not None:
                found.append(f"{module.where}:{line}: {name} ({term})")
    assert "\n".join(found) == ""


def test_identifiers_of_tests_and_scripts_use_them_too():
    terms = rejected()
    found = [
        f"{module.where}:{line}: {name} ({term})"
        for module in others()
        if not module.where.startswith(SCHEDULERS)
        for line, name in module.defined
        if (term := banned_part(name, terms)) is not None
    ]
    assert "\n".join(found) == ""


def test_docstrings_open_with_a_verb_or_a_noun():
    found = [
        f"{module.where}:{line}: {docstring}"
        for module in (*modules(), *others())
        for line, docstring in module.docstrings
        if INDIRECT.match(docstring)
    ]
    assert "\n".join(found) == ""


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for module in modules():
        for name in module.public_classes:
            homes[name].append(module.where)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
