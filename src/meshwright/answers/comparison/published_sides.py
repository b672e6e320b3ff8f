"""Sides that are no records: estimates of run files, claims, published MLPerf results, published inference points."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from meshwright.answers.comparison import sides
from meshwright.answers.comparison.sides import Better, Breakdown, Evidence, Metric, Side, SideValue, Statistic
from meshwright.catalog.lookup import Claim, all_claims, claim
from meshwright.catalog.mlperf_results import MLPerfResult, mlperf_results
from meshwright.errors import InputError
from meshwright.inference.points import PublishedPoint, Quantity, read_points, shipped_points_path
from meshwright.mlperf.compare import accelerator_name
from meshwright.specs.run import Run

_CLAIM_METRICS = {"tokens_per_s_per_gpu": sides.THROUGHPUT, "time_to_train": sides.TIME_TO_TRAIN}
_MLPERF_NAMES = {("llama2-70b", "lora"): "llama2_70b_lora", ("llama3.1-8b", "pretrain"): "llama31_8b"}
_SEQUENCE = re.compile(r"\bseq (\d+)")
_LOWER = ("time", "price", "latency")
_POINT_METRICS = {Quantity.OUTPUT_RATE: sides.OUTPUT_RATE, Quantity.TOTAL_RATE: sides.TOTAL_RATE}


# --- estimates ---


def estimate_side(path: Path, *, name: str, read_run: Callable[[Path], Run]) -> Side:
    """The side of a run file or the name of one that ships: the cost model's estimate, with 80 % intervals."""
    from meshwright.answers.components import ComponentFamily, family
    from meshwright.answers.run_estimate import estimate_run

    done = estimate_run(read_run(path))
    run, step = done.run, done.estimate.step
    conditions = {
        "accelerator": done.request.cluster.accelerator.name, "devices": str(done.request.num_devices),
        "nodes": str(done.request.cluster.num_nodes), "model": run.model.name,
        "tokens of a sequence": f"{run.sequence_length:,}", "sequences of a step": f"{run.global_batch:,}",
        "precision": run.precision.name, "parallelism": done.plan.describe(), "engine": run.engine,
        "software": done.request.stack.framework, "FLOP rule": "model FLOPs, causal attention, no recomputation",
        "evidence": Evidence.MODELLED.value,
    }  # fmt: skip
    workload = f"{run.model.name}, {run.task}, {run.sequence_length:,} tokens"
    known = ((sides.THROUGHPUT, done.tokens_per_s_per_device), (sides.MFU, done.mfu))
    values = [
        SideValue(
            workload=workload, metric=metric, value=e.value, low=e.low, high=e.high, evidence=Evidence.MODELLED,
            conditions=conditions,
        )
        for metric, e in known
    ]  # fmt: skip
    values.append(
        SideValue(
            workload=workload, metric=sides.MEMORY, value=step.memory.reserved_bytes, evidence=Evidence.MODELLED,
            conditions=conditions,
        )
    )  # fmt: skip
    sums = dict.fromkeys(("kernel", "communication", "bubble", "host"), 0.0)
    for part, seconds in done.components_s.items():
        kind = family(part)
        if part == "bubble":
            sums["bubble"] += seconds
        elif kind is ComponentFamily.COMMUNICATION:
            sums["communication"] += seconds
        elif kind is ComponentFamily.WAITING and part != "power_limit":
            sums["host"] += seconds
        else:
            sums["kernel"] += seconds
    scale = 1 / done.tokens_per_s_per_device.value / sum(sums.values())
    breakdown = Breakdown(
        **{f"{part}_s": seconds * scale for part, seconds in sums.items()}, note="components of the cost model"
    )
    facts = {
        "hardware": f"{done.request.num_devices} x {done.request.cluster.accelerator.name}", "software": run.engine,
        "command": f"meshwright estimate {path}", "statistic": "estimate with its 80 % interval", "file": str(path),
        "notes": "; ".join(done.notes),
    }  # fmt: skip
    return Side(name=name, kind="estimate", values=tuple(values), facts=facts, breakdowns={workload: breakdown})


# --- claims ---


def claim_side(names: str, *, name: str) -> Side:
    """The side of `claim:ID,ID,...`; an ID may hold `*`. Raises UnknownNameError."""
    found: list[Claim] = []
    for part in (p.strip() for p in names.split(",") if p.strip()):
        matching = [c for c in all_claims() if fnmatchcase(c.claim_id, part)] if "*" in part else [claim(part)]
        found += [c for c in matching if c not in found]
    if not found:
        raise InputError("no such claim", got=names, hint="`meshwright catalog claims` lists them")
    documents = ", ".join(dict.fromkeys(c.document for c in found))
    facts = {
        "hardware": ", ".join(dict.fromkeys(f"{c.num_accelerators or '?'} x {c.accelerator}" for c in found)),
        "date": documents, "command": f"meshwright catalog claims {found[0].claim_id}",
        "statistic": "as printed", "file": documents,
    }  # fmt: skip
    short = f"{', '.join(dict.fromkeys(c.accelerator for c in found))}, {names}"
    return Side(name=name or short, kind="claims", values=tuple(map(_claimed, found)), facts=facts)


