"""Published points of inference performance: a CSV row becomes a served model, its load and a measured quantity.

Columns: row, model, precision, hw, gpus, parallelism, framework, isl, osl, concurrency, metric, value, unit, evidence,
source, note. A row that says too little is refused with a reason of a closed list, and counted. Nothing is guessed
silently: every assumption is noted on the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.accuracy.csvfile import MAX_COUNT, CsvRow, read_table
from meshwright.accuracy.reasons import CannotPredictError
from meshwright.accuracy.shapes import read_model
from meshwright.accuracy.spelling import catalogued
from meshwright.accuracy.statements import Statements, read_statements
from meshwright.catalog import lookup as catalog
from meshwright.errors import InfeasibleError, InputError, UnknownNameError
from meshwright.files import toml_table
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.formats import DATA, StorageFormat, cache_format, computed_in, usual_cache, weight_format
from meshwright.inference.layout import ServingLayout, check_layout
from meshwright.inference.memory import served
from meshwright.inference.serving import BatchLimit, EngineTraits, RequestLoad, batch_limit
from meshwright.inference.stated import read_stated, share, spellings, unused
from meshwright.inference.work import Served
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model

COLUMNS = (
    "model", "precision", "hw", "gpus", "parallelism", "framework", "isl", "osl", "concurrency", "metric", "value",
    "unit",
)  # fmt: skip
"""Columns that a file must have; `row`, `evidence`, `source` and `note` are read where they are."""


class PointReason(StrEnum):
    """Reasons why a point is not predicted. The value is the text of the report."""

    NO_VALUE = "no value given"
    OTHER_METRIC = "metric that is not predicted"
    UNKNOWN_UNIT = "unit that the metric does not have"
    UNKNOWN_MODEL = "model not in the catalogue"
    NOT_SERVED = "layers that serving does not estimate"
    UNKNOWN_ACCELERATOR = "accelerator not in the catalogue"
    UNKNOWN_PRECISION = "number format not known"
    SPECULATIVE = "speculative decoding without an acceptance rate"
    NO_PARALLELISM = "parallelism not stated"
    DISAGGREGATED = "prefill and decode on different devices, split not stated"
    NO_LENGTHS = "lengths of prompts and answers not stated"
    NO_LOAD = "load not stated"
    INCONSISTENT = "conditions contradict each other"
    DOES_NOT_FIT = "does not fit in memory by our arithmetic"


class Quantity(StrEnum):
    """Measured quantity."""

    OUTPUT_RATE = "output tokens/s"
    TOTAL_RATE = "input and output tokens/s"
    USER_RATE = "output tokens/s of one request"
    ITL = "inter-token latency"
    TTFT = "time to first token"
    BATCH = "seconds of a batch"


@dataclass(frozen=True, kw_only=True)
class PointConditions:
    """Everything that a prediction needs."""

    served: Served
    load: RequestLoad
    engine: EngineTraits
    limit: BatchLimit
    quantity: Quantity
    measured: float  # SI: seconds, tokens/s of all devices


@dataclass(frozen=True, kw_only=True)
class PublishedPoint:
    """One published row."""

    id: str
    line: int
    source: str  # key of the source, without what names the row
    groups: dict[str, str]
    metric: str
    value: float
    unit: str
    conditions: PointConditions | None = None
    reason: PointReason | None = None
    detail: str = ""
    assumed: tuple[str, ...] = field(default=())
    unread: tuple[str, ...] = field(default=())  # what its text says and no prediction takes


def shipped_points_path() -> Path:
    """The shipped CSV of published points."""
    return DATA / "points.csv"


def read_points(path: str | Path) -> list[PublishedPoint]:
    """All points of a file. Raises InputError for a file that is no such table, with the line."""
    return [
        _point(row)
        for row in read_table(
            path,
            required=COLUMNS,
            numbers=("value",),
            counts={"gpus": MAX_COUNT},
            shipped="the shipped points of inference",
        )
    ]


class _RefusedError(Exception):
    def __init__(self, reason: PointReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def _point(row: CsvRow) -> PublishedPoint:
    value = row.number("value")
    about: dict[str, Any] = {
        "id": row.text("row") or str(row.line),
        "line": row.line,
        "source": source_key(row.text("source")),
        "metric": row.text("metric"),
        "value": value or 0.0,
        "unit": row.text("unit"),
    }
    said = read_stated(row)
    groups = {
        "source": about["source"], "accelerator": _device_name(row.text("hw")), "engine": _engine(row, said).name,
        "model": row.text("model"), "precision": row.text("precision"), "metric": about["metric"],
        "evidence": row.text("evidence") or "not stated",
    }  # fmt: skip
    assumed: list[str] = []
    try:
        conditions = _conditions(row, said, value, assumed)
    except _RefusedError as refused:
        return PublishedPoint(**about, groups=groups, reason=refused.reason, detail=refused.detail)
    return PublishedPoint(**about, groups=groups, conditions=conditions, assumed=tuple(assumed), unread=unused(said))


def source_key(text: str) -> str:
    """Name of a source without the part that names its rows: links, ids and brackets.

    >>> source_key("InferenceX via ai-dynamo/aiconfigurator@095f58a5 silicon_sample.csv id=2026_03_25_x")
    'InferenceX via ai-dynamo/aiconfigurator'
    >>> source_key("TensorRT-LLM docs perf-overview v0.20 draft (repo copy; says ...)")
    'TensorRT-LLM docs perf-overview v0.20 draft'
    """
    text = re.sub(r"\s*(\(|https?://).*", "", text) or text
    return re.sub(r"\s+id=.*|@[0-9a-f]{6,}.*", "", text).strip() or "not stated"


def _conditions(row: CsvRow, said: Statements, value: float | None, assumed: list[str]) -> PointConditions:
    if not value:
        raise _RefusedError(PointReason.NO_VALUE)
    quantity, counted, scale = _quantity(row, said)
    model = _model(row, assumed)
    device = _accelerator(row)
    if said.value("disaggregated"):
        raise _RefusedError(PointReason.DISAGGREGATED)
    layout, gpus = _layout(row, said, assumed)
    length_in, length_out = (_length(row, column) for column in ("isl", "osl"))
    requests_per_s = _request_rate(row, gpus)
    load_concurrency = _concurrency(row, gpus) if requests_per_s is None else None
    speculation = _speculation(row, said)
    if length_out == 1 and quantity in (Quantity.ITL, Quantity.USER_RATE):
        raise _RefusedError(PointReason.INCONSISTENT, "an answer of one token has no gaps")
    place = catalog.cluster(_cluster_name(device, gpus))
    engine = _engine(row, said)
    if layout.attention_data > 1 and engine.name.startswith("trtllm") and _is_inferencex(row):
        engine = replace(engine, balanced_steps=BALANCED)
    if engine.name == "generic":
        assumed.append(f"engine {row.text('framework')!r} is not known: as a generic one")
    if said.value("prefix_cache") and not said.value("prefix_hits"):
        assumed.append("prefix caching without a stated share of hits: none")
    weights = _weights(row, place.accelerator)
    cache = cache_format(
        _cache_precision(row, said, engine, usual_cache(weights, model.name), assumed), place.accelerator
    )
    if computed_in(weights, place.accelerator) != weights.matmul:
        assumed.append(f"weights multiplied in {computed_in(weights, place.accelerator)}")
    served = Served(model=model, cluster=place, weights=weights, cache=cache, layout=layout)
    try:
        check_layout(layout, model, place)
        load = RequestLoad(
            input_tokens=_mean_length(row, length_in), output_tokens=_mean_length(row, length_out),
            concurrency=load_concurrency, rounds=_rounds(row, assumed),
            prefix_hit_rate=share(said.value("prefix_hits")), **speculation,
        )  # fmt: skip
        if requests_per_s is not None:
            load = _at_rate(served, engine, load, requests_per_s, quantity, assumed)
        limit = batch_limit(served, load, engine, shipped_reserve())
    except InputError as error:
        raise _RefusedError(PointReason.INCONSISTENT, error.message) from None
    except InfeasibleError as error:
        raise _RefusedError(PointReason.DOES_NOT_FIT, error.message) from None
    measured = value * scale * {"": 1, "device": gpus, "node": place.num_nodes}[counted]
    return PointConditions(served=served, load=load, engine=engine, limit=limit, quantity=quantity, measured=measured)


# --- what was measured ---

_IS_MEAN = re.compile(r"(?:^|_)(?:mean|median|p50|avg|average)(?=_|$)")
_OF_MEANS = re.compile(_IS_MEAN.pattern + "|_(?:ms|s|sec|seconds)$")
_PERCENTILE = re.compile(
    r"(?:^|[;,.(] *)(?:values? (?:is|are) )?(?:the )?(?:p(?:75|9\d)|9\dth percentile)s?(?=$| *[;,.)])"
)
"""A clause that makes a number the percentile of its quantity. Fixed lengths have no tail: only means are predicted."""
_PER = re.compile(r"(?:/|_per_)(?:(gpu|device)|(node|server))$")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _quantity(row: CsvRow, said: Statements) -> tuple[Quantity, str, float]:
    """(quantity, "device" or "node" where it is of one of them, factor to SI)."""
    metric = re.sub(r"[^a-z0-9]+", "_", row.text("metric").lower()).strip("_")
    is_mean, metric = _IS_MEAN.search(metric), _OF_MEANS.sub("", metric).strip("_")
    unit = row.text("unit").lower()
    for pattern, ours in spellings()["units"].items():
        unit = re.sub(pattern, ours, unit)
    if unit == "tok/s/user":
        return Quantity.USER_RATE, "", 1.0
    name = _PER.sub("", metric)
    found = next((Quantity[quantity] for quantity, names in spellings()["metrics"].items() if name in names), None)
    if found is None:
        raise _RefusedError(PointReason.OTHER_METRIC, row.text("metric"))
    if found in (Quantity.OUTPUT_RATE, Quantity.TOTAL_RATE):
        if _PER.sub("", unit) != "tok/s":
            raise _RefusedError(PointReason.UNKNOWN_UNIT, row.text("unit"))
        of_one = _PER.search(unit) or _PER.search(metric)
        counted = "node" if of_one and of_one[2] else "device" if of_one or said.value("per_device") else ""
        return (Quantity.TOTAL_RATE if said.value("counts_inputs") else found), counted, 1.0
    if unit not in _SECONDS:
        raise _RefusedError(PointReason.UNKNOWN_UNIT, row.text("unit"))
    if _PERCENTILE.search(row.text("note").lower()) and not is_mean:
        raise _RefusedError(PointReason.OTHER_METRIC, "a percentile of it, by the note")
    return found, "", _SECONDS[unit]


# --- what was served ---


def _model(row: CsvRow, assumed: list[str]) -> Model:
    try:
        found = read_model(row)
        served(found.model)
    except CannotPredictError as error:
        raise _RefusedError(PointReason.UNKNOWN_MODEL, f"{row.text('model')}: {error}") from None
    except InputError as error:
        raise _RefusedError(PointReason.NOT_SERVED, str(error)) from None
    assumed.extend(found.assumed)
    return found.model


def _device_name(text: str) -> str:
    """Name of an accelerator without the size of its memory: B200-180GB is a B200."""
    return re.sub(r"[-_ ]?\d+ ?GB$", "", text.strip(), flags=re.IGNORECASE)


def _accelerator(row: CsvRow) -> str:
    if found := catalogued(row.text("hw")):
        return found.name
    raise _RefusedError(PointReason.UNKNOWN_ACCELERATOR, row.text("hw"))


def _cluster_name(device: str, gpus: int) -> str:
    node = catalog.usual_devices_per_node(device)
    if gpus <= node:
        return f"{device}-{gpus}x1"
    if gpus % node:
        raise _RefusedError(PointReason.INCONSISTENT, f"{gpus} devices are no whole nodes of {node}")
    return f"{device}-{node}x{gpus // node}"


def _speculation(row: CsvRow, said: Statements) -> dict[str, Any]:
    """Tokens that a step drafts and those that it accepts; refuses a row that drafts and does not say how many."""
    if not (said.value("speculative") or said.value("mtp")):
        return {}
    drafted, length = int(said.value("drafted") or 0), float(said.value("acceptance_length") or 0)
    accepted = length - 1 if length else share(said.value("acceptance_rate")) * drafted
    if not 0 < accepted <= drafted:  # an accepted length counts the token of the model itself
        raise _RefusedError(PointReason.SPECULATIVE, row.text("precision"))
    return {"drafted_per_step": drafted, "accepted_per_step": accepted}


_OTHER_FORMATS = re.compile(r"\b(?:kv|cache|attention|attn|activations?)\b")


def _weights(row: CsvRow, accelerator: Accelerator) -> StorageFormat:
    """Format of the weights: the cell, else the one format that its words or the model's name has."""
    text = row.text("precision").lower()
    if text == "fp8" and META_FP8 in row.text("note").lower():
        text = "fp8-ffn"
    parts = [
        part for part in re.split(r"[,;()+/]", text or row.text("model").lower()) if not _OTHER_FORMATS.search(part)
    ]
    found: dict[str, StorageFormat] = {}
    for word in (text, *re.split(r"[\s_-]+", " ".join(parts))):
        with suppress(UnknownNameError):
            found |= {(one := weight_format(word, accelerator)).name: one}
            if word == text:
                break
    if len(found) == 2 and found.keys() >= {"int8", "fp8"}:  # W8A8 of floats
        del found["int8"]
    if len(found) != 1:
        raise _RefusedError(PointReason.UNKNOWN_PRECISION, row.text("precision"))
    return next(iter(found.values()))


