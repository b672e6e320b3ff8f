"""Measurement of this machine before a training: its rates, one layer of the model, one collective.

It takes at most `BUDGET_S`, or `LONG_BUDGET_S` where GEMMs are too slow for that, is kept in the cache folder for the
machine, its software and the model's shapes, and is reused by the next training of them. While other programs use the
processors everything takes longer: measuring may take `LONG_BUDGET_S`, earlier results are not used, and the new ones
are used once and not kept.

All processes of a run call `measure_machine` together and get the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.engines.base import Measuring
from meshwright.engines.native.layer_timing import DEPTHS, max_over_ranks, measure_collective, measure_kernels
from meshwright.files import default_cache, write_atomically
from meshwright.fitting.kernel_times import CollectiveTime, KernelTimes, shallow_model
from meshwright.json_values import load_json
from meshwright.kernels.dispatch import active
from meshwright.kernels.tuned import triton_version
from meshwright.records.files import driver_version
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.device import Rates
from meshwright.training.host_load import HostLoad, load_between, sample_load
from meshwright.training.processes import is_several, reduced
from meshwright.version import __version__

BUDGET_S, LONG_BUDGET_S = 2.0, 6.0
THOROUGH_S = 30.0
"""Limit where measuring was asked for (`--measure`)."""
FOLDER, SCHEMA = "measurements", 1
DISTURBED = 2.0
"""Repetitions that take so many times as long as the fastest one: something took part that counters do not show."""
RATES_SHARE = 0.25
"""Share of `BUDGET_S` for the machine's rates; the rest is for the layer, which says more about a step."""
WATCH_S = 0.25
"""Time of looking for other programs before anything is measured."""
PASSES_OVER_GEMMS = 2.0
"""Time of a pass over that of its GEMMs at the machine's best rate: 1.8 on an AMD EPYC (Zen 3), in bf16."""
PASSES_A_ROUND = 5
"""Passes of the deeper model that one round of `layer_timing` takes, at least."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MachineMeasurement:
    """Measurements of this machine for one run; None is what was not measured."""

    rates: Rates | None = None  # of the slowest process
    times: KernelTimes | None = None
    collective: CollectiveTime | None = None
    made: str = ""  # when the layer was timed, for the record
    load: HostLoad | None = None  # of other programs meanwhile, if they took part
    notes: tuple[str, ...] = ()


def measure_machine(
    run: Run, *, plan: Plan, device: torch.device, measuring: Measuring, needs_collective: bool
) -> MachineMeasurement:
    """Return what is kept of this machine for `run`, or measure it and keep that."""
    key = key_of(run, plan=plan, device=device)
    path = kept_at(FOLDER, key)
    kept = None if measuring is Measuring.AGAIN else _read(path)
    is_absent = kept is None or (kept.collective is None and needs_collective)
    is_kept = not reduced(is_absent)[0]
    if measuring is Measuring.NEVER and not is_kept:
        return MachineMeasurement(notes=("this machine was not measured (--no-measure)",))
    busy_now = measuring is not Measuring.NEVER and _is_busy(_load_during(lambda: time.sleep(WATCH_S))[1])
    if is_kept and not busy_now:
        assert kept is not None
        return _slowest(kept)
    found, load = _load_during(
        lambda: _measure(
            run, plan=plan, device=device, needs_collective=needs_collective,
            budget_s=_budget_s(measuring, is_busy=busy_now),
        )
    )  # fmt: skip
    if _is_busy(load):
        again = _measured_rates(device, budget_s=RATES_SHARE * BUDGET_S)
        devices.release_memory(device)
        return replace(found, rates=_best_rates(found.rates, again), load=load)
    if found.times is not None and found.times.slowdown > DISTURBED:
        slower = f"{found.times.slowdown:.1f} times as long as the fastest"
        note = f"repetitions of the same layer took {slower}: the measurement is not kept"
        return replace(found, notes=(*found.notes, note))
    if found.times is not None and is_main():
        keep(path, {name: value for name, value in asdict(found).items() if name not in ("notes", "load")}, key)
    return found


def _budget_s(measuring: Measuring, *, is_busy: bool) -> float:
    if measuring is Measuring.AGAIN:
        return THOROUGH_S
    return LONG_BUDGET_S if is_busy else BUDGET_S


def _load_during(action: Callable[[], T]) -> tuple[T, HostLoad | None]:
    """The result of `action`, and the load of other programs meanwhile, the same on all processes of the run."""
    before = sample_load()
    result = action()
    after = sample_load()
    (own_s,) = reduced(after.own_s - before.own_s if before and after else 0.0, op=dist.ReduceOp.SUM)
    return result, _heaviest(load_between(before, after, own_s=own_s))


def _is_busy(load: HostLoad | None) -> bool:
    return load is not None and load.is_busy


def _measured_rates(device: torch.device, *, budget_s: float) -> Rates | None:
    """Rates of the slowest process; None where the catalogue has those of the device."""
    if devices.catalog_name(device) is not None:
        return None
    return _slowest_rates(devices.measure_rates(device, deadline_s=time.perf_counter() + budget_s))


def _best_rates(first: Rates | None, second: Rates | None) -> Rates | None:
    """The better of two measurements of each rate: other programs only ever make them lower."""
    if first is None or second is None:
        return first
    flops = {name: max(rate, second.matmul_flops_per_s[name]) for name, rate in first.matmul_flops_per_s.items()}
    return Rates(matmul_flops_per_s=flops, copy_bytes_per_s=max(first.copy_bytes_per_s, second.copy_bytes_per_s))


def _measure(
    run: Run, *, plan: Plan, device: torch.device, needs_collective: bool, budget_s: float
) -> MachineMeasurement:
    if is_several():
        dist.barrier()
    started_s = time.perf_counter()
    rates = _measured_rates(device, budget_s=RATES_SHARE * BUDGET_S)
    made = f"one layer of the model was timed on this machine at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    times = collective = None
    notes: tuple[str, ...] = ()
    try:
        least_s = _two_rounds_s(run, plan=plan, rates=rates)
        if PASSES_OVER_GEMMS * least_s > (1 - RATES_SHARE) * budget_s:
            budget_s = max(budget_s, LONG_BUDGET_S)
        deadline_s = started_s + budget_s
        if least_s <= budget_s:
            times = measure_kernels(run, micro_batch=plan.micro_batch, device=device, deadline_s=deadline_s)
        if times is not None and needs_collective:
            collective = measure_collective(device, deadline_s=deadline_s + budget_s / 4)
        if times is None:
            notes = (
                f"no layer of the model was timed: it takes longer than the {budget_s:g} s of measuring; "
                "--measure takes longer",
            )
    except torch.OutOfMemoryError:
        times, notes = None, ("there was no memory to time a layer of the model",)
    devices.release_memory(device)
    return _slowest(MachineMeasurement(rates=rates, times=times, collective=collective, made=made, notes=notes))


def _two_rounds_s(run: Run, *, plan: Plan, rates: Rates | None) -> float:
    """Seconds of two rounds of timing at the machine's best GEMM rate; 0 where that is not measured.

    Where even these are too long nothing is built: building alone takes seconds.
    """
    if rates is None:
        return 0.0
    shallow = model_row(shallow_model(run.model, num_layers=DEPTHS[-1]), lora=run.lora)
    flops = float(model_flops_per_token(shallow, seq_len=run.sequence_length))
    round_flops = PASSES_A_ROUND * flops * plan.micro_batch * run.sequence_length
    return 2 * round_flops / max(rates.matmul_flops_per_s.values())


# --- the kept measurements ---


def key_of(run: Run, *, plan: Plan, device: torch.device) -> str:
    """Everything that a measurement depends on, as JSON: the machine, its software, and the shapes that are timed."""
    model = {**asdict(shallow_model(run.model, num_layers=1)), "name": "", "family": ""}
    facts = {
        "schema": SCHEMA,
        "device": devices.device_name(device),
        "device_type": device.type,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "software": [__version__, torch.__version__, triton_version(), driver_version(device.type)],
        "model": model,
        "lora": run.lora and asdict(run.lora),
        "sequence_length": run.sequence_length,
        "micro_batch": plan.micro_batch,
        "precision": run.precision.name,
        "optimizer": [run.optimizer.name, run.optimizer.states],
        "compile": run.train.compile,
        "gemm_tuning": run.gemm_tuning,
        "kernels": asdict(run.kernels),
        "routes": dict(active().measured),
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _read(path: Path) -> MachineMeasurement | None:
    """The kept measurement; None if there is none or it cannot be read, which measuring again mends."""
    try:
        kept = load_json(path)["measured"]
        return MachineMeasurement(
            rates=_built(Rates, kept["rates"]),
            times=_built(KernelTimes, kept["times"]),
            collective=_built(CollectiveTime, kept["collective"]),
            made=str(kept["made"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _built(kind: Callable[..., T], values: dict[str, Any] | None) -> T | None:
    return None if values is None else kind(**values)


def kept_at(folder: str, key: str) -> Path:
    """The file in the cache that keeps what was measured for `key`."""
    return default_cache() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def keep(path: Path, measured: dict[str, Any], key: str) -> None:
    """Write what was measured. A cache that cannot be written costs the next training a measurement, not this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"measured": measured, "of": json.loads(key)}, indent=1) + "\n")
    except OSError:
        pass