def _claimed(found: Claim) -> SideValue:
    """One printed figure. A ratio, a price or a capacity keeps its own metric and meets the same only."""
    metric = _CLAIM_METRICS.get(found.metric)
    length = _SEQUENCE.search(found.conditions)
    if metric is sides.TIME_TO_TRAIN:
        workload = _MLPERF_NAMES.get((found.model, found.method), f"{found.model}, {found.method}")
    else:
        workload = ", ".join(p for p in (found.model, found.method) if p)
        workload += f", {int(length[1]):,} tokens" if length else ""
    if metric is None:
        better = Better.LOWER if any(word in found.metric for word in _LOWER) else Better.HIGHER
        against = f" against {found.baseline}" if found.baseline else ""
        metric = Metric(name=found.metric.replace("_", " ") + against, unit=found.unit, better=better)
    unverified = "not submitted" in found.conditions
    conditions = {
        "accelerator": found.accelerator.lower(), "devices": str(found.num_accelerators or ""),
        "nodes": str(found.num_nodes or ""), "model": found.model, "precision": found.precision,
        "tokens of a sequence": f"{int(length[1]):,}" if length else "",
    }  # fmt: skip
    evidence = Evidence.PUBLISHED
    if unverified:
        evidence = Evidence.MLPERF_UNVERIFIED
    elif "replicas of TP1" in found.conditions:
        evidence = Evidence.EXTRAPOLATED
    return SideValue(
        workload=workload, metric=metric, value=found.value, evidence=evidence,
        conditions=sides.stated(conditions, evidence), note=found.conditions,
    )  # fmt: skip


# --- published MLPerf results ---


def mlperf_side(pattern: str, *, name: str) -> Side:
    """The side of `mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK` with `*`: the mean over the sets of each benchmark.

    `@N` at its end takes sets on N accelerators only; sets of several sizes have no mean.
    """
    text, _, devices = pattern.partition("@")
    found = [
        r
        for r in mlperf_results()
        if fnmatchcase(r.name.lower(), text.lower()) and devices in ("", str(r.num_accelerators))
    ]
    if not found:
        raise InputError(
            "no published MLPerf result has this name", got=pattern,
            allowed="ROUND/SUBMITTER/SYSTEM/BENCHMARK, with * for any text",
            hint="as in mlperf:5.1/AMD/MI355X*/llama2_70b_lora; `meshwright mlperf compare` lists them",
        )  # fmt: skip
    by_benchmark: dict[str, list[MLPerfResult]] = {}
    for result in found:
        by_benchmark.setdefault(result.benchmark, []).append(result)
    sizes = {name: sorted({r.num_accelerators or 0 for r in sets}) for name, sets in by_benchmark.items()}
    if mixed := next((name for name, counts in sizes.items() if len(counts) > 1), None):
        raise InputError(
            f"the sets of {mixed} are on several numbers of accelerators and have no mean", got=pattern,
            allowed=", ".join(f"@{n}" for n in sizes[mixed]), hint=f"mlperf:{text}@{sizes[mixed][0]}",
        )  # fmt: skip
    listed = sides.shortened([r.name for r in found], most=4, separator=", ")
    names = (f"{r.num_accelerators or '?'} x {accelerator_name(r.accelerator)}" for r in found)
    facts = {
        "hardware": ", ".join(dict.fromkeys(names)), "software": "not in the logs",
        "date": ", ".join(f"MLPerf Training v{r}" for r in sorted({r.round for r in found})),
        "command": f"meshwright mlperf compare --round {found[0].round}", "file": listed,
        "statistic": f"olympic mean of each set; mean over {len(found)} sets" if len(found) > 1 else "olympic mean",
        "notes": "the mean over submitters weighs each set alike; precision is not in the logs, FP8 and FP4 may mix"
        if len(found) > 1 else "",
    }  # fmt: skip
    values = tuple(_submitted(benchmark, sets) for benchmark, sets in by_benchmark.items())
    who = found[0].submitter if len({r.submitter for r in found}) == 1 else f"mean of {len(found)} sets"
    short = f"{facts['hardware'].split(', ')[0]}, {who}"
    return Side(name=name or short, kind="MLPerf results", values=values, facts=facts)


