"""Options of Megatron-LM in YAML, as the words of its command line.

MODEL_ARGS: {--num-layers: 12}           Megatron-LM's own tests, and MoE-ModelZoo, whose values have variables
system: {...}, model: {...}, data: {...} FlagScale: fields are options with dashes, in sections at any depth
experiment: ..., defaults: [train: 7b]   an experiment of FlagScale, which names such a file
trainer: {...}, model: {...}             NeMo 1.x: fields are options with dots, which `forks.toml` translates

`${NAME}` is a variable that follows the file, `${experiment.seed}` a value of FlagScale's experiment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.shell_scripts.expansion import UNSET
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.megatron.unestimated import is_harmless, may_be_unknown
from meshwright.errors import InputError
from meshwright.json_values import read_yaml

PRETRAINING = "pretraining"  # the default of MODE in the files of Megatron-LM's tests
SECTIONS = ("system", "model", "data")
"""Sections of FlagScale whose fields are options (`_get_args_megatron` of flagscale/runner/runner_train.py)."""
NOT_OPTIONS = ("log_dir", "details_dir", "scripts_dir", "pids_dir")
NAMING_KEY = "experiment"  # of a file that names one of options
OF_NEMO = ("trainer", "model")
NSYS, HOLD, DECAY = "model.nsys_profile.", "model.optim.sched.constant_steps", "model.optim.sched.decay_steps"
MISSING = "???"  # Hydra's mark of a value that has to be given
OPERATIONS = {"multiply": math.prod, "sum": sum}
MAX_INTERPOLATIONS = 20
VARIABLE = re.compile(r"\$\{([\w.]+)[^}]*\}|\$(\w+)")


def yaml_arguments(text: str, *, path: Path, given: Sequence[str] = ()) -> list[Word]:
    """Return the options of YAML with the variables `given`, each NAME=value. Of a repeated name, the later one counts.

    Raises InputError for other files, and with all variables that a run file needs and that are not given.
    """
    if wrong := [one for one in given if "=" not in one]:
        raise InputError("not a variable of the file", got=", ".join(wrong), allowed="NAME=value, --option value")
    variables = {name: value for name, _, value in (one.partition("=") for one in given)}
    content = _node(path, text)
    found = {key: value for key, value, _ in _pairs(content)}
    if NAMING_KEY in found and (name := _named_file(found, path)):
        path, variables = name, _values(content) | variables
        content = _node(name)
    if is_nemo(found):
        return [*_nemo_words(content, variables, path)]
    if is_flagscale(key for key, _, _ in _pairs(content)):
        pairs = list(_options(content))
        variables = _of_naming_files(path) | variables
    else:
        pairs = list(_pairs(_model_args(content, path)))
    words = [word for name, value, line in pairs for word in _words(name, value, line, variables)]
    _refuse_missing(words, path)
    return words


def is_flagscale(keys: Iterable[str]) -> bool:
    """Return True for the sections of a configuration of FlagScale."""
    return {"system", "model"} <= {*keys}


def is_nemo(keys: Iterable[str]) -> bool:
    """Return True for the sections of a configuration of NeMo 1.x."""
    return {*OF_NEMO} <= {*keys}


def _nemo_words(content: Any, variables: Mapping[str, str], path: Path) -> Iterator[Word]:
    """Yield NeMo's fields with their values. Raises InputError for a file that lacks what has other defaults."""
    given = (one for one in _leaves(content) if one[0].partition(".")[0] in OF_NEMO and not _is_null(one[1]))
    leaves = {name: (node, line) for name, node, line in given}
    values = {**_values(content), **variables}
    if "model.ffn_hidden_size" not in leaves:
        raise InputError(f"{path} lacks model.ffn_hidden_size", hint="it is no configuration of a GPT of NeMo 1.x")
    for name, (node, line) in leaves.items():
        if name.startswith(NSYS) or (name == HOLD and node.value == "0"):
            continue
        nodes = node.value if node.tag.endswith(":seq") else [node]
        texts = [_interpolated(one.value, values, at=name) if isinstance(one.value, str) else "{}" for one in nodes]
        texts = [text.lower() if one.tag.endswith(":bool") else text for one, text in zip(nodes, texts, strict=True)]
        if name == HOLD:  # steps at the end with the last rate
            steps = _interpolated(values.get("trainer.max_steps", ""), values, at=name)
            name, texts = DECAY, [str(max(1, int(steps) - int(texts[0]))) if steps.isdecimal() else f"${HOLD}"]
        if len(texts) > 1:  # a list has no options in it, unlike a variable of a shell
            texts = [re.sub(r"\$([\w.]+)", r"<\1>", text) for text in texts]
        several = name.endswith(".betas")
        for k, text in enumerate(texts):
            if several or not k:
                yield Word(text=f"--{name}.{k}" if several else f"--{name}", line=line)
            yield Word(text=text, line=line, unknown=UNSET if "$" in text or text == MISSING else "")


def _leaves(node: Any, above: str = "") -> Iterator[tuple[str, Any, int]]:
    """Yield the fields by their dotted names."""
    for name, value, line in _pairs(node):
        if value.tag.endswith(":map"):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value, line


def _is_null(node: Any) -> bool:
    return node.tag.endswith(":null")