META_FP8 = "meta fp8"
"""Meta's own 8-bit checkpoint of Llama 3.1 405B, in the note of a row."""


def _cache_precision(row: CsvRow, said: Statements, engine: EngineTraits, usual: str, assumed: list[str]) -> str:
    stated = said.value("kv_cache") or engine.cache or ("bf16" if META_FP8 in row.text("note").lower() else None)
    if not stated and usual != "bf16":
        assumed.append(f"{usual} KV cache")
    return stated or usual


_ATTENTION_DATA = re.compile(r"(?:attention|attn)[-_ ]*dp|dp[-_ ]*(?:attention|attn)")
_DEGREE = re.compile(r"(?<![a-z])(adp|dep|tep|attntp|moetp|etp|moeep|tp|ep|pp|dp)[-_ =:]*(\d+)")
_UNKNOWN_DEGREE = re.compile(r"\b(?!\w*fp\d)[a-z]+p[-_ =]?\d+")
_OTHER_NAMES = {"attntp": "tp", "moeep": "ep", "etp": "moetp"}


def _layout(row: CsvRow, said: Statements, assumed: list[str]) -> tuple[ServingLayout, int]:
    """The layout of `TP8 moeTP1 EP8`, `8xTP1`, `TP1 attnDP8 moeTP1 EP8`, `DEP8`, and the number of devices."""
    original, gpus = row.text("parallelism"), row.count("gpus")
    text = original.lower()
    if said.value("attention_data") and not _ATTENTION_DATA.search(text):
        text = f"{text} attention dp"
    if gpus == 1 and not _DEGREE.search(text):
        text = f"tp1 {text}"
    if " vs " in text:
        raise _RefusedError(PointReason.OTHER_METRIC, original)
    copies = re.match(r"(\d+) ?x ?(?=tp|dep|tep)", text)
    found = _degrees(text[copies.end() :] if copies else text, original, assumed)
    if said.value("expert_ranks") and not found.keys() & {"ep", "dep", "tep"}:
        found["ep"] = found.get("tp", 1) * (found.get("adp") or found.get("dp") or 1)
        assumed.append(f"experts over {found['ep']} devices: expert parallelism without a degree")
    refused: list[_RefusedError] = []
    for degrees, replicas in _readings(found):
        try:
            layout = _placed(degrees, int(copies[1]) if copies else replicas, found.get("moetp"), gpus)
        except _RefusedError as error:
            refused.append(error)
            continue
        if refused:
            assumed.append(f"{original} is read as {layout.describe()}: attention is data-parallel (ADP)")
        return layout, layout.num_devices
    raise refused[0]


