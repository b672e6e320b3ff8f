"""Options of Megatron-LM's `pretrain_gpt.py`, read from a shell script, a file of arguments, or YAML.

train.sh             a script that calls it; `"train.sh TP=4 --vocab-size 32000"` sets a variable and adds an option
megatron_lm.args     only the options, as `export` writes them
model_config.yaml    YAML of Megatron-LM's own tests, MoE-ModelZoo or FlagScale: see `yaml_arguments`
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import not_estimated
from meshwright.engines.megatron import VERSION
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.megatron_lm.dialects import translated
from meshwright.engines.megatron.megatron_lm.yaml_arguments import yaml_arguments
from meshwright.engines.megatron.shell_scripts.expansion import UNSET
from meshwright.engines.megatron.shell_scripts.programs import MENTIONED
from meshwright.engines.megatron.shell_scripts.scripts import script_call
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.megatron.unestimated import has_a_class, is_harmless, may_be_unknown, unestimated
from meshwright.errors import InputError
from meshwright.json_values import load_text, parse_yaml, read_text
from meshwright.units import parse_number

YAML_ENDINGS, SCRIPT_ENDINGS = (".yaml", ".yml"), (".sh", ".bash", ".slurm", ".sbatch", ".sub")

RENAMED_LATER = {"cuda-graph-modules": "cuda-graph-scope"}
"""Options of releases after core_v0.16.1 by their earlier names."""

SHOWN = 4  # options of another program
UNDEFINED = "it has a variable"
PLACEHOLDER = re.compile(r"<[^<>]*>|\byour\b[\w ./-]*", re.IGNORECASE)
PLACEHOLDER_REASON = "a placeholder stands for it"
VARIABLE = re.compile(r"\$\{?(\w+)")
ONLY_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(\[[@*]\])?\}?")
OF_LOADING = ("finetune", "load", "pretrained-checkpoint")
"""Options that say which weights a training starts with."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The values of an option, and the line of its last occurrence."""

    values: tuple[str, ...]
    line: int  # 0: after the file name
    unknown: str = ""  # why a value has a `$` in it


class MegatronOptions:
    """Options by name without dashes. Those that nothing reads become one note, but for `defaults`."""

    def __init__(
        self, found: dict[str, Option], *, path: Path, notes: Iterable[str] = (), defaults: Iterable[str] = ()
    ) -> None:
        self.unread, self.path, self.defaults = dict(found), path, frozenset(defaults)
        self.taken: dict[str, Option] = {}
        self._notes: list[str] = list(notes)
        self._unestimated: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.unread or name in self.taken

    def flag(self, name: str) -> bool:
        """Return True if the option is given."""
        return self._take(name) is not None

    def text(self, name: str, default: str = "") -> str:
        """Return the only value of an option."""
        values = self.values(name)
        if not values:
            return default
        if len(values) != 1:
            where = self.where(self.taken[name])
            raise InputError(f"{where}: --{name} takes one value", got=" ".join(values))
        return values[0]

    def values(self, name: str) -> tuple[str, ...]:
        """Return all values of an option; none if it is absent. Raises InputError for an undefined variable."""
        option = self._take(name)
        if option is not None and option.unknown:
            what = f"--{name} cannot be expanded, {option.unknown}"
            raise InputError(f"{self.where(option)}: {what}", got=" ".join(option.values), hint=self._missing(option))
        return () if option is None else option.values

    def _missing(self, option: Option) -> str:
        """Return how to give the value of `option`, with all others that are missing."""
        if option.unknown == PLACEHOLDER_REASON:
            return "write the value instead of it"
        missing: dict[str, None] = {}
        for name, other in (*self.taken.items(), *self.unread.items()):
            if other.unknown == UNSET and not may_be_unknown(name):
                missing |= dict.fromkeys(VARIABLE.findall(" ".join(other.values)))
        count = max((int(name) for name in missing if name.isdigit()), default=0)
        needed = [f"ARGUMENT{k}" for k in range(1, count + 1)]
        needed += [f"{name}=..." for name in missing if not name.isdigit()]
        return f'set it after the file: "{" ".join((self.path.name, *(needed or ["NAME=value"])))}"'

    def is_known(self, name: str) -> bool:
        """Return False if a value has a variable or a placeholder in it."""
        option = self.taken.get(name) or self.unread.get(name)
        return option is None or not option.unknown

    def paths(self, name: str) -> tuple[str, ...]:
        """Return the values of an option that names files, with `$NAME` for undefined variables."""
        option = self._take(name)
        return () if option is None else option.values

    def integer(self, name: str, default: int) -> int:
        """Return a whole number. Raises InputError, with the line, for an undefined variable."""
        number = self.number(name, default)
        if number != int(number):
            raise InputError(f"{self.where(self.taken[name])}: --{name} is not a whole number", got=number)
        return int(number)

    def number(self, name: str, default: float) -> float:
        """Return a finite number. Raises InputError, with the line, for an undefined variable."""
        text = self.text(name)
        if not text:
            return default
        try:
            return parse_number(text)
        except ValueError:
            where = self.where(self.taken[name])
            raise InputError(f"{where}: --{name} is not a number", got=text) from None

    def where(self, option: Option) -> str:
        return f"{self.path}:{option.line}" if option.line else "after the file"

    def note(self, text: str) -> None:
        """Add a note on an option that is not carried over or contradicts another one."""
        self._notes.append(text)

    def leave_out(self, text: str) -> None:
        """Add what the estimate does not include to the note that names all of it."""
        self._unestimated.append(text)

    def notes(self) -> list[str]:
        """Return all notes, the last ones on the options that nothing has read."""
        unread = [
            " ".join((f"--{name}", *option.values))
            for name, option in self.unread.items()
            if not has_a_class(name) and name not in self.defaults
        ]
        not_carried = [f"not carried over: {', '.join(unread)}"] if unread else []
        return [*self._notes, *not_carried, *not_estimated([*unestimated(self), *self._unestimated])]

    def _take(self, name: str) -> Option | None:
        if name in self.unread:
            self.taken[name] = self.unread.pop(name)
        return self.taken.get(name)


