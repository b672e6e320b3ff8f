"""Sides from records: trainings, sweeps, kernels, serving, offline inference, ingestion, sets of MLPerf runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.answers.comparison import sides
from meshwright.answers.comparison.kernel_sides import kernel_side, routes_side
from meshwright.answers.comparison.sides import Breakdown, Evidence, Metric, Side, SideValue, Statistic
from meshwright.answers.training_run import WARM_UP_STEPS, TrainingRun, read_training
from meshwright.errors import InputError
from meshwright.records import device, ingest, kernel_routes, offline, serving, training, trainings

RESULTS = "result_*.txt"
LOST = "no folder"
"""Mark of a path that cannot be opened."""
KERNEL_CATEGORIES = ("GEMM", "attention", "elementwise", "optimizer", "other")
NOT_PROFILED = "it was trained without --profile"
LATENCIES: tuple[tuple[str, Metric], ...] = (
    ("ttft_s", sides.TTFT), ("chunk_gap_s", sides.CHUNK_GAP), ("tpot_s", sides.TPOT), ("e2e_s", sides.E2E),
)  # fmt: skip


def record_folders(where: Path) -> dict[Path, str]:
    """Folders of records at and below `where`, each with the name of the file that marks it.

    An entry with a marker's name counts even if it is no file. A folder that cannot be opened, or a broken
    link outside of records, counts as `LOST`: reading it raises its fault. Links to folders elsewhere are
    followed, each once.
    """
    found: dict[Path, str] = {}
    followed, root = set[Path](), where.resolve()
    pending = [(str(where), False)]
    while pending:
        folder, is_inside = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError:
            found[Path(folder)] = LOST
            continue
        mark = next((m for e in entries if (m := _mark(e.name))), None)
        if mark is not None:
            found[Path(folder)] = mark
        is_inside = is_inside or mark is not None
        below = []
        for entry in entries:
            if entry.is_symlink():
                target = Path(os.path.realpath(entry.path))
                if not target.exists() and not is_inside:
                    found[Path(entry.path)] = LOST
                if not target.is_dir() or target in followed or target.is_relative_to(root):
                    continue
                followed.add(target)
            elif not entry.is_dir():
                continue
            below.append((entry.path, is_inside))
        pending += reversed(below)
    # Trainings that a sweep holds in folders of its own are lines of its `trainings.csv`.
    sweeps = {path for path, mark in found.items() if mark == trainings.CSV_NAME}
    return {p: mark for p, mark in found.items() if p in sweeps or not sweeps & set(p.parents)}


def _mark(name: str) -> str | None:
    """The kind of record that a file of this name belongs to."""
    if name in _READERS or name == offline.NAME:
        return name
    return RESULTS if fnmatch(name, RESULTS) else None


def read_side(folder: Path, mark: str, *, name: str) -> Side:
    """The side of one record. Raises InputError with file and field where it is damaged."""
    with faults_named(folder / mark):
        if mark == LOST:
            next(folder.iterdir())  # fails and says why
        if mark == RESULTS:
            return _mlperf_side(folder, name=name)
        if mark == offline.NAME:
            return _offline_side(folder / offline.NAME, name=name)
        return _READERS[mark](folder, name)


@contextmanager
def faults_named(where: Path) -> Iterator[None]:
    """Raise InputError with the file for any failure inside that a damaged record causes."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or where}: cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise InputError(f"{where}: the field {error} is missing") from None
    except (TypeError, AttributeError, ValueError, ArithmeticError, IndexError) as error:
        raise InputError(f"{where}: a field is of another kind than it must be ({error})") from None


# --- training ---


