"""Options that the commands of `meshwright inference` share, and the values they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from meshwright.cli.options import Decorator, count_option, file_option, hardware_options, option_group
from meshwright.errors import InputError
from meshwright.targets import load

DEGREES = {
    "tensor": "--tensor", "attention_data": "--attention-data", "expert": "--expert", "pipeline": "--pipeline",
    "replicas": "--replicas",
}  # fmt: skip
"""Degrees of a serving layout, and their options."""

HARDWARE = ("accelerator", "network", "device_memory")
"""Names of the values of `hardware_options`."""

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


model_options = option_group((*_MODEL[:2], hardware_options, *_MODEL[2:]))
"""--model, --cluster with its hardware, --precision and --kv-precision."""


def given_cluster(options: Mapping[str, Any]) -> Any:
    """The cluster as a run file has it: --cluster, and what the options of its hardware state."""
    return load("meshwright.runfile.hardware:stated_cluster")(
        options["cluster"], **{name: options[name] for name in HARDWARE}
    )


layout_options = option_group(_LAYOUT)
"""Degrees of the layout; None where absent."""


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


MAX_TOKENS = 10**9
MAX_NUMBER = 1e9

ENGINES = ("vllm", "trtllm", "sglang", "vllm-v0", "llamacpp", "generic")

_LOAD = (
    count_option("--input-tokens", high=MAX_TOKENS, required=True, help="Tokens of a prompt."),
    count_option("--output-tokens", high=MAX_TOKENS, required=True, help="Tokens of an answer."),
    click.option(
        "--engine", type=click.Choice(ENGINES), default=None,
        help="Inference engine: its host time and what bounds its batch.  [default: vllm, or the calibrated one]",
    ),
    file_option(
        "--calibration", "calibration_path",
        help="Constants of one server, from `meshwright inference calibrate`.",
    ),
)  # fmt: skip


load_options = option_group(_LOAD)
"""--input-tokens, --output-tokens, --engine and --calibration."""


def number_option(
    name: str,
    destination: str,
    text: str,
    *,
    least: float = 0.0,
    most: float = MAX_NUMBER,
    metavar: str = "X",
) -> Any:
    """An option that takes a number above `least`, up to `most`."""

    def checked(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
        if value is not None and not least < value <= most:
            raise InputError(f"{name} is out of range", got=value, allowed=f"above {least:g}, to {most:g}")
        return value

    return click.option(name, destination, type=float, callback=checked, metavar=metavar, help=text)


_PRICE = (
    number_option(
        "--price", "usd_per_device_hour", "USD per device-hour.  [default: the catalogue's, if it has one]",
        metavar="USD",
    ),
    click.option("--region", metavar="REGION", help="Region of the catalogue's price, as in 'East US 2'."),
    number_option(
        "--capital", "capital_usd", "Own instead of rent: USD per device with its share of node and network.",
        metavar="USD",
    ),
    number_option("--life", "life_years", "Years a bought device is used.  [default: 4]", most=100, metavar="YEARS"),
    number_option(
        "--usd-per-kwh", "usd_per_kwh", "Price of electricity for a bought device.  [default: 0.08]", most=1000,
        metavar="USD",
    ),
    number_option(
        "--licence", "licence_usd", "Software licence, USD per device and year (NVIDIA AI Enterprise: 4000 or 4500).",
        metavar="USD",
    ),
    number_option(
        "--utilization", "utilization", "Share of paid hours in which the server runs at this load.  [default: 1]",
        most=1, metavar="SHARE",
    ),
)  # fmt: skip


price_options = option_group(_PRICE)
"""Rent or own, licence and utilisation."""


PRICE_NAMES = (
    "usd_per_device_hour", "region", "capital_usd", "life_years", "usd_per_kwh", "licence_usd", "utilization",
)  # fmt: skip


def given_terms(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `PriceTerms` and `Ownership` that were given, as {"terms": ..., "ownership": ...}."""
    given = {name: options[name] for name in PRICE_NAMES if options.get(name) is not None}
    own = {name: given.pop(name) for name in ("capital_usd", "life_years", "usd_per_kwh") if name in given}
    if own and "capital_usd" not in own:
        raise InputError(f"{', '.join(own)} need --capital", hint="--capital is the price of a bought device")
    if own and {"usd_per_device_hour", "region"} & set(given):
        raise InputError("a device is rented or bought", hint="give --price or --capital")
    if "licence_usd" in given:
        given["licence_usd_per_device_year"] = given.pop("licence_usd")
    return {"terms": given, "ownership": own}


def served_options(*, cluster_help: str, needs_cluster: bool = False) -> Decorator:
    """--cluster, and what records do not say of a server: --model, --precision, --kv-precision, --engine."""
    options = (
        click.option("--cluster", required=needs_cluster, metavar="CLUSTER", help=cluster_help),
        click.option(
            "--model", default=None, metavar="MODEL",
            help="Served model, where the records do not say it: a catalogue name or a Hugging Face config.json.",
        ),
        click.option("--precision", default=None, metavar="FORMAT", help="Format of its weights, likewise."),
        click.option("--kv-precision", default=None, metavar="FORMAT", help="Format of its KV cache, likewise."),
        click.option("--engine", type=click.Choice(ENGINES), default=None, help="Inference engine, likewise."),
    )  # fmt: skip
    return option_group(options)