def _submitted(benchmark: str, sets: list[MLPerfResult]) -> SideValue:
    """One set with its runs as samples, or several with one sample each."""

    def joined(texts: list[str]) -> str:
        return ", ".join(dict.fromkeys(t for t in texts if t))

    one = sets[0]
    is_one = len(sets) == 1
    samples = [m * one.scaling for m in one.minutes] if is_one else [s.score_min for s in sets]
    conditions = {
        "accelerator": joined([accelerator_name(s.accelerator).lower() for s in sets]),
        "devices": joined([str(s.num_accelerators or "") for s in sets]),
        "nodes": joined([str(s.num_nodes or "") for s in sets]), "model": benchmark,
        "sequences of a step": joined([str(s.global_batch_size) for s in sets]),
        "metric definition": joined([f"MLPerf Training {s.round}" for s in sets]),
    }  # fmt: skip
    return SideValue(
        workload=benchmark, metric=sides.TIME_TO_TRAIN, value=sum(s.score_min for s in sets) / len(sets),
        samples=tuple(samples), statistic=Statistic.OLYMPIC_MEAN if is_one else Statistic.MEAN,
        sampled="run" if is_one else "submitter's set", evidence=Evidence.MLPERF,
        conditions=sides.stated(conditions, Evidence.MLPERF),
    )  # fmt: skip


# --- published points of inference ---


def points_side(query: str, *, name: str) -> Side:
    """The side of `points:KEY=TEXT,...`: published inference rates, `replicas=N` times a rate that was published once.

    Keys: source, accelerator, engine, model, precision, layout; texts may hold `*`.
    """
    asked = _query(query)
    replicas = int(asked.pop("replicas", "1"))
    found: dict[tuple[str, str], list[SideValue]] = {}
    for point in read_points(shipped_points_path()):
        value = _point_value(point, asked=asked, replicas=replicas)
        if value is not None:
            found.setdefault((value.workload, value.metric.name), []).append(value)
    values = tuple(_only_value(values, query=query) for values in found.values())
    if not values:
        raise InputError(
            "no published point matches", got=query, hint="`meshwright inference accuracy --rows` lists them"
        )

    def stated(condition: str) -> str:
        return ", ".join(dict.fromkeys(value.conditions.get(condition, "") for value in values))

    facts = {
        "command": "meshwright inference accuracy --rows", "file": "published inference points that ship",
        "statistic": "as published" if replicas == 1 else f"as published, times {replicas}: extrapolated, not measured",
        "date": stated("software"), "hardware": stated("accelerator"),
    }  # fmt: skip
    first = values[0].conditions
    short = f"{first['accelerator']}, {first['parallelism']}, {first['software']}"
    return Side(name=name or short, kind="published points", values=values, facts=facts)


def _point_value(point: PublishedPoint, *, asked: Mapping[str, str], replicas: int) -> SideValue | None:
    """The rate of a point, `replicas` times; None for a point of another metric, and one that was not asked for."""
    c = point.conditions
    metric = None if c is None else _POINT_METRICS.get(c.quantity)
    if c is None or metric is None:
        return None
    known = {**point.groups, "source": point.source, "layout": c.served.layout.describe(), "model": c.served.model.name}
    if not all(fnmatchcase(known.get(key, "").lower(), text.lower()) for key, text in asked.items()):
        return None
    load = f", {c.load.concurrency} in flight" if c.load.concurrency else ""
    conditions = {
        "accelerator": c.served.cluster.accelerator.name, "model": c.served.model.name,
        "devices": str(c.served.layout.num_devices * replicas), "precision": known.get("precision", ""),
        "parallelism": (f"{replicas} x " if replicas > 1 else "") + known["layout"],
        "engine": known.get("engine", ""), "software": point.source,
    }  # fmt: skip
    evidence = Evidence.PUBLISHED if replicas == 1 else Evidence.EXTRAPOLATED
    return SideValue(
        workload=f"{c.served.model.name}, {c.load.input_tokens:,} in, {c.load.output_tokens:,} out{load}",
        metric=metric, value=c.measured * replicas, evidence=evidence, conditions=sides.stated(conditions, evidence),
        note="" if replicas == 1 else f"one published replica times {replicas}",
    )  # fmt: skip


def _only_value(values: Sequence[SideValue], *, query: str) -> SideValue:
    """The value of one workload. Raises InputError where the query matches several."""
    if len(values) > 1:
        texts = {f"{v.conditions.get('software')}, {v.conditions.get('parallelism')}" for v in values}
        raise InputError(
            f"the query matches several points of one workload ({values[0].workload})", got=query,
            allowed="; ".join(sorted(texts)), hint="add source=, layout=, engine= or precision=",
        )  # fmt: skip
    return values[0]


def _query(text: str) -> dict[str, str]:
    keys = ("source", "accelerator", "engine", "model", "precision", "layout", "replicas")
    found = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in keys:
            raise InputError("a query must read KEY=TEXT,...", got=part, allowed=f"keys {', '.join(keys)}")
        found[key.strip()] = value.strip()
    if not found.get("replicas", "1").isdecimal() or int(found.get("replicas", "1")) < 1:
        raise InputError("replicas is no number", got=found["replicas"], allowed="1 or more")
    return found