def training_side(done: TrainingRun, *, name: str) -> Side:
    """The side of one training: throughput of its measured steps, MFU, memory, time to the target loss."""
    run, s = done.run, done.statistics
    model, task = run["model"]["name"], run.get("task", "pretrain")
    where = _Where(
        workload=f"{model}, {task}, {run['sequence_length']:,} tokens", evidence=Evidence.MEASURED,
        conditions=_training_conditions(done),
    )  # fmt: skip
    rates = [
        float(step["tokens_per_s_per_device"])
        for step in measured_steps(done)
        if _is_positive(step.get("tokens_per_s_per_device"))
    ]
    values = []
    if _is_positive(s["tokens_per_s_per_device"]):
        rate = float(s["tokens_per_s_per_device"])
        values.append(where.value(sides.THROUGHPUT, rate, samples=rates, statistic=Statistic.MEDIAN, sampled="step"))
        if _is_positive(s.get("mfu")):
            of_peak = s["mfu"] / rate
            shares = [r * of_peak for r in rates]
            values.append(where.value(sides.MFU, s["mfu"], samples=shares, statistic=Statistic.MEDIAN, sampled="step"))
    if _is_positive(s["peak_memory_bytes"]):
        values.append(where.value(sides.MEMORY, s["peak_memory_bytes"]))
    if target := s.get("target"):
        goal = _Where(
            workload=f"{where.workload}, to loss {target['loss']:g}", evidence=Evidence.MEASURED,
            conditions=where.conditions,
        )  # fmt: skip
        values.append(goal.value(sides.TIME_TO_TRAIN, target["seconds"] / 60))
    breakdown = _breakdown(done)
    return Side(
        name=name, kind="training", values=tuple(values), facts=_training_facts(done),
        breakdowns={} if breakdown is None else {where.workload: breakdown},
        not_split="" if breakdown is not None else NOT_PROFILED,
    )  # fmt: skip


def measured_steps(done: TrainingRun) -> list[Mapping[str, Any]]:
    """Steps that count: neither warming up nor under the profiler."""
    few = done.statistics["steps"] <= 2 * WARM_UP_STEPS
    return [s for s in done.steps if (few or s["step"] > WARM_UP_STEPS) and not s.get("profiled")]


def _training_conditions(done: TrainingRun) -> dict[str, str]:
    run, record, s = done.run, done.record, done.statistics
    software = record.get("software") or {}
    engine = run.get("engine") or "native"
    return {
        "accelerator": record["device"].get("accelerator") or record["device"]["name"],
        "devices": str(s.get("num_devices", "")), "model": run["model"]["name"],
        "tokens of a sequence": f"{run['sequence_length']:,}",
        "sequences of a step": f"{run['global_batch']:,}", "precision": run["precision"]["name"],
        "parallelism": run["plan_in_words"], "engine": engine,
        "software": sides.software_text(software, engine), "software date": record["started"][:7],
        "FLOP rule": str(s.get("mfu_convention") or "").partition(";")[0],
    }  # fmt: skip


def _training_facts(done: TrainingRun) -> dict[str, str]:
    record, s = done.record, done.statistics
    return {
        "hardware": f"{s.get('num_devices', '?')} x {record['device']['name']}",
        "software": ", ".join(f"{n} {v}" for n, v in (record.get("software") or {}).items()),
        "date": record["started"][:10],
        "command": " ".join(record.get("command") or ()) or "not from the command line",
        "statistic": f"median of {s['step_s']['n']:,} steps of one run",
        "file": str(done.folder / training.RECORD),
        "notes": "; ".join(record.get("notes") or ()),
    }  # fmt: skip


def _breakdown(done: TrainingRun) -> Breakdown | None:
    """The profile's shares of the median step on its main process, which is of the first stage."""
    profile, rate = done.record.get("profile"), done.statistics["tokens_per_s_per_device"]
    if not profile or not _is_positive(rate):
        return None
    shares, note = profile["shares"], "measured under the profiler"
    bubble, idle = shares.get("pipeline wait", 0.0), shares.get("idle", 0.0)
    if bubble:
        note += "; its bubble is the measured wait of the first stage for the others"
    elif ((done.run.get("plan") or {}).get("pipeline") or 1) > 1:
        note += "; waits for other stages are not measured apart: they are among communication and host time"
    return Breakdown(
        kernel_s=sum(shares.get(c, 0.0) for c in KERNEL_CATEGORIES) / rate,
        communication_s=shares.get("communication", 0.0) / rate, bubble_s=bubble / rate, host_s=idle / rate, note=note,
    )  # fmt: skip


