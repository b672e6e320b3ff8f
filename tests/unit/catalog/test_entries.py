import tomllib

import pytest

from meshwright.catalog import entries
from meshwright.catalog.entries import CatalogKind, entry, names
from meshwright.errors import UnknownNameError

ALL = [(kind, name) for kind in CatalogKind for name in names(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_value_has_a_source(kind, name):
    found = entry(kind, name)
    leaves = _leaves(found.values)
    assert leaves
    assert all(found.source_of(path) for path in leaves)
    assert "published" in found.sources or all(f"published.{key}" in found.sources for key in found.published)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_notes_speak_of_things_that_exist(kind, name):
    found = entry(kind, name)
    known = {*_leaves(found.values), *found.values, "aliases", "published", "all"}
    known |= {f"published.{key}" for key in found.published}
    assert set(found.sources) <= known
    assert found.title
    assert found.title != found.name


@pytest.mark.parametrize("kind", list(CatalogKind))
def test_no_alias_means_two_things(kind):
    owners = {}
    for name in names(kind):
        for alias in (name, *entry(kind, name).aliases):
            key = alias.lower().replace("_", "-").replace(" ", "-")
            assert owners.setdefault(key, name) == name


def test_looking_up_a_name_reads_one_file(monkeypatch):
    read = []
    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: read.append(text) or real(text))
    entries._read.cache_clear()
    entry.cache_clear()
    assert entry(CatalogKind.MODEL, "mixtral-8x7b").name == "mixtral-8x7b"
    assert len(read) == 1


def test_names_are_in_natural_order():
    found = names(CatalogKind.MODEL)
    assert found.index("llama3-8b") < found.index("llama3-70b") < found.index("llama3.1-405b")


def test_unknown_name_has_the_nearest_known_one():
    with pytest.raises(UnknownNameError, match="did you mean 'mi355x'"):
        entry(CatalogKind.ACCELERATOR, "mi335x")


def test_source_of_a_nested_value_falls_back_to_its_parent_then_to_all():
    found = entry(CatalogKind.ACCELERATOR, "gaudi2")
    assert found.source_of("peak_flops_per_s.bf16") == found.sources["peak_flops_per_s"]
    assert found.source_of("vendor") == found.sources["all"]


def _leaves(values, prefix=""):
    paths = []
    for key, value in values.items():
        paths += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return paths
