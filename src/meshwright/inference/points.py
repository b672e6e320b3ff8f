"""Published points of inference performance: a CSV row becomes a served model, its load and a measured quantity.

Columns: row, model, precision, hw, gpus, parallelism, framework, isl, osl, concurrency, metric, value, unit, evidence,
source, note. A row that says too little is refused with a reason of a closed list, and counted. Nothing is guessed
silently: every assumption is noted on the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.accuracy.csvfile import MAX_COUNT, CsvRow, read_table
from meshwright.catalog import lookup as catalog
from meshwright.errors import InfeasibleError, InputError, UnknownNameError
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.formats import cache_format, computed_in, usual_cache, weight_format
from meshwright.inference.layout import ServingLayout, check_layout
from meshwright.inference.memory import served
from meshwright.inference.serving import BatchLimit, EngineTraits, RequestLoad, batch_limit
from meshwright.inference.work import Served

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


def shipped_points_path() -> Path:
    """The shipped CSV of published points."""
    return Path(str(files("meshwright.inference") / "data" / "points.csv"))


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
    groups = {
        "source": about["source"], "accelerator": _device_name(row.text("hw")), "engine": _engine(row).name,
        "model": row.text("model"), "precision": row.text("precision"), "metric": about["metric"],
        "evidence": row.text("evidence") or "not stated",
    }  # fmt: skip
    assumed: list[str] = []
    try:
        conditions = _conditions(row, value, assumed)
    except _RefusedError as refused:
        return PublishedPoint(**about, groups=groups, reason=refused.reason, detail=refused.detail)
    return PublishedPoint(**about, groups=groups, conditions=conditions, assumed=tuple(assumed))


def source_key(text: str) -> str:
    """Name of a source without the part that names its rows: links, ids and brackets.

    >>> source_key("InferenceX via ai-dynamo/aiconfigurator@095f58a5 silicon_sample.csv id=2026_03_25_x")
    'InferenceX via ai-dynamo/aiconfigurator'
    >>> source_key("TensorRT-LLM docs perf-overview v0.20 draft (repo copy; says ...)")
    'TensorRT-LLM docs perf-overview v0.20 draft'
    """
    text = re.sub(r"\s*(\(|https?://).*", "", text) or text
    return re.sub(r"\s+id=.*|@[0-9a-f]{6,}.*", "", text).strip() or "not stated"


def _conditions(row: CsvRow, value: float | None, assumed: list[str]) -> PointConditions:
    if not value:
        raise _RefusedError(PointReason.NO_VALUE)
    quantity, per_device, scale = _quantity(row)
    model = _model(row)
    device = _accelerator(row)
    layout, gpus = _layout(row, assumed)
    length_in, length_out = (_length(row, column) for column in ("isl", "osl"))
    load_concurrency = _concurrency(row)
    if length_out == 1 and quantity in (Quantity.ITL, Quantity.USER_RATE):
        raise _RefusedError(PointReason.INCONSISTENT, "an answer of one token has no gaps")
    place = catalog.cluster(_cluster_name(device, gpus))
    engine = _engine(row)
    try:
        weights = weight_format(_precision(row), place.accelerator)
        cache = cache_format(_cache_precision(row, engine, usual_cache(weights), assumed), place.accelerator)
    except UnknownNameError as error:
        raise _RefusedError(PointReason.UNKNOWN_PRECISION, error.message) from None
    if computed_in(weights, place.accelerator) != weights.matmul:
        assumed.append(f"weights multiplied in {computed_in(weights, place.accelerator)}")
    served = Served(model=model, cluster=place, weights=weights, cache=cache, layout=layout)
    try:
        check_layout(layout, model, place)
        load = RequestLoad(
            input_tokens=_mean_length(row, length_in), output_tokens=_mean_length(row, length_out),
            concurrency=load_concurrency, rounds=_rounds(row, assumed),
        )  # fmt: skip
        limit = batch_limit(served, load, engine, shipped_reserve())
    except InputError as error:
        raise _RefusedError(PointReason.INCONSISTENT, error.message) from None
    except InfeasibleError as error:
        raise _RefusedError(PointReason.DOES_NOT_FIT, error.message) from None
    measured = value * scale * (gpus if per_device else 1)
    return PointConditions(served=served, load=load, engine=engine, limit=limit, quantity=quantity, measured=measured)


# --- what was measured ---

_RATES = {
    "output_throughput": Quantity.OUTPUT_RATE,
    "output_token_throughput": Quantity.OUTPUT_RATE,
    "output_throughput_per_gpu": Quantity.OUTPUT_RATE,
    "throughput": Quantity.OUTPUT_RATE,
    "throughput_per_gpu": Quantity.OUTPUT_RATE,
    "total_throughput": Quantity.TOTAL_RATE,
    "total_throughput(in+out)": Quantity.TOTAL_RATE,
    "total_token_throughput": Quantity.TOTAL_RATE,
    "total_throughput_per_gpu": Quantity.TOTAL_RATE,
}
_TIMES = {
    "tpot": Quantity.ITL, "itl": Quantity.ITL, "inter_token_latency": Quantity.ITL, "ttft": Quantity.TTFT,
    "time_to_first_token": Quantity.TTFT, "batch_latency": Quantity.BATCH,
}  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TOKENS_PER_S = ("tok/s", "tokens/s", "token/s", "tok/sec", "tokens/sec")
_PER_DEVICE = ("/gpu", "/device")
_PER_USER = ("/user", "/u")


def _quantity(row: CsvRow) -> tuple[Quantity, bool, float]:
    """(quantity, is it per device, factor to SI)."""
    metric = row.text("metric").lower().replace(" ", "_")
    unit = row.text("unit").lower().replace(" ", "")
    for prefix in ("median_", "mean_", "p50_"):
        metric = metric.removeprefix(prefix)
    if metric in _TIMES:
        if unit not in _SECONDS:
            raise _RefusedError(PointReason.UNKNOWN_UNIT, row.text("unit"))
        return _TIMES[metric], False, _SECONDS[unit]
    user = next((e for e in _PER_USER if unit.endswith(e)), "")
    if user and unit.removesuffix(user) in _TOKENS_PER_S:
        return Quantity.USER_RATE, False, 1.0
    if metric not in _RATES:
        raise _RefusedError(PointReason.OTHER_METRIC, row.text("metric"))
    ending = next((e for e in _PER_DEVICE if unit.endswith(e)), "")
    if unit.removesuffix(ending) not in _TOKENS_PER_S:
        raise _RefusedError(PointReason.UNKNOWN_UNIT, row.text("unit"))
    return _RATES[metric], bool(ending) or metric.endswith("_per_gpu"), 1.0


# --- what was served ---


def _model(row: CsvRow) -> Any:
    name = row.text("model")
    try:
        model = catalog.model(name)
        served(model)
    except UnknownNameError:
        raise _RefusedError(PointReason.UNKNOWN_MODEL, name) from None
    except InputError as error:
        raise _RefusedError(PointReason.NOT_SERVED, str(error)) from None
    return model


def _device_name(text: str) -> str:
    """Name of an accelerator without the size of its memory: B200-180GB is a B200."""
    return re.sub(r"[-_ ]?\d+ ?GB$", "", text.strip(), flags=re.IGNORECASE)


def _accelerator(row: CsvRow) -> str:
    for name in (row.text("hw"), _device_name(row.text("hw"))):
        try:
            return catalog.accelerator(name).name
        except UnknownNameError:
            continue
    raise _RefusedError(PointReason.UNKNOWN_ACCELERATOR, row.text("hw"))


def _cluster_name(device: str, gpus: int) -> str:
    node = catalog.usual_devices_per_node(device)
    if gpus <= node:
        return f"{device}-{gpus}x1"
    if gpus % node:
        raise _RefusedError(PointReason.INCONSISTENT, f"{gpus} devices are no whole nodes of {node}")
    return f"{device}-{node}x{gpus // node}"


def _precision(row: CsvRow) -> str:
    text = row.text("precision").lower()
    if "mtp" in text or "mtp" in row.text("framework").lower():
        raise _RefusedError(PointReason.SPECULATIVE, row.text("precision"))
    return "fp8-ffn" if text == "fp8" and META_FP8 in row.text("note").lower() else text


META_FP8 = "meta fp8"
"""Meta's own 8-bit checkpoint of Llama 3.1 405B, in the note of a row."""