def _degrees(text: str, original: str, assumed: list[str]) -> dict[str, int]:
    """Degrees by name; `adp` is attention data parallelism, 0 where it is named without a number."""
    text = _ATTENTION_DATA.sub("adp", text)
    found: dict[str, int] = {}
    for written, number in _DEGREE.findall(text):
        name = _OTHER_NAMES.get(written) or written
        if found.setdefault(name, int(number)) != int(number):
            raise _RefusedError(PointReason.INCONSISTENT, f"{original} has two degrees of {name}")
    rest, spelled = _DEGREE.sub(" ", text), read_statements(text)
    unknown = _UNKNOWN_DEGREE.search(rest) or (spelled.value("cp") not in (None, "1") and re.search("context.*", text))
    if unknown:
        raise _RefusedError(PointReason.NO_PARALLELISM, f"{unknown[0]} of {original} is not understood")
    found = {name: int(n) for name in ("tp", "pp", "ep", "dp") if (n := spelled.value(name))} | found
    if left := [part for part in re.findall(r"[a-z]{2,}", rest) if part not in spellings()["plain"]]:
        assumed.append(f"parallelism {original!r}: {' '.join(left)} is not read")
    if not found or any(number < 1 for number in found.values()):
        raise _RefusedError(PointReason.NO_PARALLELISM, original)
    return found | ({"adp": 0} if "adp" in rest else {})


