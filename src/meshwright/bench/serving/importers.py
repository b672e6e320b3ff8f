"""Results of other serving clients as points of ours, with their definitions named.

vllm        `vllm bench serve --save-result`: one JSON mapping        ITL = chunk gaps pooled, TPOT = per request
sglang      `sglang.bench_serving --output-file`: JSON lines          the same
aiperf      `profile_export_aiperf.json` (also genai-perf's)          inter_token_latency = per request
guidellm    `benchmarks.json`                                         inter_token_latency_ms = per request
inferencex  aggregate JSON of InferenceX: per GPU, in seconds         as vLLM

A field's definition decides its place, not its name: vLLM's `itl` is a chunk gap here, AIPerf's a time per
output token. Values that a file lacks stay empty, and `gaps` names values that cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.json_values import load_text, parse_json
from meshwright.records.serving import Arrivals, Latency, Load, ServingPoint, TokenSource, token_rates

_FIELDS = toml_table(Path(__file__).with_name("clients.toml"))


class ResultFormat(StrEnum):
    """Client that wrote a result."""

    VLLM = "vllm"
    SGLANG = "sglang"
    AIPERF = "aiperf"
    GUIDELLM = "guidellm"
    INFERENCEX = "inferencex"


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
    """One measured load of another client."""

    format: ResultFormat
    file: str
    model: str
    point: ServingPoint
    num_devices: int | None = None
    gaps: tuple[str, ...] = ()  # what the file lacks or defines otherwise


def read_results_of(path: Path) -> list[ImportedResult]:
    """Read the results in a file, of whichever client. Raises InputError for files of none."""
    documents = _documents(path)
    found: list[ImportedResult] = []
    for number, document in enumerate(documents, start=1):
        where = f"{path}:{number}" if len(documents) > 1 else str(path)
        kind = result_format(document)
        if kind is None:
            raise InputError(
                f"{where}: not the result of a known client", got=", ".join(sorted(document)[:5]),
                allowed=", ".join(ResultFormat),
            )  # fmt: skip
        found += READERS[kind](document, where)
    return found


def _documents(path: Path) -> list[dict[str, Any]]:
    """Mappings of a JSON file, or of JSON lines."""
    try:
        text = load_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"the result cannot be read ({error})", got=str(path)) from None
    try:
        parsed = parse_json(text)
        found = parsed if isinstance(parsed, list) else [parsed]
    except ValueError:
        try:
            found = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise InputError("neither JSON nor JSON lines", got=str(path)) from None
    if not found or not all(isinstance(document, dict) for document in found):
        raise InputError("the file has no results", got=str(path), allowed="JSON mappings")
    return found


def result_format(document: Mapping[str, Any]) -> ResultFormat | None:
    """The client that wrote a document, by keys that only it writes; None if no client is known."""
    if isinstance(document.get("benchmarks"), list):
        return ResultFormat.GUIDELLM
    if "tput_per_gpu" in document:
        return ResultFormat.INFERENCEX
    if isinstance(document.get("request_latency"), dict) and isinstance(document.get("request_count"), dict):
        return ResultFormat.AIPERF
    if "total_token_throughput" in document:
        return ResultFormat.VLLM
    if "total_throughput" in document and "median_ttft_ms" in document:
        return ResultFormat.SGLANG
    return None


# --- values ---


def _number(document: Mapping[str, Any], key: str, where: str) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    try:
        found = math.inf if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.inf
    if not math.isfinite(found) or found < 0:
        raise InputError(f"{where}: {key} is no number from 0", got=value)
    return found


def _needed(document: Mapping[str, Any], key: str, where: str) -> float:
    found = _number(document, key, where)
    if found is None:
        raise InputError(f"{where}: {key} is missing")
    return found


def _latency(parts: Mapping[str, float | None], *, n: int, unit_s: float) -> Latency | None:
    """Distribution from the statistics that a file has; None without a median."""
    median = parts.get("median")
    if median is None:
        return None

    def value(name: str) -> float | None:
        found = parts.get(name)
        return None if found is None else found * unit_s

    return Latency(
        n=n, mean=value("mean"), median=median * unit_s, median_low=None, median_high=None,
        p90=value("p90"), p95=value("p95"), p99=value("p99"), low=value("low"), high=value("high"),
    )  # fmt: skip


def _named_latency(document: Mapping[str, Any], pattern: str, where: str, *, n: int, unit_s: float) -> Latency | None:
    """Distribution from keys such as `p90_ttft_ms`; `{}` in the pattern stands for the statistic."""
    statistics = ("mean", "median", "p90", "p95", "p99")
    return _latency({name: _number(document, pattern.format(name), where) for name in statistics}, n=n, unit_s=unit_s)


def _counted(
    load: Load,
    *,
    started: object,
    source: TokenSource,
    done: int,
    errors: Mapping[str, int],
    num_input: int,
    num_output: int,
    wall_s: float,
    **measured: Any,
) -> ServingPoint:
    """A point; rates that were not `measured` are the counts over the wall time."""
    rates = token_rates(wall_s=wall_s, done=done, num_input=num_input, num_output=num_output)
    return ServingPoint(
        load=load, repeat=1, started=str(started or ""), token_source=source, num_requests=done + sum(errors.values()),
        errors={name: n for name, n in errors.items() if n}, **rates | measured,
    )  # fmt: skip


def _closed(concurrency: float | None) -> Load:
    """A closed loop; without a number its load is not stated."""
    return Load(concurrency=None if concurrency is None else max(1, round(concurrency)))


def _load(document: Mapping[str, Any], where: str) -> Load:
    """The load of vLLM and SGLang: a finite rate is an open loop, `inf` sends all requests that may be in flight.

    `burstiness` is the shape of gamma arrivals, 1 is Poisson (`get_request` of vLLM's benchmarks).
    """
    at_once = _number(document, "max_concurrency", where) or None
    rate = document.get("request_rate")
    if rate is None or str(rate).lower() in ("inf", "infinity"):
        return _closed(at_once if rate is None else at_once or _number(document, "num_prompts", where))
    offered, shape = _needed(document, "request_rate", where), _number(document, "burstiness", where)
    if not offered or shape == 0:
        raise InputError(f"{where}: request_rate and burstiness are above 0", got=f"{rate} and {shape}")
    is_poisson = shape in (None, 1)
    return replace(
        _closed(at_once), arrivals=Arrivals.POISSON if is_poisson else Arrivals.GAMMA,
        offered_per_s=offered, shape=None if is_poisson else shape,
    )  # fmt: skip


def _configured_load(config: object, where: str, *, concurrency: str, rate: str, pattern: str) -> Load:
    """The load in the configuration of AIPerf or guidellm: rates are Poisson arrivals unless `pattern` is another."""
    try:
        at_once = float(concurrency) if concurrency else None
        offered = float(rate) if rate else math.inf
    except ValueError:
        raise InputError(f"{where}: no numbers for its load", got=f"{concurrency}, {rate}") from None
    if not 0 < offered < math.inf:
        return _closed(1.0 if pattern == "synchronous" else at_once)
    known = {name: Arrivals(name) for name in ("poisson", "constant", "gamma")}
    if pattern and pattern not in known:
        raise InputError(f"{where}: its arrivals", got=pattern, allowed=", ".join(known))
    arrivals = known[pattern or "poisson"]
    smoothness = _deep(config, "arrival_smoothness") if arrivals is Arrivals.GAMMA else ""
    return replace(
        _closed(at_once), arrivals=arrivals, offered_per_s=offered, shape=float(smoothness) if smoothness else None
    )


# --- readers ---


def _not_read(document: Mapping[str, Any]) -> list[str]:
    """Single values that no field here reads, such as vLLM's `--metadata`; statistics of latencies aside."""
    return sorted(
        key
        for key, value in document.items()
        if isinstance(value, str | int | float)
        and key not in _FIELDS["read_or_known"]
        and not key.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms", "_e2e_latency_ms"))
    )


def _vllm_like(
    document: Mapping[str, Any], where: str, kind: ResultFormat, *, total: str, e2e: str, inputs: str, outputs: str
) -> list[ImportedResult]:
    """vLLM and SGLang: the same fields under slightly different names; milliseconds."""
    done = int(_needed(document, "completed", where))
    wall_s = _needed(document, "duration", where)

    def latency(name: str) -> Latency | None:
        return _named_latency(document, f"{{}}_{name}_ms", where, n=done, unit_s=1e-3)

    num_input, num_output = int(_needed(document, inputs, where)), int(_needed(document, outputs, where))
    asked = _number(document, "num_prompts", where)
    failed = _number(document, "failed", where)
    num_failed = int(failed) if failed is not None else max(0, int(asked) - done) if asked else 0
    gaps = []
    if asked is None and failed is None:
        gaps.append("failed requests are not in the file")
    accepted = _number(document, "accept_length", where)
    if accepted is not None and accepted > 1:
        gaps.append(f"speculative decoding: {accepted:g} tokens per step, so gaps between chunks are not per token")
    if latency("itl") is not None:
        gaps.append("its ITL is the gap between chunks over all requests, not the time per output token")
    if others := _not_read(document):
        gaps.append(f"not read: {', '.join(others)}")
    point = _counted(
        _load(document, where),
        started=document.get("date"), source=TokenSource.TOKENIZER, done=done, errors={"http_error": num_failed},
        num_input=num_input, num_output=num_output, wall_s=wall_s,
        requests_per_s=_needed(document, "request_throughput", where),
        output_tokens_per_s=_needed(document, "output_throughput", where),
        total_tokens_per_s=_needed(document, total, where),
        good_requests_per_s=_number(
            document, "request_goodput" if "request_goodput" in document else "request_goodput:", where
        ),
        ttft_s=latency("ttft"), tpot_s=latency("tpot"), chunk_gap_s=latency("itl"), e2e_s=latency(e2e),
    )  # fmt: skip
    model = str(document.get("model_id") or document.get("model") or "")
    return [ImportedResult(format=kind, file=where, model=model, point=point, gaps=tuple(gaps))]


def _vllm(document: Mapping[str, Any], where: str) -> list[ImportedResult]:
    return _vllm_like(
        document, where, ResultFormat.VLLM, total="total_token_throughput", e2e="e2el",
        inputs="total_input_tokens", outputs="total_output_tokens",
    )  # fmt: skip


def _sglang(document: Mapping[str, Any], where: str) -> list[ImportedResult]:
    names = ("total_input_tokens", "total_output_tokens")
    inputs, outputs = names if names[0] in document else ("total_input", "total_output")
    named = {"duration": document.get("duration", document.get("benchmark_duration"))}
    return _vllm_like(
        {**document, **named}, where, ResultFormat.SGLANG, total="total_throughput", e2e="e2e_latency",
        inputs=inputs, outputs=outputs,
    )  # fmt: skip


AIPERF_UNITS_S, AIPERF_PARTS = _FIELDS["aiperf_units_s"], _FIELDS["aiperf_parts"]


def _aiperf(document: Mapping[str, Any], where: str) -> list[ImportedResult]:
    def average(name: str) -> float | None:
        found = document.get(name)
        return _number(found, "avg", f"{where}: {name}") if isinstance(found, dict) else None

    def latency(name: str) -> Latency | None:
        found = document.get(name)
        if not isinstance(found, dict):
            return None
        unit = str(found.get("unit", "ms"))
        if unit not in AIPERF_UNITS_S:
            raise InputError(f"{where}: {name} has an unknown unit", got=unit, allowed=", ".join(AIPERF_UNITS_S))
        parts = {ours: _number(found, theirs, f"{where}: {name}") for ours, theirs in AIPERF_PARTS.items()}
        count = round(_number(found, "count", f"{where}: {name}") or done)
        return _latency(parts, n=count, unit_s=AIPERF_UNITS_S[unit])

    done = round(average("request_count") or 0)
    output_per_s = average("output_token_throughput")
    mean_output = average("output_sequence_length")
    if not done or output_per_s is None or mean_output is None:
        raise InputError(f"{where}: request_count, output_token_throughput or output_sequence_length is missing")
    mean_input = average("input_sequence_length")
    num_output, num_input = round(done * mean_output), round(done * (mean_input or 0))
    wall_s = num_output / output_per_s if output_per_s else 0.0
    duration = document.get("benchmark_duration")
    if isinstance(duration, dict):
        unit_s = AIPERF_UNITS_S.get(str(duration.get("unit", "sec")), 1.0)
        wall_s = (average("benchmark_duration") or wall_s / unit_s) * unit_s
    gaps = ["its inter_token_latency is the time per output token of each request, not the gap between chunks"]
    if latency("inter_chunk_latency") is None:
        gaps.append("gaps between chunks are not in the file")
    if mean_input is None:
        gaps.append("input tokens are not in the file: total tokens/s count the output only")
    config = document.get("input_config") or {}
    point = _counted(
        _aiperf_load(config, where), started=document.get("start_time"), source=TokenSource.TOKENIZER, done=done,
        errors={"http_error": round(average("error_request_count") or 0)},
        num_input=num_input, num_output=num_output, wall_s=wall_s,
        requests_per_s=average("request_throughput") or 0.0, output_tokens_per_s=output_per_s,
        good_requests_per_s=average("goodput"), ttft_s=latency("time_to_first_token"),
        tpot_s=latency("inter_token_latency"), chunk_gap_s=latency("inter_chunk_latency"),
        e2e_s=latency("request_latency"),
    )  # fmt: skip
    model = _deep(config, "model") or _deep(config.get("models"), "name")
    return [ImportedResult(format=ResultFormat.AIPERF, file=where, model=model, point=point, gaps=tuple(gaps))]


def _aiperf_load(config: Mapping[str, Any], where: str) -> Load:
    """The load in AIPerf's own configuration, wherever its version keeps it."""
    rate = _deep(config, "request_rate") or _deep(config.get("phases"), "rate")
    pattern = _deep(config, "arrival_pattern") or _deep(config, "request_rate_mode")
    return _configured_load(config, where, concurrency=_deep(config, "concurrency"), rate=rate, pattern=pattern.lower())


def _deep(config: object, name: str) -> str:
    """The first plain value of a key, at any depth; empty if there is none. `model` also as a list `model_names`."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if (
                key in (name, f"{name}_names")
                and isinstance(value, list)
                and value
                and isinstance(value[0], str | int | float)
            ):
                return str(value[0])
            if key == name and isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
        values: Sequence[object] = tuple(config.values())
    elif isinstance(config, list):
        values = config
    else:
        return ""
    return next((found for value in values if (found := _deep(value, name))), "")


def _guidellm(document: Mapping[str, Any], where: str) -> list[ImportedResult]:
    found = []
    for number, benchmark in enumerate(document["benchmarks"], start=1):
        at = f"{where}: benchmarks[{number}]"
        metrics = benchmark.get("metrics") if isinstance(benchmark, dict) else None
        if not isinstance(metrics, dict):
            raise InputError(f"{at} has no metrics")
        found.append(_guidellm_one(document, benchmark, metrics, at))
    return found


def _guidellm_one(
    document: Mapping[str, Any], benchmark: Mapping[str, Any], metrics: Mapping[str, Any], at: str
) -> ImportedResult:
    def successful(name: str) -> Mapping[str, Any]:
        block = metrics.get(name)
        inner = block.get("successful") if isinstance(block, dict) else None
        return inner if isinstance(inner, dict) else {}

    def latency(name: str, unit_s: float) -> Latency | None:
        block = successful(name)
        shares = block.get("percentiles") or {}
        named = {"mean": "mean", "median": "median", "low": "min", "high": "max"}
        parts = {ours: block.get(theirs) for ours, theirs in named.items()}
        parts |= {p: shares.get(p) for p in ("p90", "p95", "p99")}
        count = int(_number(block, "count", at) or 0)
        return _latency({p: _number({p: v}, p, f"{at}: {name}") for p, v in parts.items()}, n=count, unit_s=unit_s)

    totals = metrics.get("request_totals") or benchmark.get("request_totals") or {}
    done = int(_needed(totals, "successful", at))
    failed, cancelled = (int(_number(totals, key, at) or 0) for key in ("errored", "incomplete"))
    wall_s = _number(benchmark, "duration", at) or _needed(benchmark, "end_time", at) - _needed(
        benchmark, "start_time", at
    )
    means = {key: _number(successful(key), "mean", at) for key in ("prompt_token_count", "output_token_count")}
    num_input, num_output = (round(done * (means[key] or 0)) for key in means)
    config = benchmark.get("config") or benchmark.get("args") or {}
    streams = _deep(config, "streams") or _deep(config, "max_concurrency")
    pattern = _deep(config, "type_")
    pattern = pattern if pattern in ("constant", "poisson", "synchronous") else ""
    load = _configured_load(config, at, concurrency=streams, rate=_deep(config, "rate"), pattern=pattern)
    gaps = [
        "its inter_token_latency_ms is the mean of each request weighted by tokens; gaps between chunks are not in the "
        "file",
        "its time_per_output_token_ms includes the first token and is not read",
    ]
    point = _counted(
        load, started=benchmark.get("start_time"), source=TokenSource.MIXED, done=done,
        errors={"http_error": failed, "cancelled": cancelled},
        num_input=num_input, num_output=num_output, wall_s=wall_s,
        ttft_s=latency("time_to_first_token_ms", 1e-3), tpot_s=latency("inter_token_latency_ms", 1e-3),
        e2e_s=latency("request_latency", 1.0),
    )  # fmt: skip
    return ImportedResult(
        format=ResultFormat.GUIDELLM, file=at, model=_deep(document, "model"), point=point, gaps=tuple(gaps)
    )


def _inferencex(document: Mapping[str, Any], where: str) -> list[ImportedResult]:
    """Rates are per GPU and latencies in seconds; the number of requests and errors is not in the file."""
    devices = int(_number(document, "num_gpus", where) or 0)
    for parts in (("num_prefill_gpu", "num_decode_gpu"), ("tp",)):
        counts = [_number(document, part, where) for part in parts]
        if not devices and all(counts):
            devices = int(sum(c for c in counts if c))
    if not devices:
        raise InputError(f"{where}: the number of GPUs is missing", allowed="tp, or num_prefill_gpu and num_decode_gpu")

    def latency(name: str) -> Latency | None:
        return _named_latency(document, f"{{}}_{name}", where, n=0, unit_s=1.0)

    total = _needed(document, "tput_per_gpu", where) * devices
    output = (_number(document, "output_tput_per_gpu", where) or 0.0) * devices
    gaps = [
        f"rates are one GPU's rates times {devices}",
        "numbers of requests, tokens and failures are not in the file",
        "its ITL is the gap between chunks over all requests, not the time per output token",
    ]
    method = document.get("spec_method", document.get("spec_decoding"))
    if method not in (None, "none", ""):
        gaps.append(f"speculative decoding ({method}): gaps between chunks are not per token")
    point = ServingPoint(
        load=_closed(_number(document, "conc", where)), repeat=1, started=str(document.get("date") or ""),
        wall_s=0.0, num_requests=0, num_ok=1, token_source=TokenSource.TOKENIZER, total_tokens_per_s=total,
        output_tokens_per_s=output, input_tokens_per_s=total - output if output else 0.0,
        ttft_s=latency("ttft"), tpot_s=latency("tpot"), chunk_gap_s=latency("itl"), e2e_s=latency("e2el"),
    )  # fmt: skip
    return [
        ImportedResult(
            format=ResultFormat.INFERENCEX, file=where, model=str(document.get("model") or ""), point=point,
            num_devices=devices, gaps=tuple(gaps),
        )
    ]  # fmt: skip


READERS: dict[ResultFormat, Callable[[Mapping[str, Any], str], list[ImportedResult]]] = {
    ResultFormat.VLLM: _vllm,
    ResultFormat.SGLANG: _sglang,
    ResultFormat.AIPERF: _aiperf,
    ResultFormat.GUIDELLM: _guidellm,
    ResultFormat.INFERENCEX: _inferencex,
}
