"""The software of a run in an exported file, whose engine has no settings for it: a comment of one line.

    # meshwright stack: {framework: primus-megatron, preset: recipe, vintage: 2025.7}

The line also has the switches that the run states and the engine has no setting for (`attention_tile: 512`), and all of
them where the estimate is of another program, whose switches the engine's settings are not. The estimate of an imported
run reads it. A file without the line has the newest software.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from meshwright.catalog.stacks import notes_on_framework, stack_facts, switches_of
from meshwright.engines.base import Imported
from meshwright.errors import InputError
from meshwright.planner.engines import engine_facts
from meshwright.specs.hardware import Stack
from meshwright.specs.run import NATIVE, Run

KEYS = ("framework", "preset", "vintage")
"""Keys of a run file's `stack` that no engine has a setting for."""

FORM = (
    "# meshwright stack: {framework: NAME, preset: engine or recipe, vintage: 2025.7}, or fewer of these keys, and "
    "switches that the engine does not set"
)
_LINE = re.compile(r"^#[ \t]*meshwright stack:.*$", re.MULTILINE)


def software_line(run: Run, *, lacks: Collection[str] = ()) -> str:
    """Return the line with its end; empty where the run states nothing for which the file has no setting.

    `lacks`: switches that the engine sets elsewhere than in the file.
    """
    from meshwright.runfile.writing import given_section

    given = given_section(run, "stack")
    line = {key: given[key] for key in KEYS if given.get(key) is not None}
    stated = run.stack.features.stated()
    line |= switches_without_setting(run, stated) | {key: stated[key] for key in lacks if key in stated}
    if is_of_another_program(run.engine, run.stack.framework):
        line |= stated | {"compiles": bool(switches_of(run).compiles)}
    return f"# meshwright stack: {json.dumps(line)}\n".replace('"', "") if line else ""


def is_of_another_program(engine: str, framework: str | None) -> bool:
    """Return True if `framework`, which estimates are of, is another program than `engine` on any accelerators."""
    return framework is not None and bool(notes_on_framework(engine, Stack(framework=framework), vendor=""))


def switches_without_setting(run: Run, switches: Mapping[str, Any], *, is_export: bool = True) -> dict[str, Any]:
    """Return those of `switches` that the run's engine does not set; `is_export`: that its files do not either."""
    facts = engine_facts(run.engine)
    known = dict(facts.switches) | (dict(facts.exported_switches) if is_export else {})
    left = {key: value for key, value in switches.items() if value not in known.get(key, ())}
    if run.engine == NATIVE and run.train.compile == left.get("compiles"):
        del left["compiles"]
    return left


def note_on_left_switches(left: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the note on switches that `switches_without_setting` returns; none where there is none."""
    keys = ", ".join(f"stack.{key}: {str(value).lower()}" for key, value in left.items())
    return (f"estimates read these switches, and the engine does not set them: {keys}",) if left else ()


def found_lines(text: str) -> str:
    """Return every such line of the exported file `text`; empty where it has none."""
    return "\n".join(_LINE.findall(text))


def with_stated_software(
    found: Imported, text: str, *, file: str, alike: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Imported:
    """Return `found` with the software that the line in `text`, the content of `file`, states.

    alike: by switch the values that the file's settings do not tell apart: the line does.

    Raises InputError for a line of another form, for an unknown key or value, and for one that settings contradict.
    """
    if len(lines := found_lines(text).splitlines()) > 1:
        raise InputError(f"{file}: the line about the software of the run stands {len(lines)} times", got=lines[1])
    stated, own = _stated(lines[0], file=file) if lines else {}, found.content["stack"]
    if not found.program and is_of_another_program(found.content["engine"], stated.get("framework")):
        own = {}
    known = dict(engine_facts(found.content["engine"]).switches) if own and not found.program else {}
    for key in own.keys() & stated.keys():
        is_decided = not {own[key], stated[key]} <= {*alike.get(key, ())}
        if own[key] != stated[key] and is_decided and stated[key] in known.get(key, ()):
            raise InputError(
                f"{file}: the line about the software of the run and the settings differ",
                got=f"{key}: {stated[key]}, and {own[key]} by the settings", hint=f"leave {key} out of the line",
            )  # fmt: skip
    return replace(found, content=found.content | {"stack": own | stated})


def _stated(line: str, *, file: str) -> dict[str, Any]:
    from ruamel.yaml import YAML, YAMLError

    from meshwright.runfile.problems import as_error
    from meshwright.runfile.schema import StackSection
    from meshwright.runfile.validate import validated

    try:
        given = YAML(typ="safe").load(line.partition(":")[2])
    except YAMLError:
        given = None
    if not isinstance(given, dict):
        raise InputError(
            f"{file}: the line about the software of the run cannot be read", got=line, allowed=FORM,
            hint="without the line, the run has the newest software",
        )  # fmt: skip
    section = validated(StackSection, given)
    if isinstance(section, list):
        problems = [replace(problem, path=("stack", *problem.path)) for problem in section]
        raise as_error(problems, file=file, places={})
    if section.framework is not None:
        try:
            stack_facts(section.framework)
        except InputError as error:
            error.message = f"{file}: {error.message}"
            raise
    return given
