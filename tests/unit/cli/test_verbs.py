"""Declarations of verbs: help, examples, options and bodies."""

from __future__ import annotations

import ast
import gc
import inspect
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
from tests.every_member import check_every

from meshwright.cli import main, verbs
from meshwright.cli.output import AS_JSON
from meshwright.cli.question import asked_of
from meshwright.cli.verbs import LazyGroup
from meshwright.specs.precision import PRECISIONS

PRESENT = list(main.VERBS)


def leaves(name: str) -> dict[str, click.Command]:
    """Return the command of a verb, or each command of a group, by the words that a user types."""
    command = main.group.get_command(click.Context(main.group), name)
    assert command is not None
    if not isinstance(command, LazyGroup):
        return {name: command}
    found = {n: command.get_command(click.Context(command), n) for n in command.verbs}
    return {f"{name} {n}": c for n, c in found.items() if c is not None}


def test_help_of_a_verb_has_examples_that_parse(meshwright):
    def check(name):
        for words, command in leaves(name).items():
            outcome = meshwright(*words.split(), "--help")
            assert outcome.exit_code == 0
            lines = [line.strip() for line in outcome.stdout.splitlines()]
            examples = [line for line in lines if line.startswith(f"meshwright {words}")]
            assert examples, f"`meshwright {words} --help` shows no example"
            for example in examples:
                arguments = shlex.split(example, comments=True)[1 + len(words.split()) :]
                command.make_context(words, arguments)  # raises a usage error for an option that is gone

    check_every(PRESENT, check)


def test_the_body_of_a_verb_takes_its_options():
    def check(name):
        if name == "bench" and find_spec("torch") is None:
            return
        for command in leaves(name).values():
            assert isinstance(command, verbs.LazyCommand)
            parameters = inspect.signature(command.function()).parameters.values()
            taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            given: dict[str, object] = {str(p.name): None for p in command.params if p.name != AS_JSON}
            if command.question is not None:
                given["asked"] = asked_of(command.question, given)
            options = {*given}
            assert taken <= options
            takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
            assert takes_more or options <= taken

    check_every(PRESENT, check)


def test_the_help_of_a_verb_begins_with_its_line_in_the_table():
    def check(name):
        command = main.group.get_command(click.Context(main.group), name)
        assert command.help.partition("\n")[0] == main.VERBS[name].help
        if isinstance(command, LazyGroup):
            for words, leaf in leaves(name).items():
                assert leaf.help.partition("\n")[0] == command.verbs[words.split()[1]].help

    check_every(PRESENT, check)


def test_every_option_and_every_verb_is_explained():
    def check(name):
        for command in leaves(name).values():
            assert len(command.help.split("\n\n")) > 1, "a summary, and at least one paragraph"
            for parameter in command.params:
                if isinstance(parameter, click.Option):
                    assert parameter.help
                    assert parameter.is_flag or parameter.metavar or isinstance(parameter.type, click.Choice)

    check_every(PRESENT, check)


def test_only_the_mechanism_imports_inside_a_function():
    """Names for type checkers are excepted, and so is what `require_torch` guards: there is none at present."""
    found = {}
    for path in sorted(Path(verbs.__file__).parent.rglob("*.py")):
        inside = [
            node.lineno
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        if inside:
            found[path.name] = inside
    assert found == {}


def test_the_help_names_every_precision(meshwright):
    printed = meshwright("plan", "--help").stdout
    assert [name for name in PRECISIONS if not re.search(rf"\b{name}\b", printed)] == []


def test_every_row_of_the_table_is_of_a_command():
    """A renamed command would lose its examples."""
    groups = {
        name for name in PRESENT if isinstance(main.group.get_command(click.Context(main.group), name), LazyGroup)
    }
    assert {*verbs.TABLE["examples"]} == groups.union(*map(leaves, PRESENT))


def test_every_verb_has_json():
    def check(name):
        for command in leaves(name).values():
            assert "--json" in {option for parameter in command.params for option in parameter.opts}

    check_every(PRESENT, check)


def test_garbage_is_collected_while_a_command_runs():
    """`main` stops it while code is imported, as each collection would visit all of that."""
    seen = []
    command = verbs.LazyCommand("seen", body=None, callback=lambda: seen.append(gc.isenabled()))
    gc.disable()
    try:
        command.main([], standalone_mode=False)
    finally:
        gc.enable()
        gc.unfreeze()
    assert seen == [True]
