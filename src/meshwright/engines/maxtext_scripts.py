"""Shell scripts that run MaxText, read without running them: the configuration and the settings of their call.

    recipe.sh                       python3 -m MaxText.train MaxText/configs/base.yml steps=10 attention=flash
    "recipe.sh RUN_NAME=x steps=5"  with variables of the script, and settings that count last

The interpreter of scripts belongs to Megatron; no engine imports another, so that this module stands above both.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from meshwright.engines.base import FollowedCall
from meshwright.engines.key_classes import key_classes
from meshwright.engines.maxtext.config.keys import known_keys
from meshwright.engines.megatron.shell_scripts.scripts import script_call
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.recognition import is_maxtext_script, named_script
from meshwright.errors import InputError

MODULE = re.compile(
    r"-m\s+[\"']?maxtext(?:\.trainers\.pre_train)?\.[\"']?(?:train(?:_compile)?(?![\w.])|\$\{?\w+\}?)[\"']?",
    re.IGNORECASE,
)
FILE = re.compile(r"maxtext\S*/(?:train(?:_compile)?\.py|\$\{?\w+)", re.IGNORECASE)
OWN_BASE = "base.yml"
PROGRAM = "MaxText/train.py"
"""The file in place of a module: the interpreter of scripts knows training programs by their files."""

PLACES = ("_path", "_directory", "_dir", "_files", "_token")
"""Endings of keys that name places, which change no step."""


def maxtext_call(source: str) -> FollowedCall:
    """Return the call of the script that `source` names, or `source` if it names no script that runs MaxText.

    Raises InputError, with the line, for a script that cannot be followed, and for a setting whose value only the
    caller of the script knows.
    """
    script = named_script(source, is_maxtext_script)
    if script is None:
        return FollowedCall(source=source)
    path, text, given = script
    if not MODULE.search(text) and not FILE.search(text):
        raise InputError(
            f"{path} runs no pre-training of MaxText",
            hint="run files have no fine-tuning by instructions, distillation or reinforcement learning of MaxText",
        )
    later = [one for one in given if one.partition("=")[0] in known_keys()]
    call = script_call(MODULE.sub(PROGRAM, text), path=path, given=[one for one in given if one not in later])
    if not call.arguments:
        raise InputError(f"{path}: MaxText is called without a configuration")
    configuration, *settings = call.arguments
    if "=" in configuration.text:  # settings alone, over its own base.yml
        configuration, settings = Word(text=OWN_BASE, line=configuration.line), [configuration, *settings]
    known, open_ones = _expanded(settings, later=later, path=path)
    notes = [*call.notes, *([f"the caller of the script sets {', '.join(open_ones)}"] if open_ones else [])]
    place, note = _located(configuration.text, path)
    return FollowedCall(source=shlex.join([str(place), *known, *later]), notes=(*notes, *note))


def _expanded(settings: list[Word], *, later: list[str], path: Path) -> tuple[list[str], list[str]]:
    """Return the settings with their values, and those of places and names that are not known.

    Raises InputError for all other settings whose values are not known, unless they are among `later`.
    """
    known, places, unknown, is_open = [], [], [], False
    given = {one.partition("=")[0] for one in later}
    for word in settings:
        key, equals, _ = word.text.partition("=")
        is_rest, is_open = is_open and not equals, bool(word.unknown) or "$" in word.text
        if is_rest:  # of an unquoted value that is not known
            is_open = True
        elif not is_open:
            known.append(word.text)
        elif key != "model_name" and (key_classes("maxtext").is_harmless(key) or key.endswith(PLACES)):
            places.append(key)
        elif key not in given:
            unknown.append(word)
    if unknown:
        shown = ", ".join(word.text for word in unknown)
        raise InputError(
            f"{path}:{unknown[0].line}: the caller of the script sets these values", got=shown,
            hint=f'give them after the file: "{path.name} NAME=value"',
        )  # fmt: skip
    return known, places


def _located(written: str, script: Path) -> tuple[Path, list[str]]:
    """Return the configuration file that `script` names, in the folders above it, and a note if it lies elsewhere.

    A base.yml that is not there is MaxText's own.
    """
    parts = [part for part in Path(written).parts if "$" not in part and part != "/"]
    above = script.absolute().parents
    for k in range(len(parts)):
        for folder in above:
            if (found := folder.joinpath(*parts[k:])).is_file():
                return found, []
    name = parts[-1] if parts else written
    configs = next((folder for folder in above if folder.name == "configs"), None)
    named = sorted(configs.rglob(name)) if configs else []
    if len(named) == 1:
        return named[0], [f"{written} is not there: {named[0]} is read"]
    return Path(name if name == OWN_BASE else written), []