# --- sweep of trainings ---


def sweep_side(found: trainings.Trainings, *, name: str) -> Side:
    """The side of a sweep: each configuration with the medians of its runs as samples."""
    values: list[SideValue] = []
    side = found.sidecar
    measured = [r for r in found.rows if r.tokens_per_s_per_device]
    for configuration in dict.fromkeys(r.configuration for r in measured):
        rows = [r for r in measured if r.configuration == configuration]
        first = rows[0]
        where = _Where(
            workload=f"{first.model}, {configuration}", evidence=Evidence.MEASURED,
            conditions={
                "accelerator": sides.accelerator_named(side["device"]), "devices": str(first.num_devices),
                "model": first.model, "tokens of a sequence": f"{first.sequence_length:,}",
                "sequences of a step": f"{first.global_batch:,}", "precision": first.precision,
                "parallelism": first.plan, "engine": first.engine,
                "software": sides.software_text(side["software"].get(first.engine), first.engine),
                "software date": str(side["started"])[:7], "FLOP rule": first.mfu_convention.partition(";")[0],
            },
        )  # fmt: skip
        rates = [float(r.tokens_per_s_per_device or 0) for r in rows]
        values.append(where.middle(sides.THROUGHPUT, rates, sampled="run"))
        if all(r.mfu for r in rows):
            values.append(where.middle(sides.MFU, [float(r.mfu or 0) for r in rows], sampled="run"))
        if all(r.peak_memory_bytes for r in rows):
            values.append(where.value(sides.MEMORY, max(float(r.peak_memory_bytes or 0) for r in rows)))
    return Side(name=name, kind="sweep of trainings", values=tuple(values), facts=sides.sidecar_facts(side, found.path))


# --- serving ---


def serving_side(found: serving.ServingRecords, *, name: str) -> Side:
    """The side of `bench serve`: one workload for each load, with its repeats as samples."""
    side = found.sidecar
    server, client = side.get("server") or {}, side.get("client") or {}
    usable = [p for p in found.points if p.is_usable]
    served = side.get("device") or {}
    values: list[SideValue] = []
    model = side["endpoint"]["model"]
    for load in dict.fromkeys(p.load.name for p in usable):
        points = [p for p in usable if p.load.name == load]
        lengths = f"{side.get('input_tokens', '?')} in, {side.get('output_tokens', '?')} out"
        where = _Where(
            workload=f"{model}, {lengths}, {load}", evidence=Evidence.MEASURED,
            conditions={
                "model": model, "tokens of a request": lengths, "load": load,
                "accelerator": sides.accelerator_named(served),
                "devices": str(served.get("count") or ""), "engine": str(server.get("name", "")),
                "software": " ".join(str(server[k]) for k in ("name", "version") if server.get(k)),
                "software date": str(side["started"])[:7],
                "client": " ".join(str(client[k]) for k in ("name", "version") if client.get(k)),
                "metric definition": f"tokens counted by {points[0].token_source}",
            },
        )  # fmt: skip
        values.append(where.middle(sides.OUTPUT_RATE, [p.output_tokens_per_s for p in points], sampled="repeat"))
        values.append(where.middle(sides.TOTAL_RATE, [p.total_tokens_per_s for p in points], sampled="repeat"))
        for key, metric in LATENCIES:
            medians = [latency.median for p in points if (latency := getattr(p, key)) is not None]
            if medians:
                values.append(where.middle(metric, medians, sampled="repeat"))
    return Side(
        name=name, kind="serving", values=tuple(v for v in values if v.value > 0),
        facts=sides.sidecar_facts(side, found.folder / serving.CSV_NAME), cautions=tuple(_lost(found.points)),
    )  # fmt: skip