def _readings(found: Mapping[str, int]) -> list[tuple[dict[str, int], int | None]]:
    """Degrees of one replica and the number of replicas (None: as many as there are devices), the plainest first.

    TensorRT-LLM and SGLang count the devices of data-parallel attention as tensor ranks: TP8 with attention DP8 are
    eight devices. vLLM splits experts over TP x DP devices: DP8 EP8 are eight devices. DEPn is attention DPn and EPn,
    TEPn is TPn and EPn.
    """
    together, copies = found.get("dep") or found.get("tep"), found.get("dp")
    tensor, expert = found.get("tp") or found.get("tep", 1), found.get("ep") or together or 1
    data = found.get("dep", found.get("adp"))
    if data is None:
        shared = [(tensor, copies, None), (tensor / copies, copies, None)] if copies and expert > 1 else []
        readings = [(tensor, 1, copies), *shared]
    elif data == 0:
        data = copies or tensor
        readings = [(tensor / data, data, None), *([(tensor, data, None)] if copies else [])]
    else:
        readings = [(tensor, data, copies), (tensor / data, data, copies)]
    return [
        ({"tensor": int(width), "attention_data": data, "expert": expert, "pipeline": found.get("pp", 1)}, replicas)
        for width, data, replicas in readings
        if width == int(width)
    ]