# --- agreement of the processes ---


def _slowest(found: MachineMeasurement) -> MachineMeasurement:
    """The longest times of all processes: a step waits for the last."""
    if not is_several() or found.times is None:
        return found
    collective = None if found.collective is None else max_over_ranks(found.collective)
    rates = None if found.rates is None else _slowest_rates(found.rates)
    return replace(found, rates=rates, times=max_over_ranks(found.times), collective=collective)


def _slowest_rates(rates: Rates) -> Rates:
    names = list(rates.matmul_flops_per_s)
    *flops, copy = reduced(*rates.matmul_flops_per_s.values(), rates.copy_bytes_per_s, op=dist.ReduceOp.MIN)
    return Rates(matmul_flops_per_s=dict(zip(names, flops, strict=True)), copy_bytes_per_s=copy)


def _heaviest(load: HostLoad | None) -> HostLoad | None:
    """The heaviest load that a process found, so that all of them predict the same; None if none knows its own."""
    ratios = (0.0, 0.0, 0) if load is None else (load.others_ratio, load.stolen_ratio, load.num_cpus)
    others, stolen, num_cpus = reduced(*ratios)
    return HostLoad(others_ratio=others, stolen_ratio=stolen, num_cpus=int(num_cpus)) if num_cpus else None


def is_main() -> bool:
    """Return True in the first process, which keeps what was measured."""
    return not dist.is_initialized() or dist.get_rank() == 0