def _lost(points: Sequence[serving.ServingPoint]) -> Iterator[str]:
    """Requests that failed, which made room for the others, and loads without a usable repeat."""
    for load in dict.fromkeys(p.load.name for p in points):
        repeats = [p for p in points if p.load.name == load]
        if failed := sum(sum(p.errors.values()) for p in repeats):
            asked = sum(p.num_requests for p in repeats)
            yield f"{load}: {failed} of {asked} requests failed, which made room for the others"
        if not any(p.is_usable for p in repeats):
            yield f"{load} is not compared: {repeats[0].refusal or 'no request succeeded'}"


def _offline_side(path: Path, *, name: str) -> Side:
    """The side of `bench offline`: one workload for each pair of lengths; extrapolated rates stand apart."""
    document = offline.read_offline(path)
    values = []
    for pair in document["pairs"]:
        lengths, extrapolated = f"{pair['name']} tokens", pair.get("extrapolated")
        where = _Where(
            workload=f"{document['model']}, offline, {lengths}",
            evidence=Evidence.EXTRAPOLATED if extrapolated else Evidence.MEASURED,
            conditions={
                "model": document["model"], "tokens of a request": lengths,
                "load": f"{document['num_requests']} requests at once", "engine": str(document.get("server") or ""),
                "parallelism": f"replicas: {document['num_replicas']}", "software date": document["started"][:7],
            },
        )  # fmt: skip
        rate = (extrapolated or pair["point"])["output_tokens_per_s"]
        if _is_positive(rate):
            values.append(where.value(sides.OUTPUT_RATE, rate, note=(extrapolated or {}).get("label", "")))
    facts = {
        "command": " ".join(document["command"]), "date": document["started"][:10], "file": str(path),
        "hardware": "not in the record", "software": str(document.get("server") or ""), "statistic": "one batch a pair",
    }  # fmt: skip
    return Side(name=name, kind="offline inference", values=tuple(values), facts=facts)


# --- ingestion ---


def ingest_side(found: ingest.IngestRecords, *, name: str) -> Side:
    """The side of `bench ingest`: one workload for each encoding and mode, and one for each way of searching."""
    side = found.sidecar
    common = {
        "accelerator": (side.get("device") or {}).get("name", ""), "model": side["encoder"]["origin"],
        "software date": str(side["started"])[:7],
    }  # fmt: skip
    values: list[SideValue] = []
    whole = [p for p in found.passes if not p.interrupted and p.wall_s > 0]
    for encoding, mode in dict.fromkeys((p.encoding, p.mode) for p in whole):
        rows = [p for p in whole if (p.encoding, p.mode) == (encoding, mode)]
        where = _Where(
            workload=f"ingestion of {side['documents']['source']}, {encoding.name}, {mode}",
            evidence=Evidence.MEASURED, conditions=common | {"precision": encoding.precision, "load": str(mode)},
        )  # fmt: skip
        values.append(where.middle(sides.INGEST_RATE, [p.num_chunks / p.wall_s for p in rows], sampled="repeat"))
        values.append(where.middle(sides.SEARCHABLE, [p.last_searchable_s or 0.0 for p in rows], sampled="repeat"))
    searched = [s for s in found.searches if s.recall is not None]
    ways: dict[tuple[Any, ...], list[ingest.IndexSearch]] = {}
    for s in searched:
        ways.setdefault((s.index, s.build, s.search, s.batch, s.threads), []).append(s)
    for (index, build, search, batch, threads), rows in ways.items():
        parameters = ",".join(filter(None, (build, search)))
        where = _Where(
            workload=f"{index} {parameters}, {rows[0].num_vectors:,} vectors, {batch} queries, {threads} threads",
            evidence=Evidence.MEASURED, conditions=common | {"load": f"{batch} queries", "engine": index},
        )  # fmt: skip
        values.append(where.middle(sides.RECALL, [s.recall or 0.0 for s in rows], sampled="repeat"))
        values.append(where.middle(sides.SEARCH_LATENCY, [s.p50_s or 0.0 for s in rows], sampled="repeat"))
    kept = tuple(v for v in values if v.value > 0)
    return Side(
        name=name, kind="ingestion", values=kept, facts=sides.sidecar_facts(side, found.folder / ingest.SIDECAR_NAME)
    )