def _placed(
    degrees: Mapping[str, int], replicas: int | None, expert_tensor: int | None, gpus: int | None
) -> ServingLayout:
    try:
        one = ServingLayout(**degrees)
    except InputError as error:
        raise _RefusedError(PointReason.INCONSISTENT, error.message) from None
    if expert_tensor not in (None, one.expert_tensor):
        raise _RefusedError(PointReason.INCONSISTENT, f"experts over {expert_tensor} devices each, {one.describe()}")
    if gpus is None:
        gpus = one.replica_devices * (replicas or 1)
    if gpus % one.replica_devices:
        raise _RefusedError(PointReason.INCONSISTENT, f"{gpus} devices, {one.describe()}")
    if replicas is None:
        replicas = gpus // one.replica_devices
    if replicas * one.replica_devices != gpus:
        raise _RefusedError(PointReason.INCONSISTENT, f"{gpus} devices, {replicas} x {one.describe()}")
    return replace(one, replicas=replicas)


# --- under which load ---


def _length(row: CsvRow, column: str) -> int:
    text = row.text(column)
    found = re.fullmatch(r"~? ?([\d_,]+)(?:\.0+)?( ?k)?(?: tokens?)?", text.lower())
    if not found:
        raise _RefusedError(PointReason.NO_LENGTHS, f"{column} {text}" if text else "")
    length = replace(row, cells={column: found[1]}).count(column) or _none(PointReason.NO_LENGTHS)
    return length * 1024 if found[2] else length  # prompts of 8k tokens have 8,192


def _none(reason: PointReason) -> Any:
    raise _RefusedError(reason)


_IN_FLIGHT = re.compile(
    r"(?:(?:max[- ])?conc(?:urrency|urrent)?|batch(?: size)?|bs|users)?[ =:]*([\d_,]+)(?:\.0+)?"
    r"(?: (?:concurrent|users|clients|streams|requests|sequences|in flight|\(single stream\)))*"
    r"( ?(?:per |/)(?:gpu|device))?"
)


def _concurrency(row: CsvRow, gpus: int) -> float | None:
    text = row.text("concurrency").lower()
    if text in spellings()["saturated"]:
        return None
    if not (found := _IN_FLIGHT.fullmatch("1" if text == "single stream" else text)):
        raise _RefusedError(PointReason.NO_LOAD, text)
    number = replace(row, cells={"concurrency": found[1]}).count("concurrency") or _none(PointReason.NO_LOAD)
    return float(number * (gpus if found[2] else 1))


_PER_SECOND = r"(?:qps|rps|req(?:uest)?s? ?(?:/|per ) ?s(?:ec(?:ond)?)?)"
_REQUEST_RATE = re.compile(
    rf"(?:(?:request )?rate|qps|rps)[ =:]*(\d*\.?\d+)(?: ?{_PER_SECOND})?(?: ?(?:per |/)(gpu|device))?"
    rf"|(\d*\.?\d+) ?{_PER_SECOND}(?: ?(?:per |/)(gpu|device))?"
)


def _request_rate(row: CsvRow, gpus: int) -> float | None:
    """Requests/s that arrive on all devices; None where the load is no rate."""
    if not (found := _REQUEST_RATE.fullmatch(row.text("concurrency").lower().replace("-", " ").replace("_", " "))):
        return None
    rate = replace(row, cells={"concurrency": found[1] or found[3]}).number("concurrency")
    return (rate or _none(PointReason.NO_LOAD)) * (gpus if found[2] or found[4] else 1)


