"""`--fix tensor=8` and `--why-not "TP8 PP4"`: fields of a plan held at one value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, UnknownNameError
from meshwright.files import toml_table
from meshwright.runfile.synonyms import key_for
from meshwright.specs.plan import (
    ALL_TOKENS,
    RECOMPUTE_MODULES,
    STORED_MODULES,
    WEIGHT_CACHES,
    AxisOrder,
    Offload,
    Plan,
    Recompute,
    Schedule,
    Sharding,
    read_layers,
)
from meshwright.units import parse_count


def fixed_fields(assignments: Iterable[str]) -> dict[str, Any]:
    """Plan fields from `name=value` words, separated by commas or spaces, or from a plan as it is printed.

    Names and values of other tools are allowed (below).

    Raises InputError (a word that is neither, a value of the wrong kind) or UnknownNameError.

    >>> fixed_fields(["tp=8", "sharding=parameters,schedule=1f1b"])
    {'tensor': 8, 'sharding': <Sharding.PARAMETERS: 3>, 'schedule': <Schedule.ONE_F_ONE_B: '1f1b'>}
    >>> fixed_fields(["TP8 PP4 zero2 mbs1"])
    {'tensor': 8, 'pipeline': 4, 'sharding': <Sharding.GRADIENTS: 2>, 'micro_batch': 1}
    """
    found = {}
    for assignment in _split(assignments):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise InputError(
                "not an assignment",
                got=assignment,
                allowed="NAME=VALUE, as in tensor=8, or a plan as it is printed: TP8 PP4 zero1 mbs1",
            )
        name = field_for(name) or name
        found_value = _value(name, value)
        if found.get(name, found_value) != found_value:
            raise InputError(f"{name} is given twice", got=assignment, hint="give it once")
        found[name] = found_value
    return found


def check_field(name: str) -> None:
    """Raise UnknownNameError for a name that is no field of a plan; the hint also knows the words of other tools.

    >>> check_field("gradient_checkpointing")
    Traceback (most recent call last):
    meshwright.errors.UnknownNameError: unknown plan field: got 'gradient_checkpointing'
    hint: the field is 'recompute'
    """
    known = [f.name for f in fields(Plan)]
    if name in known:
        return
    error, field = UnknownNameError("plan field", name, known=known), field_for(name)
    hint = hint_for(name) if field is None else f"the field is {field!r}"
    if hint:
        error.hint = hint
    raise error


UNSAID = frozenset(f.name for f in fields(Plan) if f.default is None)
"""Fields that a plan may leave unsaid: None."""

ALL_LAYERS = "all"
"""In place of a number of layers: what gradient checkpointing without more means."""

_DEGREE = re.compile(r"(ETP|VPP|FSDP|TP|CP|EP|PP|DP|MBS)[-_=]?(\d+)[-_x]?", re.IGNORECASE)
_SHARDINGS = {"ddp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
_PRINTED = {
    "8bit": "stored_activations", "cache": "weight_cache", "loss": "loss_chunk", "layers": "layers_per_stage",
    "order": "axis_order",
}  # fmt: skip
"""Words of `Plan.describe` and of papers (TP8_PP4, TP8xPP4), and the fields they mean."""


def _split(assignments: Iterable[str]) -> list[str]:
    """Words at commas and spaces; a part without = belongs to the value before it (recompute_modules=norm,mlp)."""
    found: list[str] = []
    for given in assignments:
        with_fsdp = "fsdp" in given.lower()
        given = re.sub(r" of (\d+) layers", r",recompute_layers=\1", given.strip())
        for word in re.sub(r"\s*([=,])\s*", r"\1", given).split() or [""]:
            for i, part in enumerate(word.split(",")):
                if printed := _printed(part, with_fsdp=with_fsdp):
                    found += printed
                elif i and "=" not in part:
                    found[-1] += f",{part}"
                else:
                    found.append(part)
    return found


def _printed(part: str, *, with_fsdp: bool) -> list[str]:
    """The assignments that a word of a printed plan means; none for other words. DP beside FSDP counts replicas.

    >>> _printed("TP8PP4", with_fsdp=False), _printed("recompute=norm+mlp", with_fsdp=False)
    (['tensor=8', 'pipeline=4'], ['recompute=selective', 'recompute_modules=norm,mlp'])
    """
    word = part.lower()
    if "=" not in word and "".join(m[0] for m in _DEGREE.finditer(word)) == word:
        found = []
        for name, width in _DEGREE.findall(word):
            field = "data_replicate" if name == "dp" and with_fsdp else _synonyms("short")[name]
            found += [f"{field}={width}"] + ["sharding=parameters"] * (name == "fsdp")
        return found
    if word in _SHARDINGS:
        return [f"sharding={_SHARDINGS[word]}"]
    if word in tuple(Schedule):
        return [f"schedule={word}"]
    name, _, value = word.partition("=")
    if name == "fsdp":
        return [f"data_shard={value}", "sharding=parameters"]
    if field_for(name) == "recompute" and our_value("sequence_parallel", value) == "true":
        return ["recompute=full", f"recompute_layers={ALL_LAYERS}"]
    if name == "recompute_layers" and value == ALL_LAYERS:
        return ["recompute=full", part]
    if name in _PRINTED:
        return [f"{_PRINTED[name]}={value}"]
    modules = value.split("+")
    if name == "recompute" and all(module in RECOMPUTE_MODULES for module in modules):
        return ["recompute=selective", f"recompute_modules={','.join(modules)}"]
    return []


def _value(name: str, text: str) -> Any:
    check_field(name)
    choices = {
        "sharding": Sharding,
        "schedule": Schedule,
        "recompute": Recompute,
        "offload": Offload,
        "axis_order": AxisOrder,
    }
    text = our_value(name, text)
    if name in choices:
        return _choice(name, text, choices[name])
    if name == "sequence_parallel":
        if text.lower() not in ("true", "false"):
            raise InputError(name, got=text, allowed="true, false")
        return text.lower() == "true"
    if name == "recompute_modules":
        modules = () if text.lower() == "none" else tuple(our_value(name, m) for m in text.split(","))
        for module in modules:
            if module not in RECOMPUTE_MODULES:
                raise UnknownNameError("recompute module", module, known=RECOMPUTE_MODULES)
        return modules
    if name == "layers_per_stage":
        return _layers(name, text)
    if name == "recompute_layers":
        return None if text.lower() == ALL_LAYERS else _count(name, text, others=(ALL_LAYERS,))
    if name == "stored_activations":
        return _stored(text)
    if name == "weight_cache":
        if text.lower() not in WEIGHT_CACHES:
            raise InputError(name, got=text, allowed=", ".join(WEIGHT_CACHES))
        return text.lower()
    if name == "loss_chunk":
        named = {"auto": None, ALL_TOKENS: ALL_TOKENS}
        return named[text.lower()] if text.lower() in named else _count(name, text, others=named)
    return _count(name, text)


def _layers(name: str, text: str) -> tuple[int, ...] | None:
    """Layers of each stage, "7,8x14,7"; None for "even", the usual split."""
    if text.lower() == "even":
        return None
    try:
        layers = read_layers(text)
    except ValueError:
        layers = ()
    if not layers or min(layers) < 0:
        raise InputError(name, got=text, allowed="layers of each stage, as in 7,8x14,7, or even")
    return layers


def _stored(text: str) -> tuple[str, ...]:
    """Modules that store their activations in 8 bits, in the order of `STORED_MODULES`; () for "none"."""
    modules = () if text.lower() == "none" else tuple(text.replace("+", ",").split(","))
    for module in modules:
        if module not in STORED_MODULES:
            raise UnknownNameError("module with stored activations", module, known=(*STORED_MODULES, "none"))
    return tuple(module for module in STORED_MODULES if module in modules)


def _choice(name: str, text: str, kind: type[Enum]) -> Enum:
    members = {(m.name.lower() if issubclass(kind, IntEnum) else m.value): m for m in kind}
    if text.lower() not in members:
        raise InputError(
            name, got=text, allowed=", ".join(members), hint=_synonyms("other_values").get(name, {}).get(plain(text))
        )
    return members[text.lower()]


def _count(name: str, text: str, *, others: Iterable[str] = ()) -> int:
    try:
        count = parse_count(text)
    except ValueError:
        count = 0
    if not 0 < count < 10**9:
        raise InputError(name, got=text, allowed=", ".join((*others, "a whole number, 1 or more")))
    return count


# --- words of other tools ---

# `--fix` understands them where they mean the same; where they mean something else, the table says the way on.


def _synonyms(table: str) -> dict[str, Any]:
    return toml_table(Path(__file__).with_name("plan_synonyms.toml"))[table]


def field_for(name: str) -> str | None:
    """The field of a plan that `name` means, in any tool's words; None where there is none.

    >>> field_for("tensor_model_parallel_size"), field_for("MBS"), field_for("zero-stage"), field_for("precision")
    ('tensor', 'micro_batch', 'sharding', None)
    """
    known = [f.name for f in fields(Plan)]
    word = name.lower().replace("-", "_")
    if word in _synonyms("other_fields"):
        return None
    key = key_for(word) or ""
    field = "micro_batch" if key == "batch.micro" else key.removeprefix("parallel.")
    return next((w for w in (word, _synonyms("short").get(word), field) if w in known), None)


def hint_for(name: str) -> str | None:
    """The way on for a name that is no field of a plan; None for a name that no tool has.

    >>> hint_for("gpus")
    "it is the run's and no choice of its plan: the key is 'cluster'"
    """
    word = name.lower().replace("-", "_")
    if word in _synonyms("other_fields"):
        return _synonyms("other_fields")[word]
    key = key_for(word)
    return key and f"it is the run's and no choice of its plan: the key is {key!r}"


def our_value(field: str, text: str) -> str:
    """`text` in the word that we have for it; as it is where no tool has it.

    >>> our_value("sharding", "FULL_SHARD"), our_value("schedule", "ScheduleZBVZeroBubble"), our_value("tensor", "8")
    ('parameters', 'zbv', '8')
    """
    word = plain(text)
    for ours, others in _synonyms("values").get(field, {}).items():
        if word in (plain(ours), *others.split()):
            return ours
    return text


def plain(text: str) -> str:
    """`text` without case, hyphens, underscores and `Schedule` in front.

    >>> plain("ZB-H1"), plain("Schedule1F1B")
    ('zbh1', '1f1b')
    """
    return text.lower().replace("-", "").replace("_", "").removeprefix("schedule")
