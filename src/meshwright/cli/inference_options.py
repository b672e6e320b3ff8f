"""Options that the commands of `meshwright inference` share, and the values they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from meshwright.errors import InputError

Function = Callable[..., Any]

DEGREES = {
    "tensor": "--tensor", "attention_data": "--attention-data", "expert": "--expert", "pipeline": "--pipeline",
    "replicas": "--replicas",
}  # fmt: skip
"""Degrees of a serving layout, and their options."""

MAX_DEGREE = 10**7


def _degree(option: str, text: str) -> Any:
    kind = click.IntRange(1, MAX_DEGREE)
    return click.option(option, type=kind, metavar="N", help=text)


_LAYOUT = (
    _degree("--tensor", "Devices that share the heads of a layer."),
    _degree("--attention-data", "Groups of a replica whose sessions are their own (mixtures of experts)."),
    _degree("--expert", "Devices over which the experts of a layer are split."),
    _degree("--pipeline", "Pipeline stages of a replica."),
    _degree("--replicas", "Copies of the model.  [default: as many as the cluster has room for]"),
)

_MODEL = (
    click.option(
        "--model", required=True, metavar="MODEL",
        help="Catalogue name (see `meshwright catalog models`), Hugging Face config.json, or OWNER/NAME on its hub.",
    ),
    click.option(
        "--cluster", required=True, metavar="CLUSTER",
        help="ACCELERATOR-DEVICESxNODES: mi355x-8x1 is one node of 8 devices (see `meshwright catalog clusters`).",
    ),
    click.option(
        "--precision", default="bf16", show_default=True, metavar="FORMAT",
        help="Format of the weights: fp32, bf16, fp16, fp8, mxfp8, nvfp4, mxfp4, or fp4 for the vendor's own.",
    ),
    click.option(
        "--kv-precision", default=None, metavar="FORMAT",
        help="Format of the KV cache: fp32, bf16, fp16, fp8, nvfp4, mxfp4 or fp4.  "
        "[default: bf16, and fp8 with weights of 8 bits or fewer]",
    ),
)  # fmt: skip


def model_options(function: Function) -> Function:
    """--model, --cluster, --precision and --kv-precision."""
    return functools.reduce(lambda f, option: option(f), reversed(_MODEL), function)


def layout_options(function: Function) -> Function:
    """Degrees of the layout; None where absent."""
    return functools.reduce(lambda f, option: option(f), reversed(_LAYOUT), function)


def _share(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise InputError(f"{param.opts[0]} is out of range", got=value, allowed="above 0, up to 1")
    return value


memory_ratio_option = click.option(
    "--memory-ratio", type=float, callback=_share, metavar="SHARE",
    help="Share of a device's memory that the engine may use.  [default: 0.9]",
)  # fmt: skip


def given_degrees(options: Mapping[str, Any]) -> dict[str, int]:
    """The degrees that were given."""
    return {name: options[name] for name in DEGREES if options.get(name) is not None}