def read(source: str, *, ignore: Collection[str] = ()) -> MegatronOptions:
    """Return the options of `source`: a path, a script's NAME=value and positional arguments, then further options.

    `ignore`: names, with or without dashes, of options that Megatron-LM does not have, which are left out.
    """
    parts = split_source(source)
    path = Path(parts[0])
    at = next((k for k, part in enumerate(parts) if part.startswith("--")), len(parts))
    given, more = parts[1:at], [Word(text=part, line=0) for part in parts[at:]]
    text, documents = read_text(path), ()
    is_yaml = path.suffix in YAML_ENDINGS
    if path.suffix in SCRIPT_ENDINGS or (not is_yaml and not given and MENTIONED.search(text)):
        call = script_call(text, path=path, given=given)
        arguments, notes, documents = [*call.arguments], call.notes, call.documents
        if not notes and any(word.text == "--num-layers" for word in arguments):  # else variables may have the model
            arguments, notes = _without_unset(arguments, text)
    elif is_yaml:
        arguments, notes = yaml_arguments(text, path=path, given=given), ()
    elif given:
        raise InputError("only scripts and YAML have variables", got=" ".join(given), allowed="--option value")
    else:
        arguments, notes = _plain_arguments(text, path=path), ()
    ignored = [name.removeprefix("--") for name in ignore]
    words, of_forks = translated([*arguments, *more], path=path, documents=documents)
    found = parse(words, path=path, ignore=ignored)
    return MegatronOptions(found, path=path, notes=(*notes, *of_forks, *refusals.ignored_note(ignored)))


def split_source(source: str) -> list[str]:
    """Split `source` into a path and what follows it. Raises InputError for open quotes and if it is empty."""
    try:
        parts = shlex.split(source)
    except ValueError as error:
        raise InputError(f"the configuration cannot be split: {error}", got=source) from None
    if not parts:
        raise InputError("no configuration is given", got=source)
    return parts


def yaml_node(source: str) -> Any:
    """Return the root node of the YAML file that `source` begins with; None if it is no YAML or cannot be read."""
    from ruamel.yaml import YAML, YAMLError

    path = Path(split_source(source)[0])
    if path.suffix not in YAML_ENDINGS:
        return None
    try:
        return parse_yaml(load_text(path), load=YAML().compose)
    except (OSError, YAMLError, ValueError):  # the reader of the file reports the error
        return None


def _without_unset(words: Sequence[Word], text: str) -> tuple[list[Word], list[str]]:
    """Return the words without variables that nothing in the script's `text` sets, where options may stand; and notes.

    The shell leaves them out, too. A variable that the text sets somewhere stays: its value is unknown, not absent.
    """
    kept: list[Word] = []
    missing: dict[str, None] = {}
    for word in words:
        found = ONLY_VARIABLE.fullmatch(word.text) if word.unknown == UNSET else None
        is_value = bool(kept) and kept[-1].text.startswith("--") and "=" not in kept[-1].text
        is_value = is_value and known_names(later=True).get(kept[-1].text[2:]) != "nothing"
        if found is None or is_value or re.search(rf"\b{found[1]}(\[.*\])?\+?=|\bread\b.*\b{found[1]}\b", text):
            kept.append(word)
        else:
            missing[word.text] = None
    return kept, [f"{name} is not set and is left out" for name in missing]


