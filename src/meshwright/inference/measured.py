"""Points from records of `bench serve`: every load of one server as conditions and what was measured.

Three quantities of each load, over its requests and repeats: output tokens/s, mean TTFT, mean time per output token.
Where other programs had the processors for a share w of the time in which the server was ready, times are multiplied by
1 - w and rates divided by it (`server_wait_ratio`): the constants are those of the server without them.

Folders with the same server, lengths and loads are repeats of each other: the median counts. A load that was refused,
interrupted, or lost requests is not used, and neither is an open loop, whose requests in flight are a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, stdev
from typing import Any

from meshwright.catalog.huggingface import model_from_config
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.formats import cache_format, usual_cache, weight_format
from meshwright.inference.layout import ServingLayout, check_layout
from meshwright.inference.points import PointConditions, PublishedPoint, Quantity, engine_of
from meshwright.inference.serving import EngineTraits, RequestLoad, batch_limit
from meshwright.inference.work import Served
from meshwright.records.serving import Arrivals, ServingPoint, read_serving
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model

METRICS = {
    Quantity.OUTPUT_RATE: ("output_throughput", "tokens/s"),
    Quantity.TTFT: ("ttft", "s"),
    Quantity.ITL: ("tpot", "s"),
}
"""Quantities of a load, with metric and unit of a published point."""


@dataclass(frozen=True, kw_only=True)
class ServedGiven:
    """Model, formats and engine of a server that Meshwright did not start. None: as recorded."""

    model: Model | None = None
    precision: str | None = None
    kv_precision: str | None = None
    engine: str | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One quantity of one load, over all repeats."""

    point: PublishedPoint
    num_repeats: int
    log_sd: float  # between repeats; 0 of one


@dataclass(frozen=True, kw_only=True)
class MeasuredServer:
    """All usable loads of the records of one kind of server."""

    engine: EngineTraits
    points: tuple[MeasuredPoint, ...]
    unused: Mapping[str, int] = field(default_factory=dict)  # loads by the reason
    origins: tuple[dict[str, Any], ...] = ()  # one for each folder


@dataclass(frozen=True, kw_only=True)
class _Load:
    """One line of records: its conditions, and each quantity with the share of waiting taken out."""

    configuration: str  # model and asked lengths
    served: Served
    engine: EngineTraits
    load: RequestLoad
    values: Mapping[Quantity, float]


def measured_server(folders: Sequence[Path], *, cluster: Cluster, given: ServedGiven | None = None) -> MeasuredServer:
    """Read folders of `bench serve` as points of one engine on `cluster`.

    Raises InputError for folders of several engines, records that do not say what was served, and where nothing can be
    used.
    """
    loads: list[_Load] = []
    unused: dict[str, int] = {}
    origins = []
    for folder in folders:
        records = read_serving(folder)
        about = _Server.of(records.sidecar, folder, cluster, given or ServedGiven())
        origins.append(_origin(folder, records.sidecar, about))
        for point in records.points:
            reason = _refused(point)
            if reason:
                unused[reason] = unused.get(reason, 0) + 1
            else:
                loads.append(about.load(point))
    names = sorted({one.engine.name for one in loads})
    if len(names) != 1:
        raise InputError(
            "records must be of one engine" if names else "no load of these records can be used",
            got=", ".join(names) or _counted(unused) or "no load", allowed="one engine on one kind of device",
        )  # fmt: skip
    engine = max((one.engine for one in loads), key=lambda traits: traits.max_sequences)
    return MeasuredServer(engine=engine, points=tuple(_merged(loads)), unused=unused, origins=tuple(origins))


def _counted(unused: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in unused.items())