def _at_rate(
    served: Served, engine: EngineTraits, load: RequestLoad, rate: float, quantity: Quantity, assumed: list[str]
) -> RequestLoad:
    """The load whose requests in flight finish the rate, by the shipped constants. A full server is at its own rate."""
    from meshwright.inference.server import rate_load, server  # which predict by points

    asked = server(served, engine)
    try:
        return rate_load(asked, load, rate)
    except InfeasibleError as error:
        if quantity is Quantity.TTFT:  # it grows with every request of the benchmark
            raise _RefusedError(PointReason.NO_LOAD, error.message) from None
        assumed.append(f"{rate:g} requests/s are more than it finishes: a full server")
        return load


_INFERENCEX = ("inferencex", "inferencemax")
"""Beginnings of the names of SemiAnalysis's benchmark."""

ROUNDS, SHORTEST = 10.0, 0.8
"""It sends ten requests for each one in flight, the first of them all at once, and draws their lengths from 0.8 of the
stated one to the whole (benchmark_serving.py --num-prompts CONC * 10 --request-rate inf --random-range-ratio 0.8)."""


BALANCED = 60
"""Steps that its TensorRT-LLM lets a prompt wait for those of other attention groups (benchmarks/*_trt.sh:
attention_dp_config with enable_balance and timeout_iters 60)."""


def _is_inferencex(row: CsvRow) -> bool:
    return row.text("source").lower().startswith(_INFERENCEX)


def _mean_length(row: CsvRow, stated: int) -> int:
    drawn = _is_inferencex(row) and stated > 1
    return round(stated * (1 + SHORTEST) / 2) if drawn else stated


def _rounds(row: CsvRow, assumed: list[str]) -> float:
    """Rounds of the benchmark, which a mean time to the first token is over; a median is of later rounds."""
    metric = row.text("metric").lower()
    if (
        not _is_inferencex(row)
        or not row.count("concurrency")
        or "ttft" not in metric
        or re.search("median|p50", metric)
    ):
        return 0.0
    assumed.append(f"{ROUNDS:g} requests for each one in flight, which begin at once")
    return ROUNDS


@cache
def engines() -> dict[str, EngineTraits]:
    """Inference engines by name."""
    named = ("prefixes", "before", "before_date", "constants")
    return {
        name: EngineTraits(
            name=values.get("constants", name), **{key: value for key, value in values.items() if key not in named}
        )
        for name, values in _engine_data().items()
    }


def _engine_data() -> dict[str, dict[str, Any]]:
    return {name: values for name, values in toml_table(DATA / "engines.toml").items() if name != "sources"}


def _engine(row: CsvRow, said: Statements) -> EngineTraits:
    measured = re.search(r"measured=(20\d\d-\d\d)", row.text("note"))
    stated = {name: int(number) for name in _STATED if (number := said.value(name))}
    return replace(engine_of(row.text("framework"), date=measured[1] if measured else ""), **stated)


_STATED = ("batch_tokens", "graph_tokens", "polled_steps", "max_sequences")
"""Traits of an engine by the options of SGLang, vLLM and TensorRT-LLM that a note has."""


def engine_of(framework: str, date: str = "") -> EngineTraits:
    """The engine of a framework's name in a table, by its release or its date; `date` where the name has neither.

    >>> [engine_of(text).name for text in ("TRT-LLM 0.19", "sglang v0.5.9-cu130", "vLLM (Nov 2024)", "vllm 0.10.2", "")]
    ['trtllm-0', 'sglang', 'vllm-v0', 'vllm', 'generic']
    """
    text = framework.lower().strip()
    dated = re.search(r"20\d\d(-\d\d)?", text)
    for name, values in _engine_data().items():
        names = "|".join(re.escape(prefix) for prefix in values["prefixes"])
        if not (named := re.search(rf"(?<![a-z])(?:{names})", text)):
            continue
        release = re.search(r"(?<![\d.])\d{1,2}(\.\d+)+", text[named.end() :])
        if "before" not in values or _is_before(values, release and release[0], dated[0] if dated else date):
            return engines()[name]
    return engines()["generic"]


def _is_before(values: Mapping[str, Any], release: str | None, date: str) -> bool:
    if release is None:
        return "" < date < values["before_date"]
    numbers, first = ([int(part) for part in text.split(".")] for text in (release, values["before"]))
    return numbers < first
