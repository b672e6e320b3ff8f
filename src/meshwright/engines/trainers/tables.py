"""Keys of each trainer, as `tables/*.toml` has them: one file a kind of configuration.

    keys           their key -> setting, a name that all trainers share (`run_content` makes the run file of them)
    defaults       setting -> the trainer's own default
    own_defaults   "key=value" -> keys with a default of the file's own where its key has this value, capital or not
    values         setting -> their value -> ours; "ours: note" where ours is another one
    refused        reason -> keys that are refused where they are set
    not_estimated  keys that change speed or memory in a way that run files do not have
    not_carried    keys that change learning a little and have no place in a run file: they are noted
    without_effect keys that change neither step nor learning
    off            key -> values that are as if it were not set, besides null, false, 0 and empty ones
    longest        model -> tokens of its longest sequence, where the trainer shortens no sample by default
    deprecated     key -> the one that is in its place in the newest release
    shipped        file of DeepSpeed that the trainer's repository has -> what of it concerns a run
    programs       expression for the names of programs whose arguments are its keys
    marks          sets of keys by one of which a configuration is recognised
    extends        table whose keys it has too; `values_of`: whose values alone
    shares_work    true: it says how devices share the work, and names no model

A key that ends with * stands for all that begin like it. Mappings are flattened: `optimizer.lr`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("tables")
ORDER = (
    "automodel", "oumi", "torchtune", "litgpt_lora", "litgpt_pretrain", "litgpt", "axolotl", "llamafactory",
    "openinstruct", "firefly", "trl_pairs", "trl", "swift", "deepspeed_chat", "scripts", "transformers", "accelerate",
    "deepspeed",
)  # fmt: skip
"""Tables in the order in which their marks are looked for: special ones first."""
OFF = (None, False, "", [], {}, "none", "None", "no", "off", "false")


@dataclass(frozen=True, kw_only=True)
class TrainerTable:
    """The keys of one kind of configuration; attributes as the module says."""

    title: str
    framework: str
    marks: tuple[frozenset[str], ...]
    programs: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    own_defaults: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Mapping[str, str]]
    refused: Mapping[str, str]  # key -> reason
    not_estimated: frozenset[str]
    not_carried: frozenset[str]
    without_effect: frozenset[str]
    off: Mapping[str, list[Any]]
    longest: Mapping[str, int]
    deprecated: Mapping[str, str]
    shipped: Mapping[str, Mapping[str, Any]]
    shares_work: bool

    def knows(self, key: str) -> bool:
        """Return True for a key that the trainer has."""
        classes = (self.keys, self.refused, self.not_estimated, self.not_carried, self.without_effect)
        return any(matching(key, known) for known in classes)

    def is_off(self, key: str, value: Any) -> bool:
        """Return True for a value that is as if the key were not set."""
        allowed = (*OFF, *self.off.get(key, ()))
        return value == 0 or any(type(value) is type(one) and value == one for one in allowed)

    def has_below(self, key: str) -> bool:
        """Return True if keys below `key`, a mapping, are known."""
        known = (*self.keys, *self.refused, *self.not_estimated, *self.not_carried, *self.without_effect)
        return any(one.startswith(f"{key}.") for one in known)

    def key_of(self, setting: str) -> str | None:
        """Return the first key of a setting; None: the trainer has none."""
        return next((key for key, one in self.keys.items() if one == setting), None)


def matching(key: str, known: Mapping[str, Any] | frozenset[str]) -> str | None:
    """Return the entry of `known` that stands for `key`: itself, or its beginning with a *."""
    if key in known:
        return key
    return next((one for one in known if one.endswith("*") and key.startswith(one[:-1])), None)


@cache
def table(name: str) -> TrainerTable:
    """Return the table `name`, over the one that it extends."""
    read = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    below = table(read["extends"]) if "extends" in read else None
    others = below or (table(read["values_of"]) if "values_of" in read else None)
    values = {setting: dict(found) for setting, found in (others.values if others else {}).items()}
    for setting, found in read.get("values", {}).items():
        values[setting] = values.get(setting, {}) | found
    above = below.refused if below else {}
    refused = {key: reason for reason, keys in read.get("refused", {}).items() for key in keys.split()}
    return TrainerTable(
        title=read["title"],
        framework=read["framework"],
        marks=tuple(frozenset(mark.split()) for mark in read["marks"]),
        programs=read.get("programs", "$^"),
        keys=read["keys"] | {key: one for key, one in (below.keys if below else {}).items() if key not in read["keys"]},
        values=values,
        refused={key: one for key, one in above.items() if key not in read["keys"]} | refused,
        **{
            name: (getattr(below, name) - {*read["keys"]} if below else frozenset())
            | {*read.get(name, {}).get("keys", "").split()}
            for name in ("not_estimated", "not_carried", "without_effect")
        },
        off=(below.off if below else {}) | read.get("not_estimated", {}).get("off", {}) | read.get("off", {}),
        **{
            name: (getattr(below, name) if below else {}) | read.get(name, {})
            for name in ("defaults", "own_defaults", "longest", "deprecated", "shipped")
        },
        shares_work=read.get("shares_work", False),
    )


def table_of(content: Mapping[str, Any]) -> TrainerTable | None:
    """Return the table whose marks and keys `content`, as it was read, has; None: it is of no trainer.

    More than half of its keys are known: configurations of other programs contain DeepSpeed's.
    """
    for name in ORDER:
        found = table(name)
        num_known = sum(found.knows(str(key)) or found.has_below(str(key)) for key in content)
        if any(all(_has(content, key) for key in mark) for mark in found.marks) and 2 * num_known > len(content):
            return found
    return None


def table_of_program(program: str, content: Mapping[str, Any]) -> str:
    """Return the name of the table whose keys the arguments of `program` are: a trainer on transformers by default."""
    by_program = (name for name in ORDER if re.search(table(name).programs, program))
    by_keys = (name for name in ("openinstruct", "deepspeed_chat") if table_of(content) is table(name))
    return next(chain(by_program, by_keys), "scripts")


def _has(content: Any, key: str) -> bool:
    """Return True if `content` has the flattened `key`, whose parts may contain dots themselves."""
    head, dot, rest = key.partition(".")
    return isinstance(content, Mapping) and head in content and (not dot or _has(content[head], rest))