def _interpolated(text: str, values: Mapping[str, str], *, at: str) -> str:
    """Return text with the values of `${model.name}`, `${.name}` and `${multiply:2, 3}`; `$name` for what is not known.

    >>> _interpolated("${multiply:4, ${.hidden_size}}", {"model.hidden_size": "64"}, at="model.ffn_hidden_size")
    '256'
    """
    for _ in range(MAX_INTERPOLATIONS):
        found = re.search(r"\$\{([^${}]*)\}", text)
        if found is None:
            break
        name, colon, arguments = found[1].partition(":")
        numbers = [one.strip() for one in arguments.split(",")]
        key = f"{at.rpartition('.')[0]}{name}" if name.startswith(".") else name.removeprefix("training.")
        if colon and name in OPERATIONS and all(re.fullmatch(r"-?\d+", one) for one in numbers):
            value = str(OPERATIONS[name](map(int, numbers)))
        else:
            value = f"${re.sub(r'[^A-Za-z0-9_]+', '_', found[1])}" if colon else values.get(key, f"${name}")
        text = text[: found.start()] + value + text[found.end() :]
    return text


def _node(path: Path, text: str | None = None) -> Any:
    from ruamel.yaml import YAML

    return read_yaml(path, text=text, load=YAML().compose)


def _model_args(content: Any, path: Path) -> Any:
    given = [value for key, value, _ in _pairs(content) if key == "MODEL_ARGS"]
    if not given or not isinstance(given[0].value, list):
        hint = "it has MODEL_ARGS: {--num-layers: 12, ...}, or only sections of Megatron-Bridge's ConfigContainer"
        raise InputError(f"{path} is not a configuration of Megatron-LM", hint=hint)
    mode = next((value.value for key, value, _ in _pairs(content) if key == "MODE"), PRETRAINING)
    if mode != PRETRAINING:
        raise InputError(f"{path} does not describe a pretraining", got=f"MODE: {mode}", allowed=PRETRAINING)
    if not any(name.startswith("--") for name, _, _ in _pairs(given[0])):
        got = ", ".join(name for name, _, _ in islice(_pairs(given[0]), 2))
        raise InputError(f"{path}: MODEL_ARGS are settings of another program, such as NeMo", got=got, allowed="--NAME")
    return given[0]


def _named_file(found: Mapping[str, Any], path: Path) -> Path | None:
    """Return the file of options that an experiment names; None: it has the options itself."""
    items = found["defaults"].value if "defaults" in found and isinstance(found["defaults"].value, list) else []
    named = [value.value for item in items for key, value, _ in _pairs(item) if key == "train"]
    return path.parent / "train" / f"{named[0]}.yaml" if named else None


def _of_naming_files(path: Path) -> dict[str, str]:
    """Return the values by dotted name on which all experiments that name this file agree; else all beside it."""
    naming_files = {one: _node(one) for one in sorted(path.absolute().parent.parent.glob("train*.yaml"))}
    naming = [
        node for one, node in naming_files.items()
        if _named_file({key: value for key, value, _ in _pairs(node)}, one) == path.absolute()
    ]  # fmt: skip
    values = [_values(node) for node in naming or naming_files.values()]
    first = values[0] if values else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in values)}


def _values(node: Any) -> dict[str, str]:
    """Return the scalars of a mapping by their dotted names."""
    leaves = ((name, value) for name, value, _ in _leaves(node) if not isinstance(value.value, list))
    return {name: "" if _is_null(value) else value.value for name, value in leaves}


def _options(node: Any, *, depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield FlagScale's options, in the order of its sections."""
    pairs = list(_pairs(node))
    if not depth:
        pairs = sorted((one for one in pairs if one[0] in SECTIONS), key=lambda one: SECTIONS.index(one[0]))
    for name, value, line in pairs:
        if value.tag.endswith(":map"):
            yield from _options(value, depth=depth + 1)
        elif name not in NOT_OPTIONS:
            yield f"--{name.replace('_', '-')}", value, line


def _words(name: str, value: Any, line: int, variables: Mapping[str, str]) -> Iterator[Word]:
    """Yield an option and its values; nothing for false and null."""
    kind, text = value.tag.rpartition(":")[2], value.value
    is_unknown = False
    if kind != "seq" and not isinstance(text, str):  # a mapping, or a tag of somebody's
        raise InputError(f"line {line}: {name} has no text, number or list of these", got=str(value.tag))
    if kind == "str":
        text = VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), text)
        is_unknown = VARIABLE.search(text) is not None
        if text != value.value and text in ("true", "false", "True", "False", ""):
            kind = "bool" if text else "null"
    if kind == "null" or (kind == "bool" and text.lower() == "false"):
        return
    if is_unknown and _is_flag(name.removeprefix("--")) and is_harmless(name.removeprefix("--")):
        return
    listed = [str(item.value) for item in value.value] if kind == "seq" else [] if kind == "bool" else _listed(text)
    yield Word(text=name, line=line)
    for item in listed:
        yield Word(text=item, line=line, unknown=UNSET if is_unknown else "")


def _is_flag(name: str) -> bool:
    return known_names(later=True).get(name) == "nothing"


def _refuse_missing(words: Sequence[Word], path: Path) -> None:
    missing: dict[str, None] = {}
    name = ""
    for word in words:
        name = word.text.removeprefix("--") if word.text.startswith("--") else name
        if word.unknown and (_is_flag(name) or not may_be_unknown(name)):
            missing |= {one[0] or one[1]: None for one in VARIABLE.findall(word.text)}
    if missing:
        needed = " ".join(f"{one}=..." for one in missing)
        raise InputError(f"{path} needs variables", got=", ".join(missing), hint=f'"{path.name} {needed}"')


def _pairs(node: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield keys, values and lines of a mapping, those merged by `<<` first."""
    for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
        if key.value == "<<":
            yield from _pairs(value)
    for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
        if key.value != "<<":
            yield key.value, value, key.start_mark.line + 1


def _listed(text: str) -> list[str]:
    """Split `"[384 384 97656250]"` into three values. Megatron-LM's tests escape special characters of the shell."""
    text = text.replace("\\", "")
    if text.startswith("[") and text.endswith("]") and "*" not in text:
        return text[1:-1].split()
    return [text]
