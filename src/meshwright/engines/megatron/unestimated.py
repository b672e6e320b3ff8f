"""Options that no reader takes (`key_classes`): which of them make a run another one than its estimate."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engines.key_classes import key_classes

if TYPE_CHECKING:
    from meshwright.engines.megatron.megatron_lm.options import MegatronOptions

KEYS = key_classes("megatron")

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KERNELS: dict[str, str] = _TABLES["kernels"]
EXPERTS: dict[str, str] = _TABLES["experts"]
ONLY_WITH: dict[str, str] = _TABLES["only_with"]

KINDS = ("read", "without_effect", "unestimated", "not_carried")
"""Tables of forks with names of options."""


@cache
def forks() -> list[dict[str, Any]]:
    """Return the tables of `forks.toml`."""
    return tomllib.loads(Path(__file__).with_name("forks.toml").read_text(encoding="utf-8"))["forks"]


@cache
def names_of_forks(*kinds: str) -> dict[str, str]:
    """Return the options of forks, of these kinds in `forks.toml` or of all, with the number of their values."""
    found = [names for fork in forks() for kind, names in fork.items() if kind in (kinds or KINDS)]
    return {name: takes for names in found for name, takes in names.items()}


def is_harmless(name: str) -> bool:
    """Return True for an option that concerns neither speed nor memory nor the loss."""
    return KEYS.is_harmless(name) or name in names_of_forks("without_effect")


def has_a_class(name: str) -> bool:
    """Return True if option `name` stands in a table: no other note is needed if nothing reads it."""
    return (
        is_harmless(name)
        or name in KEYS.unestimated
        or name in KERNELS | EXPERTS
        or name in names_of_forks("unestimated")
    )


def may_be_unknown(name: str) -> bool:
    """Return True for an option whose value a run file does not need."""
    return has_a_class(name) or name.endswith(tuple(_TABLES["files"]))


def unestimated(options: MegatronOptions) -> list[str]:
    """Return the unread `options` in which the run differs from its estimate, as they are given, and absent ones."""
    found, kernels = [], KERNELS | EXPERTS
    for name, option in list(options.unread.items()):
        if name not in KEYS.unestimated and name not in kernels and name not in names_of_forks("unestimated"):
            continue
        values = " ".join(option.values)
        expected = kernels.get(name)
        if name in _TABLES["rope_fusion"] and "multi-latent-attention" in options:
            expected = "" if options.text("rope-type", "yarn") == "rope" else None
        if name in _TABLES["gelu_fusion"] and "disable-bias-linear" in options and "swiglu" not in options:
            expected = ""
        if name == _TABLES["nan_check"] and options.text("cuda-graph-impl", "none") == "local":
            expected = ""
        if name in _TABLES["of_stages"]:
            expected = options.text("pipeline-model-parallel-size", "1")
        needed = ONLY_WITH.get(name)
        has_effect = needed is None or (needed in options and options.text(needed) != "1")
        if has_effect and values != expected and values not in KEYS.unestimated.get(name, ()):
            found.append(f"--{name} {values}".strip())
    asked = KERNELS if "bf16" in options or "fp16" in options else {}
    asked = asked | (EXPERTS if "num-experts" in options else {})
    absent = [f"the absence of --{name} {value}".strip() for name, value in asked.items() if name not in options]
    return [*found, *absent]