def _plain_arguments(text: str, *, path: Path) -> list[Word]:
    """Return the words of a file of arguments."""
    words = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            parts = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        words += [Word(text=part, line=number) for part in parts]
    return words


def parse(words: Iterable[Word], *, path: Path, ignore: Collection[str] = ()) -> dict[str, Option]:
    """Parse words as options, without the unknown ones of `ignore`.

    Raises one InputError for all that Megatron-LM would refuse or that are not known.
    """
    words, known = list(words), known_names(later=True)
    found: dict[str, Option] = {}
    ignored: set[str] = set()
    problems: list[InputError] = []
    k = 0
    while k < len(words):
        word, k = words[k], k + 1
        where = f"{path}:{word.line}" if word.line else "after the file"
        if word.choices and _begins_options(word) and (either := _either(word, path=path)) is not None:
            found |= either
            continue
        if not word.text.startswith("--"):
            no_option = InputError(f"{where}: a value without an option", got=word.text)
            problems.append(_not_known(word, where, path) if word.text.startswith("$") else no_option)
            continue
        name, equals, value = word.text.removeprefix("--").partition("=")
        values = [replace(word, text=value)] if equals else []
        takes = known.get(name, "several")
        while takes != "nothing" and not equals and k < len(words) and not _begins_options(words[k]):
            values.append(words[k])
            k += 1
        if name in ignore and name not in known:
            ignored.add(name)
            continue
        if problem := _problem(name, values, takes=known.get(name), where=where, path=path):
            problems.append(problem)
        unknown = next((one.unknown or UNDEFINED for one in values if one.unknown or "$" in one.text), "")
        unknown = unknown or (PLACEHOLDER_REASON if PLACEHOLDER.search(" ".join(one.text for one in values)) else "")
        option = Option(values=tuple(one.text for one in values), line=word.line, unknown=unknown)
        found[RENAMED_LATER.get(name, name)] = option
    refusals.unknown_keys(ignored, known, program="Megatron-LM", ignore=ignore)
    foreign = [f"--{name}" for name in found if name not in known]
    if len(foreign) > max(SHOWN, len(found) // 2):
        raise InputError(f"{path} calls a program with other options than Megatron-LM", got=", ".join(foreign[:SHOWN]))
    if problems:
        message = "\n".join(dict.fromkeys(problem.message for problem in problems))
        hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
        raise InputError(message, hint="; ".join(hints) or None)
    return found


def _begins_options(word: Word) -> bool:
    """Return True for an option, or a word of unknown value that may be some."""
    return any(one.text.startswith("--") for choice in (*word.choices, (word,)) for one in choice)


def _either(word: Word, *, path: Path) -> dict[str, Option] | None:
    """Return the options of a word that depends on files; None where others than of loading a checkpoint differ."""
    choices = [parse(choice, path=path) for choice in word.choices]
    found: dict[str, Option] = {}
    for name, option in (one for choice in choices for one in choice.items()):
        if all(name in choice and choice[name].values == option.values for choice in choices):
            found[name] = option
        elif is_harmless(name) or name in OF_LOADING:
            found[name] = replace(option, unknown=word.unknown)
        else:
            return None
    return found


def _not_known(word: Word, where: str, path: Path) -> InputError:
    reason = f", {word.unknown}" if word.unknown else ""
    return InputError(
        f"{where}: cannot be expanded{reason}", got=word.text, hint=f'set it after the file: "{path.name} NAME=value"'
    )


def _problem(name: str, values: list[Word], *, takes: str | None, where: str, path: Path) -> InputError | None:
    """Return what is wrong with an option and its values; None: nothing."""
    if takes is None:
        near = difflib.get_close_matches(name, known_names(later=True), n=1)
        hint = f"did you mean --{near[0]}? " if near else ""
        hint += f"Known are the options of Megatron-Core {VERSION} and later: "
        hint += f"--ignore {name} leaves out one of a fork that does not concern the step"
        return InputError(f"{where}: Megatron-LM has no such option", got=f"--{name}", hint=hint)
    unknown = next((one for one in values[1:] if one.text.startswith("$")), None)
    if unknown is not None:  # it may contain options
        return _not_known(unknown, where, path)
    shown = " ".join(one.text for one in values) or None
    if (takes == "nothing") != (not values):
        return InputError(f"{where}: --{name} takes {'no value' if takes == 'nothing' else 'a value'}", got=shown)
    if takes == "one" and len(values) > 1 and len(PLACEHOLDER.sub("x", shown or "").split()) > 1:
        return InputError(f"{where}: --{name} takes one value", got=shown)
    return None
