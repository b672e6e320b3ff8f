"""Shared options: lists of numbers, times, and choices that are read when they are needed."""

from __future__ import annotations

import sys

import click
import pytest

from meshwright.cli import options
from meshwright.cli.main import group
from meshwright.cli.options import EngineChoice, PathType, budget_option, numbers
from meshwright.cli.question import JoinedType
from meshwright.errors import InputError

parse = numbers(low=0, high=100, example="1,2", word="auto")


def parsed(text):
    option = click.Option(["--workers"])
    return parse(click.Context(click.Command("probe")), option, text)


@pytest.mark.parametrize(
    ("text", "found"), [(None, None), ("auto", None), (" auto ", None), ("4,2,2", (2, 4)), ("0, 1_00,", (0, 100))]
)
def test_numbers_are_ascending_and_each_once(text, found):
    assert parsed(text) == found


@pytest.mark.parametrize(("text", "got"), [("1,101", "101"), ("-1", "-1"), ("x", "x"), (",", ","), ("1.5", "1.5")])
def test_a_wrong_number_is_named(text, got):
    with pytest.raises(InputError) as caught:
        parsed(text)
    assert caught.value.message == (f"--workers has a wrong number: got {got!r}, allowed: auto, or 0 to 100, as in 1,2")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("180s", 180), ("3m", 180), ("1.5h", 5400)])
def test_a_budget_is_in_seconds(text, seconds):
    command = click.command()(budget_option(default="1s", help="")(lambda budget_s: budget_s))
    assert command.make_context("probe", ["--budget", text]).params == {"budget_s": seconds}


def test_engines_are_looked_for_each_time(monkeypatch):
    names, choice = ["a"], EngineChoice()
    module = type("Module", (), {"names": staticmethod(lambda: tuple(names))})
    monkeypatch.setitem(sys.modules, "tests_probe", module)
    monkeypatch.setattr(options, "PLANNING_NAMES", "tests_probe:names")
    assert choice.choices == ("a",)
    names.append("b")
    assert choice.convert("b", None, None) == "b"
    with pytest.raises(click.BadParameter, match="--engine any"):
        choice.convert("c", None, None)


@pytest.mark.parametrize("text", ["", ",", "16,,32", ",16"])
def test_an_empty_item_of_a_list_is_refused(text):
    with pytest.raises(click.BadParameter, match="has an empty item"):
        JoinedType(click.INT).convert(text, None, None)
    assert JoinedType(click.INT).convert("16, 32,", None, None) == (16, 32)


def parameters(group, context):
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from parameters(command, context)
        else:
            yield from ((f"{name} {parameter.name}", parameter) for parameter in command.params)


def test_no_path_of_a_command_is_empty():
    """An empty one would be the current folder: that of a variable that is not set."""
    context = click.Context(group)
    paths = {name: p.type for name, p in parameters(group, context) if isinstance(p.type, click.Path)}
    assert len(paths) > 40
    # A question takes text and checks it; other commands take paths.
    assert [name for name, kind in paths.items() if not isinstance(kind, PathType) and kind.type is not None] == []


def test_an_empty_path_is_refused(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = meshwright("examples", "")
    assert outcome.exit_code == 2
    assert "the path is empty" in outcome.stderr
    assert list(tmp_path.iterdir()) == []
