"""Engines of other packages: what is read without importing them, and what is said when they are broken."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from meshwright import runfile
from meshwright.catalog import engines
from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError, MissingDependencyError, RunFileError, UnknownNameError
from meshwright.planner import Rule, Scope, engine_facts
from meshwright.planner.rules import RULES, rules_of


def test_names_and_facts_import_no_contract(engine_package, install_engines):
    engine_package("mine", facts="FACTS = 'known'", contract="raise RuntimeError('imported')")
    install_engines(mine="mine.contract", other="nowhere.contract")
    assert catalog.engine_names() == ("mine", "other")
    assert catalog.engine_facts("mine") == "known"
    with pytest.raises(RuntimeError, match="imported"):
        engines.engine_contract("mine")


@pytest.mark.parametrize(
    ("value", "facts", "kind", "text"),
    [
        ("nowhere.contract", "", MissingDependencyError, "engine mine cannot be imported: No module named 'nowhere'"),
        ("mine.contract", "", MissingDependencyError, "has no attribute 'FACTS'"),
        ("mine.contract", "import nothing_such", MissingDependencyError, "No module named 'nothing_such'"),
        ("contract", "", InputError, "lies in no package"),
    ],
)
def test_a_broken_engine_is_named(engine_package, install_engines, value, facts, kind, text):
    engine_package("mine", facts=facts)
    install_engines(mine=value)
    with pytest.raises(kind, match=text):
        catalog.engine_facts("mine")


def test_an_unknown_engine_names_the_nearest(install_engines):
    install_engines(mine="mine.contract")
    with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
        catalog.engine_facts("mina")


def test_one_name_of_two_packages_is_refused(monkeypatch, install_engines):
    install_engines()
    points = EntryPoints(EntryPoint("mine", f"{name}.contract", engines.ENTRY_POINTS) for name in ("a", "b"))
    monkeypatch.setattr(engines, "entry_points", lambda **which: points.select(**which))
    assert catalog.engine_names() == ("mine",)
    with pytest.raises(InputError, match=r"keep one of a\.contract, b\.contract"):
        catalog.engine_facts("mine")


def test_run_files_accept_what_is_installed_and_nothing_else(tiny_text, install_engines):
    install_engines(mine="meshwright.engines.native.contract")
    assert runfile.loads(tiny_text, overrides=["engine=mine"]).engine == "mine"
    with pytest.raises(RunFileError, match="unknown value: got 'native', allowed: mine"):
        runfile.loads(tiny_text, overrides=["engine=native"])


def test_without_metadata_a_run_file_says_how_to_install(tiny_text, install_engines):
    install_engines()
    with pytest.raises(RunFileError, match="names no engines"):
        runfile.loads(tiny_text)


def test_rules_of_its_own_stand_where_messages_want_them():
    def named(name: str, after: str | None = None) -> Rule:
        return Rule(name=name, scope=Scope.SHAPE, holds=lambda s, p: True, says=lambda s, p: "", after=after)

    own = (named("last"), named("second", after="devices"))
    names = [rule.name for rule in rules_of(replace(engine_facts("native"), rules=own))]
    assert names == ["devices", "second", *(rule.name for rule in RULES[1:]), "last"]