def _cache_precision(row: CsvRow, engine: EngineTraits, usual: str, assumed: list[str]) -> str:
    note = row.text("note").lower()
    if engine.cache is not None and "--kv-cache-dtype" not in note:
        return engine.cache
    if "fp8 kv" in note or "fp8-kv" in note or "kv fp8" in note or "kvfp8" in note:
        return "fp8"
    if "bf16 kv" in note or "fp16 kv" in note:
        return "bf16"
    if META_FP8 in note:
        return "bf16"
    if usual != "bf16":
        assumed.append(f"{usual} KV cache")
    return usual


_ATTENTION_DATA = re.compile(r"(?:attention|attn)[-_ ]*dp|dp[-_ ]*(?:attention|attn)")
_DEGREE = re.compile(r"(?<![a-z])(adp|dep|tep|attntp|moetp|etp|moeep|tp|ep|pp|dp)[-_ =]?(\d+)")
_UNKNOWN_DEGREE = re.compile(r"\b(?!\w*fp\d)[a-z]+p[-_ =]?\d+")
_OTHER_NAMES = {"attntp": "tp", "moeep": "ep", "etp": "moetp"}


def _layout(row: CsvRow, assumed: list[str]) -> tuple[ServingLayout, int]:
    """The layout of `TP8 moeTP1 EP8`, `8xTP1`, `TP1 attnDP8 moeTP1 EP8`, `DEP8`, and the number of devices."""
    original, gpus = row.text("parallelism"), row.count("gpus")
    text = original.lower()
    if "disagg" in text:
        raise _RefusedError(PointReason.DISAGGREGATED)
    if " vs " in text:
        raise _RefusedError(PointReason.OTHER_METRIC, original)
    copies = re.match(r"(\d+) ?x ?(?=tp|dep|tep)", text)
    found = _degrees(text[copies.end() :] if copies else text, original)
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


