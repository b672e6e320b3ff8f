"""Options of forks and of earlier releases of Megatron-LM, in the words of today's: `means` of `forks.toml`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.megatron.unestimated import forks
from meshwright.errors import InputError

DEEPSPEED, ZERO_STAGE = ("deepspeed", "deepspeed_config", "deepspeed-config"), "zero-stage"
OFFLOADED_STATES = "optimizer-cpu-offload"
NONE = (Word(text="", line=0),)
OF_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Keys of which DeepSpeed's settings have one."""


def translated(words: Sequence[Word], *, path: Path, documents: Iterable[str] = ()) -> tuple[list[Word], list[str]]:
    """Return `words` with options of Megatron-LM in place of those of forks, and notes.

    `documents`: texts that the script writes into files, among which DeepSpeed's settings may be.
    Raises InputError for a value that has no counterpart.
    """
    groups, notes = [*_groups(words)], []
    names = {_name(group) for group in groups}
    if names & {*DEEPSPEED}:
        groups, notes = _with_zero(groups, path=path, documents=documents)
    given = names | {" ".join((_name(group), *(value.text for value in _values(group)))) for group in groups}
    applying = [fork for fork in forks() if not fork.get("where_given") or given & {*fork["where_given"]}]
    means = {key: text for fork in applying for key, text in fork.get("means", {}).items()}
    absent = [fork["absent"] for fork in applying if "absent" in fork]
    added = [
        Word(text=text, line=0)
        for one in absent for name, meant in one.items() if not names & {*name.split()} for text in meant.split()
    ]  # fmt: skip
    return [*added, *(word for group in groups for word in _meaning(group, means, path=path))], notes


def _groups(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Yield each option with its values; values without an option as a group of their own."""
    group: list[Word] = []
    for word in words:
        begins = word.text.startswith("--") or bool(word.choices)
        if begins and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _name(group: Sequence[Word]) -> str:
    text = group[0].text
    return text.removeprefix("--").partition("=")[0] if text.startswith("--") else ""


def _values(group: Sequence[Word]) -> list[Word]:
    _, equals, value = group[0].text.partition("=")
    return [*([replace(group[0], text=value)] if equals else []), *group[1:]]


def _meaning(group: list[Word], means: Mapping[str, str], *, path: Path) -> list[Word]:
    """Return the options that an option with its values stands for."""
    option, values = group[0], _values(group)
    name, dashed = _name(group), _name(group).replace("_", "-")
    if not name:
        return group
    known = known_names(later=True) | dict.fromkeys((key.partition(" ")[0] for key in means), "several")
    if name not in known and dashed in known:
        name = dashed  # forks with names of Python
    text = " ".join(value.text for value in values)
    if (meant := means.get(f"{name} {text}")) is None:
        meant = means.get(name)
    if meant is None:
        if allowed := [key.removeprefix(f"{name} ") for key in means if key.startswith(f"{name} ")]:
            where = f"{path}:{option.line}" if option.line else "after the file"
            unknown = next((value.unknown for value in values if value.unknown), "")
            what = f"--{name} cannot be expanded, {unknown}" if unknown else f"--{name} has a value that is not read"
            raise InputError(f"{where}: {what}", got=text, allowed=", ".join(allowed))
        return [replace(option, text=option.text.replace(_name(group), name, 1)), *group[1:]]
    return [
        one
        for part in meant.split()
        for one in (values if part == "*" else [replace(option, text=part.replace("*", text))])
    ]


def _with_zero(groups: list[list[Word]], *, path: Path, documents: Iterable[str]) -> tuple[list[list[Word]], list[str]]:
    """Return the options with the stage of ZeRO that DeepSpeed's settings have, and notes."""
    given = {_name(group): group for group in groups if _name(group)}
    file = next((values[0].text for name in DEEPSPEED if (values := _values(given.get(name, NONE)))), "")
    settings = _settings(documents, path.parent / file)
    stated = next((value.text for value in _values(given.get(ZERO_STAGE, NONE))), None)
    if settings is None:
        if stated is None:
            hint = f'give the stage: "{path.name} --{ZERO_STAGE} 1"'
            raise InputError(f"the stage of ZeRO is in {file or 'a file of DeepSpeed'}, which is not here", hint=hint)
        zero: dict[str, Any] = {"stage": stated}
        notes = [f"{file} of DeepSpeed is not here: --{ZERO_STAGE} {stated} is taken, without offloading"]
    else:
        zero, notes = settings.get("zero_optimization") or {}, []
    stage = str(zero.get("stage", 0))
    if stated not in (None, stage):
        notes.append(f"--{ZERO_STAGE} {stated} has no effect: DeepSpeed's settings say {stage}")
    if stage == "0" and "bf16" in given:  # BF16_Optimizer (deepspeed/runtime/engine.py, _configure_optimizer)
        stage = "1"
        notes.append("stage 0 of ZeRO in bf16: DeepSpeed shards the optimizer states, as in stage 1")
    if _device(zero, "offload_param"):
        raise InputError(f"{path}: weights that DeepSpeed offloads cannot be expressed", got="offload_param")
    line = Word(text=f"--{ZERO_STAGE}", line=0)
    groups = [group for group in groups if _name(group) != ZERO_STAGE]
    groups.append([line, replace(line, text=stage)])
    if zero.get("cpu_offload") or _device(zero, "offload_optimizer"):
        groups.append([replace(line, text=f"--{OFFLOADED_STATES}")])
    return groups, notes


def _device(zero: Mapping[str, Any], name: str) -> bool:
    """Return True if `zero` puts something elsewhere."""
    section = zero.get(name)
    return isinstance(section, dict) and section.get("device", "none") != "none"


def _settings(documents: Iterable[str], file: Path) -> dict[str, Any] | None:
    """Return DeepSpeed's settings that a script writes or names; None: they are not here."""
    texts = [*documents]
    if file.is_file():
        texts.insert(0, file.read_text(encoding="utf-8", errors="replace"))
    found: Collection[Any] = [content for text in texts if (content := _json(text)) is not None]
    return next((one for one in reversed([*found]) if isinstance(one, dict) and {*one} & OF_DEEPSPEED), None)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