# --- MLPerf ---


def _mlperf_side(folder: Path, *, name: str) -> Side:
    from meshwright.mlperf.compare import PUBLISHED, compared_scores
    from meshwright.mlperf.log import read_log
    from meshwright.mlperf.score import result_files, score_folder

    logs = [read_log(path) for path in result_files(folder)]
    faults = [f"{log.path}:{f.line}: {f.problem}" for log in logs for f in log.faults]
    if faults:
        raise InputError(sides.shortened(faults, most=20))
    score = score_folder(folder)
    result = compared_scores([score])[0]
    minutes = [r.minutes * score.test.scaling for r in score.scored if r.minutes is not None]
    evidence = Evidence.MLPERF if result.label == PUBLISHED else Evidence.MLPERF_UNVERIFIED
    value = SideValue(
        workload=f"{result.benchmark}, round {result.round}", metric=sides.TIME_TO_TRAIN, value=result.score_min,
        samples=tuple(minutes), statistic=Statistic.OLYMPIC_MEAN, sampled="run", evidence=evidence,
        conditions={
            "accelerator": result.accelerator, "devices": str(result.num_accelerators or ""),
            "sequences of a step": str(score.global_batch_size or ""), "model": result.benchmark,
            "metric definition": f"MLPerf Training {result.round}",
        },
    )  # fmt: skip
    facts = {
        "hardware": f"{result.num_accelerators or '?'} x {result.accelerator}, {result.system}",
        "statistic": f"olympic mean of {len(minutes)} runs, times {score.test.scaling:.4f} for convergence",
        "file": str(folder), "software": "not in the logs", "date": "not in the logs", "command": "not in the logs",
    }  # fmt: skip
    return Side(name=name, kind="MLPerf set", values=(value,), facts=facts)


# --- shared ---


class _Where:
    """Workload, evidence and conditions of several values."""

    def __init__(self, *, workload: str, evidence: Evidence, conditions: Mapping[str, str]) -> None:
        self.workload, self.evidence = workload, evidence
        self.conditions = sides.stated(conditions, evidence)

    def value(self, metric: Metric, value: float, *, samples: Sequence[float] = (), **more: Any) -> SideValue:
        return SideValue(
            workload=self.workload, metric=metric, value=float(value), samples=tuple(samples),
            evidence=self.evidence, conditions=self.conditions, **more,
        )  # fmt: skip

    def middle(self, metric: Metric, samples: Sequence[float], *, sampled: str) -> SideValue:
        """The median of the samples."""
        return self.value(metric, median(samples), samples=samples, statistic=Statistic.MEDIAN, sampled=sampled)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_READERS = {
    training.RECORD: lambda folder, name: training_side(read_training(folder), name=name),
    trainings.CSV_NAME: lambda folder, name: sweep_side(trainings.read(folder), name=name),
    device.CSV_NAME: lambda folder, name: kernel_side(device.read(folder), name=name),
    kernel_routes.NAME: lambda folder, name: routes_side(kernel_routes.read_kernel_routes(folder), name=name),
    ingest.SIDECAR_NAME: lambda folder, name: ingest_side(ingest.read_ingest(folder), name=name),
    serving.CSV_NAME: lambda folder, name: serving_side(serving.read_serving(folder), name=name),
}
