"""The format in which the authors of a model publish its weights."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from meshwright.catalog.models import stored_as
from meshwright.inference.positions import config_of
from meshwright.specs.model import Model

USUAL_PRECISION = "bf16"
QUANTISED = {"fp8": "fp8", "mxfp4": "mxfp4"}
"""Formats by the `quant_method` of a config.json."""


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
        found = _table().get(model.name)
    else:
        quantised = stated[0] if config is None else config.get("quantization_config")
        if not quantised or quantised in ("bf16", "fp16", "f16"):
            return USUAL_PRECISION, None
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        found = QUANTISED.get(str(method))
        if found is None:
            return USUAL_PRECISION, (
                f"the checkpoint of {model.name} is quantised by a method without an estimate ({method}): weights in "
                f"{USUAL_PRECISION} are assumed; --precision states another format"
            )
    if found is None:
        return USUAL_PRECISION, None
    return found, f"{found} is the format of the checkpoint of {model.name}; --precision states another"


@cache
def _table() -> dict[str, str]:
    import tomllib

    text = (files("meshwright.inference") / "data" / "checkpoints.toml").read_text(encoding="utf-8")
    return {name: found for name, found in tomllib.loads(text).items() if name != "sources"}