def _refused(point: ServingPoint) -> str:
    """Reason not to use a load; empty for none."""
    if point.load.arrivals is not Arrivals.CLOSED:
        return "of an open loop"
    if point.interrupted:
        return "interrupted"
    if not point.is_usable:
        return "refused or without a successful request"
    if point.errors:
        return "with failed requests"
    if point.num_short:
        return "with answers shorter than asked for"
    if not (point.input_tokens and point.output_tokens):
        return "without counts of tokens"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Server:
    """Server of one folder, from its sidecar."""

    model: Model
    cluster: Cluster
    precision: str
    kv_precision: str | None
    tensor: int
    engine: EngineTraits
    lengths: str  # of prompts and answers, as asked for
    fixed_lengths: bool

    @classmethod
    def of(cls, sidecar: Mapping[str, Any], folder: Path, cluster: Cluster, given: ServedGiven) -> _Server:
        about = sidecar.get("server")
        about = about if isinstance(about, Mapping) else {}
        served = about.get("served")
        served = served if isinstance(served, Mapping) else {}
        if given.model is None and not isinstance(served.get("config"), Mapping):
            raise InputError(
                "the records do not say which model was served", got=str(folder),
                hint="--model NAME or a config.json; records of a server that Meshwright started say it",
            )  # fmt: skip
        precision = given.precision or served.get("precision")
        if precision is None:
            raise InputError(
                "the records do not say the format of the weights", got=str(folder), hint="--precision FORMAT"
            )
        engine = engine_of(str(given.engine or about.get("name") or ""))
        slots = served.get("slots")
        if isinstance(slots, int) and slots > 0:
            engine = replace(engine, max_sequences=slots)
        lengths = [str(sidecar.get(key, "")) for key in ("input_tokens", "output_tokens")]
        from_file = bool(sidecar.get("num_prompts_in_file"))
        return cls(
            model=given.model or _recorded_model(served["config"], about, folder),
            cluster=cluster,
            precision=str(precision),
            kv_precision=given.kv_precision or served.get("kv_precision"),
            tensor=served.get("tensor") or 1,
            engine=engine,
            lengths="prompts of a file" if from_file else "/".join(lengths),
            fixed_lengths=not from_file and all(text.isdecimal() for text in lengths),
        )

    @property
    def served(self) -> Served:
        device = self.cluster.accelerator
        weights = weight_format(self.precision, device)
        layout = ServingLayout(tensor=self.tensor)
        check_layout(layout, self.model, self.cluster)
        cache = cache_format(self.kv_precision or usual_cache(weights, self.model.name), device)
        return Served(model=self.model, cluster=self.cluster, weights=weights, cache=cache, layout=layout)

    def load(self, point: ServingPoint) -> _Load:
        asked = RequestLoad(
            input_tokens=max(1, round(point.input_tokens / point.num_ok)),
            output_tokens=max(1, round(point.output_tokens / point.num_ok)),
            concurrency=point.load.concurrency,
            lockstep=self.fixed_lengths,
        )
        ready = 1.0 - (point.server_wait_ratio or 0.0)
        values = {Quantity.OUTPUT_RATE: point.output_tokens_per_s / ready}
        # a mean answer of one token has no time per output token, even if single answers are longer
        latencies = {Quantity.TTFT: point.ttft_s, Quantity.ITL: point.tpot_s if asked.output_tokens > 1 else None}
        for quantity, found in latencies.items():
            if found is not None:
                values[quantity] = (found.median if found.mean is None else found.mean) * ready
        return _Load(
            configuration=f"{self.model.name} {self.lengths}", served=self.served, engine=self.engine, load=asked,
            values=values,
        )  # fmt: skip


def _recorded_model(config: Mapping[str, Any], about: Mapping[str, Any], folder: Path) -> Model:
    name = Path(str(about.get("model") or "model")).name
    try:
        return model_from_config(config, name=name.removesuffix(".gguf") or "model")
    except InputError as error:
        raise InputError(f"{folder}: {error.message}", hint="--model NAME or a config.json") from None


def _origin(folder: Path, sidecar: Mapping[str, Any], about: _Server) -> dict[str, Any]:
    return {
        "folder": str(folder), "started": sidecar.get("started"), "command": sidecar.get("command"),
        "model": about.model.name, "engine": about.engine.name, "slots": about.engine.max_sequences,
    }  # fmt: skip


def _merged(loads: Sequence[_Load]) -> list[MeasuredPoint]:
    """One point for each quantity of each load; equal loads are repeats."""
    found = []
    by_load: dict[tuple[Any, ...], list[_Load]] = {}
    for one in loads:
        by_load.setdefault(_key(one), []).append(one)
    for line, same in enumerate(by_load.values(), start=1):
        for quantity, (metric, unit) in METRICS.items():
            values = [one.values[quantity] for one in same if one.values.get(quantity)]
            if not values:
                continue
            found.append(_point(same[0], quantity, values, line=line, metric=metric, unit=unit))
    return found


def _key(one: _Load) -> tuple[Any, ...]:
    """Equal for repeats of a load. The slots of a server count where they are fewer than the requests in flight."""
    of, load = one.served, one.load
    running = min(one.engine.max_sequences, load.concurrency or 1)
    formats = (of.weights.name, of.cache.name)
    return (of.model, formats, of.layout, one.engine.name, running, one.configuration, load.concurrency)


def _point(
    one: _Load, quantity: Quantity, values: Sequence[float], *, line: int, metric: str, unit: str
) -> MeasuredPoint:
    served, engine, load, configuration = one.served, one.engine, one.load, one.configuration
    try:
        limit = batch_limit(served, load, engine, shipped_reserve())
    except InfeasibleError as error:
        raise InputError(f"{configuration} was measured and does not fit by our arithmetic: {error.message}") from None
    value = median(values)
    about: dict[str, Any] = {
        "id": f"{line} {metric}", "line": line, "source": configuration,
        "metric": metric, "value": value, "unit": unit,
    }  # fmt: skip
    groups = {
        "source": configuration, "accelerator": served.cluster.accelerator.name, "engine": engine.name,
        "model": served.model.name, "precision": served.weights.name, "metric": metric, "evidence": "measured",
    }  # fmt: skip
    conditions = PointConditions(
        served=served, load=load, engine=engine, limit=limit, quantity=quantity, measured=value
    )
    spread = stdev(_logs(values)) if len(values) > 1 else 0.0
    return MeasuredPoint(
        point=PublishedPoint(**about, groups=groups, conditions=conditions), num_repeats=len(values), log_sd=spread
    )


def _logs(values: Sequence[float]) -> list[float]:
    from math import log

    return [log(v) for v in values]
