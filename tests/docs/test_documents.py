"""Documents hang together: links lead somewhere, every page can be found, the glossary is the vocabulary."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from meshwright import specs
from meshwright.cli.main import VERBS
from meshwright.runfile.schema import all_fields

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^- \*\*(?P<term>[^*]+)\*\*(?P<classes>[^:]*): ", re.MULTILINE)
PRESENT = [name for name, verb in VERBS.items() if importlib.util.find_spec(verb.target.partition(":")[0])]
NOT = re.compile(r" ?\*Not: (?P<words>[^*]+)\.\*")
OTHERS = re.compile(r"^## Terms of other projects\n.*\Z", re.MULTILINE | re.DOTALL)
"""The section of the glossary that leads from their terms to ours."""

LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def local_links(page: Path) -> list[Path]:
    targets = [m["target"] for m in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [(page.parent / t).resolve() for t in targets if "://" not in t and not t.startswith("mailto:")]


def banned_words() -> list[str]:
    text = GLOSSARY.read_text(encoding="utf-8")
    return sorted({word.strip() for m in NOT.finditer(text) for word in m["words"].split(",")})


def banned_in(text: str) -> list[str]:
    """Banned words of `text`, also in the plural, outside the glossary's own lists of them."""
    prose = NOT.sub("", OTHERS.sub("", text))
    return [
        word
        for word in banned_words()
        if re.search(rf"\b(?:{word}s?|{re.sub('y$', 'ies', word)})\b", prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(page):
    assert [str(target) for target in local_links(page) if not target.exists()] == []


def test_every_page_can_be_reached_from_the_index():
    reached, todo = set(), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            todo += local_links(page)
    assert sorted(set(PAGES[1:]) - reached) == []


def test_the_glossary_is_alphabetical_and_has_each_term_once():
    terms = [m["term"].lower() for m in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))]
    assert len(terms) > 50
    assert terms == sorted(set(terms), key=lambda term: term.replace("-", " "))


def test_every_public_class_of_the_specs_has_a_glossary_entry():
    named = {
        name
        for entry in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))
        for name in re.findall(r"`(\w+)`", entry["classes"])
    }
    public = set()
    for module_info in pkgutil.iter_modules(specs.__path__, f"{specs.__name__}."):
        module = importlib.import_module(module_info.name)
        classes = inspect.getmembers(module, inspect.isclass)
        public |= {n for n, c in classes if c.__module__ == module.__name__ and not n.startswith("_")}
    assert public - named == set(), "explain these in docs/glossary.md"
    assert named - public == set(), "docs/glossary.md names classes that are gone"


def test_terms_of_other_projects_lead_to_ours():
    terms = {m["term"].lower() for m in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))}
    section = OTHERS.search(GLOSSARY.read_text(encoding="utf-8"))
    assert section is not None
    for term in ("gradient checkpointing", "microbatch", "strategy", "gradient accumulation", "world size"):
        assert term in section[0]
    rows = re.findall(r"^\| (?P<theirs>.+?) \| (?P<ours>.+?) \|$", section[0], re.MULTILINE)[2:]
    keys = re.findall(r"`(\w+)\.(\w+)`", section[0])
    assert len(rows) > 10
    for _, ours in rows:
        assert "`" in ours or any(term in ours.lower() for term in terms), ours
    for name, key in keys:
        assert f"{name}.{key}" in all_fields(), f"{name}.{key} is no key of a run file"


def test_the_banned_words_are_known():
    assert {"job", "strategy", "experiment"} <= set(banned_words())
    assert banned_in("Two strategies, and an Experiment.") == ["experiment", "strategy"]
    assert banned_in("- **run**: it. *Not: experiment.*") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_one_word_per_idea_in_documents(page):
    assert banned_in(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", ["", *PRESENT])
def test_one_word_per_idea_in_help(meshwright, name):
    outcome = meshwright(*name.split(), "--help")
    assert outcome.exit_code == 0, outcome.stderr
    assert banned_in(outcome.stdout) == []