def _degrees(text: str, original: str) -> dict[str, int]:
    """Degrees by name; `adp` is attention data parallelism, 0 where it is named without a number."""
    text = _ATTENTION_DATA.sub("adp", text)
    found: dict[str, int] = {}
    for written, number in _DEGREE.findall(text):
        name = _OTHER_NAMES.get(written) or written
        if found.setdefault(name, int(number)) != int(number):
            raise _RefusedError(PointReason.INCONSISTENT, f"{original} has two degrees of {name}")
    rest = _DEGREE.sub(" ", text)
    if unknown := _UNKNOWN_DEGREE.search(rest):
        raise _RefusedError(PointReason.NO_PARALLELISM, f"{unknown[0]} of {original} is not understood")
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
    if not re.fullmatch(r"[\d_,]+(\.0+)?", text):
        raise _RefusedError(PointReason.NO_LENGTHS, f"{column} {text}" if text else "")
    return row.count(column) or _none(PointReason.NO_LENGTHS)


def _none(reason: PointReason) -> Any:
    raise _RefusedError(reason)


def _concurrency(row: CsvRow) -> float | None:
    text = row.text("concurrency").lower()
    if text in ("max load", "offline", "max", "saturated"):
        return None
    if not re.fullmatch(r"[\d_,]+(\.0+)?", text):
        raise _RefusedError(PointReason.NO_LOAD, text)
    return float(row.count("concurrency") or _none(PointReason.NO_LOAD))


_INFERENCEX = ("inferencex", "inferencemax")
"""Beginnings of the names of SemiAnalysis's benchmark."""

ROUNDS, SHORTEST = 10.0, 0.8
"""It sends ten requests for each one in flight, the first of them all at once, and draws their lengths from 0.8 of the
stated one to the whole (benchmark_serving.py --num-prompts CONC * 10 --request-rate inf --random-range-ratio 0.8)."""


def _mean_length(row: CsvRow, stated: int) -> int:
    drawn = row.text("source").lower().startswith(_INFERENCEX) and stated > 1
    return round(stated * (1 + SHORTEST) / 2) if drawn else stated


def _rounds(row: CsvRow, assumed: list[str]) -> float:
    """Rounds of the benchmark, which a mean time to the first token is over; a median is of later rounds."""
    source, metric = row.text("source").lower(), row.text("metric").lower()
    if (
        not source.startswith(_INFERENCEX)
        or not row.count("concurrency")
        or "ttft" not in metric
        or metric.startswith(("median", "p50"))
    ):
        return 0.0
    assumed.append(f"{ROUNDS:g} requests for each one in flight, which begin at once")
    return ROUNDS


@cache
def engines() -> dict[str, EngineTraits]:
    """Inference engines by name."""
    named = ("prefixes", "before", "before_date")
    return {
        name: EngineTraits(name=name, **{key: value for key, value in values.items() if key not in named})
        for name, values in _engine_data().items()
    }


@cache
def _engine_data() -> dict[str, dict[str, Any]]:
    import tomllib

    text = (files("meshwright.inference") / "data" / "engines.toml").read_text(encoding="utf-8")
    return {name: values for name, values in tomllib.loads(text).items() if name != "sources"}


def _engine(row: CsvRow) -> EngineTraits:
    note = row.text("note")
    measured = re.search(r"measured=(20\d\d-\d\d)", note)
    stated = {name: int(found[1]) for name, option in _STATED.items() if (found := re.search(option, note))}
    return replace(engine_of(row.text("framework"), date=measured[1] if measured else ""), **stated)


_STATED = {
    "batch_tokens": r"(?:chunked-prefill-size|max-num-batched-tokens|max_num_tokens)[ =](\d+)",
    "polled_steps": r"(?:num-continuous-decode-steps|scheduler-recv-interval)[ =](\d+)",
}
"""Traits of an engine by the options of SGLang, vLLM and TensorRT-LLM that a note has."""


def engine_of(framework: str, date: str = "") -> EngineTraits:
    """The engine of a framework's name in a table, by its release or its date; `date` where the name has neither.

    >>> [engine_of(text).name for text in ("TRT-LLM 0.19", "sglang v0.5.9-cu130", "vLLM (Nov 2024)", "vllm 0.10.2", "")]
    ['trtllm-0', 'sglang', 'vllm-v0', 'vllm', 'generic']
    """
    text = framework.lower().strip()
    release = re.search(r"(?<![\d.])\d{1,2}(\.\d+)+", text)
    dated = re.search(r"20\d\d(-\d\d)?", text)
    for name, values in _engine_data().items():
        if not any(text.startswith(prefix) for prefix in values["prefixes"]):
            continue
        if "before" not in values or _is_before(values, release and release[0], dated[0] if dated else date):
            return engines()[name]
    return engines()["generic"]


def _is_before(values: Mapping[str, Any], release: str | None, date: str) -> bool:
    if release is None:
        return "" < date < values["before_date"]
    numbers, first = ([int(part) for part in text.split(".")] for text in (release, values["before"]))
    return numbers < first
