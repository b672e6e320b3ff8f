"""The vocabulary of the source: identifiers and docstrings use the terms of docs/glossary.md, and names are unique."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
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
    "words": (
        "engines/megatron/megatron_lm",
        "engines/megatron/shell_scripts",
    ),  # POSIX: what a shell splits into
}


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def banned() -> set[str]:
    """Terms that the glossary rejects, as parts of identifiers, and those of `UNCLEAR`."""
    rejected = {
        t.strip() for m in NOT.finditer(GLOSSARY.read_text(encoding="utf-8")) for t in m["terms"].split(",")
    }
    return {term.replace(" ", "_").replace("-", "_").lower() for term in rejected} | set(UNCLEAR)


def parts(name: str) -> str:
    """`name` in snake case, with a bar at each end: `_StepLog` is `_step_log_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower().strip('_')}_"


def banned_part(name: str, terms: set[str]) -> str | None:
    """The banned term that `name` holds, in singular or plural."""
    return next((t for t in sorted(terms) if re.search(rf"_{t}s?_", parts(name))), None)


def defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each definition: classes, functions, parameters, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_parts_of_names():
    assert parts("_StepLog") == "_step_log_"
    assert banned_part("MeasuredExchanges", {"exchange"}) == "exchange"
    assert banned_part("words_of", {"word"}) == "word"
    assert banned_part("password", {"word"}) is None


def test_identifiers_use_the_terms_of_the_glossary():
    terms, found = banned(), []
    for path, tree in modules().items():
        where = path.relative_to(SOURCE).as_posix()
        allowed = {term for term, rooms in THEIR_TERMS.items() if where.startswith(rooms)}
        for line, name in defined(tree):
            if (term := banned_part(name, terms - allowed)) is not None:
                found.append(f"{where}:{line}: {name} ({term})")
    assert "\n".join(found) == ""


def test_docstrings_open_with_a_verb_or_a_noun():
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and INDIRECT.match(docstring):
                    found.append(
                        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}"
                    )
    assert "\n".join(found) == ""


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
