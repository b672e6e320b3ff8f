"""The format in which the authors of a model publish its weights."""

from __future__ import annotations

from typing import Any

from meshwright.catalog.models import stored_as
from meshwright.files import toml_table
from meshwright.inference.formats import DATA
from meshwright.inference.positions import config_of
from meshwright.specs.model import Model

TABLE, USUAL_PRECISION = DATA / "checkpoints.toml", "bf16"
GROUPED = ("int4", "w8a16")
"""Formats whose groups may have another size than 128 values; -1 is a whole column."""


def own_precision(name: str, model: Model) -> tuple[str, str | None]:
    """Format of the checkpoint of the model that `name` names, and a note where that is not bf16.

    >>> from meshwright import catalog
    >>> own_precision("gpt-oss-20b", catalog.model("gpt-oss-20b"))
    ('mxfp4', 'mxfp4 is the format of the checkpoint of gpt-oss-20b; --precision states another')
    >>> own_precision("llama3-8b", catalog.model("llama3-8b"))
    ('bf16', None)
    """
    config, stated = config_of(name), stored_as(name)
    if config is None and not stated:
        found = toml_table(TABLE)["models"].get(model.name)
    else:
        quantised = stated if config is None else config.get("quantization_config")
        if not quantised or quantised in (("bf16",), ("fp16",), ("f16",)):
            return USUAL_PRECISION, None
        method, group = ("-".join(map(str, quantised)), None) if config is None else _method(quantised)
        found = toml_table(TABLE)["methods"].get(method)
        if found is None:
            return USUAL_PRECISION, (
                f"the checkpoint of {model.name} is quantised by a method without an estimate ({method}): weights in "
                f"{USUAL_PRECISION} are assumed; --precision states another format"
            )
        elif found in GROUPED and type(group) is int and group != 128:
            found = f"{found}-g{group if group > 0 else model.hidden}"
    if found is None:
        return USUAL_PRECISION, None
    return found, f"{found} is the format of the checkpoint of {model.name}; --precision states another"


def _method(quantised: Any) -> tuple[str, Any]:
    """Method of a `quantization_config` with the bits that it states, and the values that share a scale."""
    match quantised:
        case {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": dict(weights), **rest}, **others},
        } if not others:
            inputs: dict[str, Any] = rest.get("input_activations") or {"num_bits": 16}
            return f"{weights.get('type')}-w{weights.get('num_bits')}a{inputs.get('num_bits')}", weights.get(
                "group_size"
            )
        case {"quant_method": "modelopt", "quant_algo": str(algorithm)}:
            return f"modelopt-{algorithm}".lower(), None
        case {"quant_method": method, "bits": int(bits)}:
            return f"{method}-int{bits}", quantised.get("group_size")
        case {"quant_method": method}:
            return str(method), None
    return str(quantised), None
