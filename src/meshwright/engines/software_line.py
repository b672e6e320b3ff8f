"""The software of a run in an exported file, whose engine has no settings for it: a comment of one line.

    # meshwright stack: {framework: primus-megatron, preset: recipe, vintage: 2025.7}

The estimate of an imported run reads it. A file without the line has the newest software.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from meshwright.catalog.stacks import stack_facts
from meshwright.engines.base import Imported
from meshwright.errors import InputError
from meshwright.specs.run import Run

KEYS = ("framework", "preset", "vintage")
"""Keys of a run file's `stack` that no engine has a setting for."""

FORM = "# meshwright stack: {framework: NAME, preset: engine or recipe, vintage: 2025.7}, or fewer of these keys"
_LINE = re.compile(r"^#[ \t]*meshwright stack:.*$", re.MULTILINE)


def software_line(run: Run) -> str:
    """Return the line with its end; empty where the run file states none of `KEYS`."""
    from meshwright.runfile.writing import given_section

    given = given_section(run, "stack")
    stated = ", ".join(f"{key}: {given[key]}" for key in KEYS if given.get(key) is not None)
    return f"# meshwright stack: {{{stated}}}\n" if stated else ""


def found_lines(text: str) -> str:
    """Return every such line of the exported file `text`; empty where it has none."""
    return "\n".join(_LINE.findall(text))


def with_stated_software(found: Imported, text: str, *, file: str) -> Imported:
    """Return `found` with the software that the line in `text`, the content of `file`, states.

    Raises InputError for a line of another form, and for an unknown key or value.
    """
    if len(lines := found_lines(text).splitlines()) > 1:
        raise InputError(f"{file}: the line about the software of the run stands {len(lines)} times", got=lines[1])
    stated = _stated(lines[0], file=file) if lines else {}
    return replace(found, content=found.content | {"stack": found.content["stack"] | stated})


def _stated(line: str, *, file: str) -> dict[str, Any]:
    from ruamel.yaml import YAML, YAMLError

    from meshwright.runfile.problems import as_error
    from meshwright.runfile.schema import StackSection
    from meshwright.runfile.validate import validated

    try:
        given = YAML(typ="safe").load(line.partition(":")[2])
    except YAMLError:
        given = None
    if not isinstance(given, dict) or not given.keys() <= set(KEYS):
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
