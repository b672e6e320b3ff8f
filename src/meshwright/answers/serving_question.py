"""Questions about serving from names and numbers: models, clusters, formats, engines, loads, prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.catalog.lookup import price_per_device_hour
from meshwright.errors import InputError, value_named
from meshwright.inference.capacity import Reserve, shipped_reserve
from meshwright.inference.checkpoint import own_precision
from meshwright.inference.constants import shipped_constants
from meshwright.inference.formats import StorageFormat, cache_format, check_run, computed_in, usual_cache, weight_format
from meshwright.inference.layout import check_layout, layout_of, legal_layouts
from meshwright.inference.memory import window_note
from meshwright.inference.points import engines
from meshwright.inference.positions import positions_note
from meshwright.inference.price import HourPrice, Ownership, owned
from meshwright.inference.server import Server
from meshwright.inference.server_fit import ServerCalibration, read_server_calibration
from meshwright.inference.serving import EngineTraits, RequestLoad
from meshwright.inference.work import Served, prediction_module
from meshwright.json_values import picked
from meshwright.runfile import named_cluster, named_model
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model


@dataclass(frozen=True, kw_only=True)
class PriceTerms:
    """Terms of a price: given, the catalogue's for a region, or a bought device's."""

    usd_per_device_hour: float | None = None
    region: str | None = None
    ownership: Ownership | None = None
    licence_usd_per_device_year: float = 0.0
    utilization: float = 1.0

    @property
    def of_every_price(self) -> dict[str, Any]:
        """Terms that hold whether a device is rented or bought."""
        return picked(self, "licence_usd_per_device_year", "utilization")


_OF_OWNERSHIP = ("capital_usd", "life_years", "usd_per_kwh")


def price_terms(**given: Any) -> PriceTerms:
    """The terms of the prices that are given, by the names of `report_records`; None is as absent.

    Raises InputError where a device is rented and bought, or bought for nothing.
    """
    terms = {name: value for name, value in given.items() if value is not None}
    own = {name: terms.pop(name) for name in _OF_OWNERSHIP if name in terms}
    if not own:
        return PriceTerms(**terms)
    if "capital_usd" not in own:
        raise InputError(
            f"{', '.join(own)}: the price of the device is missing", hint="capital_usd (--capital) is the price"
        )
    if {"usd_per_device_hour", "region"} & set(terms):
        raise InputError(
            "usd_per_device_hour, region and capital_usd: a device is rented or bought",
            hint="give usd_per_device_hour (--price) or capital_usd (--capital)",
        )
    return PriceTerms(**terms, ownership=Ownership(**own))


def hour_price(terms: PriceTerms, device: Accelerator) -> HourPrice | None:
    """Price of a device-hour; None where none was given and the catalogue knows none."""
    more = terms.of_every_price
    if terms.ownership is not None:
        return owned(terms.ownership, device, **more)
    if terms.usd_per_device_hour is not None:
        return HourPrice(usd_per_device_hour=terms.usd_per_device_hour, **more)
    try:
        found = price_per_device_hour(device.name, region=terms.region)
    except InputError:
        if terms.region is not None:
            raise
        return None
    return HourPrice(usd_per_device_hour=found.usd_per_device_hour, source=f"{found.offer}, {found.date}", **more)


def engine_named(name: str) -> EngineTraits:
    """The traits of an inference engine. Raises UnknownNameError."""
    return value_named("inference engine", name, engines())


def formats_named(
    precision: str | None, kv_precision: str | None, name: str, model: Model, accelerator: Accelerator
) -> tuple[StorageFormat, StorageFormat]:
    """The formats of weights and cache; without one, those of the checkpoint of the model that `name` names."""
    weights = weight_format(precision or own_precision(name, model)[0], accelerator)
    return weights, cache_format(kv_precision or usual_cache(weights, model.name), accelerator)


def reserve_of(memory_ratio: float | None) -> Reserve:
    """The memory that an engine keeps back, where it may use this share of a device; None: the usual one."""
    reserve = shipped_reserve()
    return reserve if memory_ratio is None else replace(reserve, memory_ratio=memory_ratio)


def format_notes(weights: StorageFormat, accelerator: Accelerator, *, own: str | None) -> list[str]:
    """Cautions about a format of weights; `own` is the note of `own_precision` where none is given."""
    found, gemms = [own] if own else [], computed_in(weights, accelerator)
    if gemms in weights.matmul_by_vendor.values():
        found.append(f"kernels of {accelerator.vendor} multiply {weights.name} weights at the rate of {gemms}")
    elif gemms != weights.matmul:
        found.append(
            f"{accelerator.name} does not multiply {weights.matmul}: weights are held in {weights.name} and widened to "
            f"{gemms} as they are read"
        )
    elif weights.group_bits:
        found.append(f"GEMMs widen {weights.name} to {gemms} as they read it and have the rate of {gemms}")
    return found


def served_model(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    precision: str | None,
    kv_precision: str | None,
    degrees: Mapping[str, int],
) -> Served:
    """A model in its formats on a layout. Without degrees: tensor parallelism over a whole scale-up domain."""
    place = named_cluster(cluster)
    found = named_model(model)
    weights, cache = formats_named(precision, kv_precision, model, found, place.accelerator)
    given = dict(degrees)
    if not given:
        widest = max(legal_layouts(found, place), key=lambda layout: layout.tensor, default=None)
        given = {"tensor": widest.tensor if widest else 1}
    return Served(model=found, cluster=place, weights=weights, cache=cache, layout=layout_of(given, place.num_devices))


USUAL_ENGINE = "vllm"


def with_draft(of: Served, draft: str | None, drafted: int) -> Served:
    """The server with a model that drafts: the one named, else the model's own prediction module.

    Raises InputError for a draft model without drafted tokens, or one that the layout cannot split.
    """
    if drafted == 0:
        if draft is not None:
            raise InputError("a draft model drafts nothing", got=draft, hint="--drafted N")
        return of
    found = prediction_module(of.model) if draft is None else named_model(draft)
    if found is not None:
        check_layout(of.layout, found, of.cluster)
    return replace(of, draft=found)


def draft_name(of: Served) -> str:
    """Text of the draft model."""
    if of.draft is None:
        return ""
    return "its own prediction module" if of.draft.name == of.model.name else of.draft.name


def served_by(
    of: Served,
    *,
    engine: str | None = None,
    memory_ratio: float | None = None,
    prefill_replicas: int = 0,
    calibration: ServerCalibration | None = None,
) -> Server:
    """A server of `of` with the traits of an engine, or of a calibrated server.

    Raises InputError where the calibration is of another device or engine.
    """
    if calibration is not None:
        check_calibrated(calibration, accelerator=of.cluster.accelerator.name, engine=engine)
    traits = calibration.engine if calibration else engine_named(engine or USUAL_ENGINE)
    check_run(of.weights, traits.name, of.cluster.accelerator)
    constants = calibration.constants if calibration else shipped_constants()
    return Server(
        of=of, engine=traits, reserve=reserve_of(memory_ratio), calibration=constants, prefill_replicas=prefill_replicas
    )


def check_calibrated(calibration: ServerCalibration, *, accelerator: str, engine: str | None = None) -> None:
    """Raise InputError where a calibration is of another device or engine than the question."""
    if accelerator != calibration.accelerator:
        raise InputError("the calibration is of another device", got=accelerator, allowed=calibration.accelerator)
    if engine is not None and engine != calibration.engine.name:
        raise InputError("the calibration is of another engine", got=engine, allowed=calibration.engine.name)


def server_calibration(path: str | Path | None) -> ServerCalibration | None:
    """The calibration in the file of `meshwright inference calibrate`; None without a file."""
    return None if path is None else read_server_calibration(Path(path))


def notes_of(
    of: Served, engine: EngineTraits, loads: Sequence[RequestLoad], *, name: str, precision: str | None
) -> tuple[str, ...]:
    """Cautions that hold for every estimate of these loads of the model that `name` names.

    `precision` is the format of its weights as it was asked for; None: that of its checkpoint.
    """
    longest = max(load.input_tokens + load.output_tokens for load in loads)
    own = own_precision(name, of.model)[1] if precision is None else None
    found = format_notes(of.weights, of.cluster.accelerator, own=own)
    found += [text] if (text := positions_note(name, of.model, longest)) else []
    if windowed := window_note(of.model, longest, windowed_cache=engine.windowed_cache):
        found.append(windowed)
    if any(load.drafted_per_step for load in loads):
        found.append(
            "speculative decoding: verification is counted, the time of drafting is not (--draft MODEL)"
            if of.draft is None
            else f"speculative decoding: drafted by {draft_name(of)}, whose memory is not counted"
        )
    if any(load.prefix_hit_rate for load in loads):
        found.append("cached prefixes are counted in the memory of each request, also where several share one")
    if of.model.experts is not None:
        found.append("experts are assumed to be chosen uniformly (balanced routing)")
    found.append("ITL is (end-to-end - TTFT) / (output tokens - 1), the mean over a request (TPOT)")
    return tuple(found)
