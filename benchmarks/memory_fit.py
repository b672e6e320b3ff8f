"""Errors of the memory model against published memory, and a new fit of its constants.

    python benchmarks/memory_fit.py [measured_runs.csv [failed_configs.csv]] [--fit] [--rows] [--speed]

Errors are predicted/measured - 1. Figures of the allocator's peak are compared with allocated memory, figures of the
device with reserved memory, unknown ones with both. The fit minimises the sum of absolute relative errors over the
constants named in FITTED. It takes a few seconds, the fit some minutes.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.failed import Shares, states_memory
from meshwright.accuracy.rows import PublishedRun, read_failed, read_runs
from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path
from meshwright.accuracy.tables import RunTables, memory_of, tables_of
from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.memory import MemoryConstants, MemoryTable, estimate_memory, memory_constants
from meshwright.cost.tables import BatchTable, PlanTable, model_row, plan_row, precision_row
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.specs.precision import PRECISIONS

FITTED = {
    "megatron-core": ("logits_bytes", "workspace_bytes"),
    "megatron-deepspeed": ("workspace_bytes", "fragmentation_ratio"),
    "nanotron": ("logits_bytes", "waiting_buffers", "waiting_buffers_in_pipeline", "workspace_bytes"),
    "pytorch-fsdp2": ("logits_bytes",),
}
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Runs that have conditions, as tables."""

    runs: Sequence[PublishedRun]
    tables: RunTables

    @classmethod
    def of(cls, runs: Sequence[PublishedRun]) -> Rows:
        return cls(runs=runs, tables=tables_of([run.conditions for run in runs if run.conditions]))

    def memory(self) -> MemoryTable:
        return memory_of([run.conditions for run in self.runs if run.conditions], self.tables)

    def stated(self) -> NDArray[np.bool_]:
        return np.array([states_memory(run) for run in self.runs])

    def groups(self, *keys: Sequence[str]) -> dict[tuple[str, ...], NDArray[np.intp]]:
        names = list(zip(*keys, strict=True))
        return {name: np.array([i for i, n in enumerate(names) if n == name]) for name in sorted(set(names))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=measured_runs_path())
    parser.add_argument("failed", nargs="?", type=Path, default=failed_configs_path())
    parser.add_argument("--fit", action="store_true", help="fit the measured constants again and print them")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--speed", action="store_true", help="time a million plans")
    args = parser.parse_args()
    worked = Rows.of([run for run in read_runs(args.runs) if run.conditions])
    measured = Rows.of([run for run in worked.runs if run.memory_bytes])
    print_errors(measured, every_row=args.rows)
    print_rejected(worked, Rows.of([run for run in read_failed(args.failed) if run.reason is None]))
    if args.fit:
        print_fit(measured)
    if args.speed:
        print_speed()


def print_errors(rows: Rows, *, every_row: bool) -> None:
    memory, measured = rows.memory(), np.array([run.memory_bytes for run in rows.runs])
    print(f"{'source':16} {'counts':10} {'compared with':14} {'rows':>5} {'median':>7} {'p90':>7} {'bias':>7}")
    keys = [run.source_key for run in rows.runs], [run.memory_definition for run in rows.runs]
    for (source, counts), index in rows.groups(*keys).items():
        for part in ("allocated", "reserved"):
            if counts in (part, "unknown"):
                error = np.asarray(getattr(memory, f"{part}_bytes"))[index] / measured[index] - 1
                size = np.abs(error)
                print(
                    f"{source:16} {counts:10} {part:14} {len(index):5} {np.median(size):7.1%} "
                    f"{np.quantile(size, 0.9):7.1%} {np.median(error):+7.1%}"
                )
    if every_row:
        for i, run in enumerate(rows.runs):
            plan = run.conditions.plan.describe() if run.conditions else ""
            parts = (measured[i], memory.allocated_bytes[i], memory.reserved_bytes[i])
            print(f"{run.id:22} {plan:60} " + " ".join(f"{part / 1e9:7.1f}" for part in parts))


def rejected(rows: Rows) -> NDArray[np.bool_]:
    return np.asarray(rows.memory().reserved_bytes > rows.tables.facts.memory_bytes)


def print_rejected(worked: Rows, failed: Rows) -> None:
    """Print the shares of failed configurations and of runs that worked which the model rejects."""
    lost, kept, stated = rejected(failed), rejected(worked), worked.stated()
    listed = {run.source_key for run in failed.runs}
    chosen = {"all": (lost == lost, kept == kept), "recomputation stated": (lost == lost, stated)}
    for source in sorted(listed):
        of_source = [np.array([run.source_key == source for run in rows.runs]) for rows in (failed, worked)]
        chosen[source] = (of_source[0], of_source[1] & stated)
    print(f"\n{'rows':24} {'failed':>7} {'rejected':>9} {'worked':>7} {'rejected':>9}")
    for name, (a, b) in chosen.items():
        shares = Shares(
            num_failed=int(a.sum()), num_failed_rejected=int(lost[a].sum()),
            num_worked=int(b.sum()), num_worked_rejected=int(kept[b].sum()),
        )  # fmt: skip
        print(
            f"{name:24} {shares.num_failed:7} {shares.correctly_rejected_ratio:9.1%} "
            f"{shares.num_worked:7} {shares.wrongly_rejected_ratio:9.1%}"
        )


def print_fit(rows: Rows) -> None:
    print(f"\n{'lineage':16} {'constant':28} {'shipped':>12} {'fitted':>12}")
    for lineage, names in FITTED.items():
        index = np.array([i for i, run in enumerate(rows.runs) if fits_lineage(run, lineage)])
        chosen = Rows.of([rows.runs[i] for i in index])
        shipped = np.array([getattr(constants_of(chosen.runs[0]), name) for name in names])
        for name, old, new in zip(names, shipped, fit(chosen, names, shipped), strict=True):
            print(f"{lineage:16} {name:28} {old:12.4g} {new:12.4g}")


def fits_lineage(run: PublishedRun, lineage: str) -> bool:
    """Rows that a fit can use: without MoE and FSDP with a pipeline, whose micro-batches are not stated."""
    c = run.conditions
    if c is None or stack_facts(c.stack.framework).lineage != lineage:
        return False
    return not (c.plan.sharding is Sharding.PARAMETERS and c.plan.pipeline > 1)


def constants_of(run: PublishedRun) -> MemoryConstants:
    assert run.conditions
    return memory_constants(run.conditions.stack, unfused_attention=run.conditions.unfused_attention)


def fit(rows: Rows, names: Sequence[str], start: Floats, iterations: int = 60) -> Floats:
    """Least absolute relative error by reweighted least squares; memory is nearly linear in the constants."""
    measured = np.array([run.memory_bytes for run in rows.runs])
    base = MemoryConstants.stack([constants_of(run) for run in rows.runs])
    reserved = np.array([run.memory_definition == "reserved" for run in rows.runs])

    def predicted(values: Floats) -> Floats:
        changes = {name: np.full(len(measured), v) for name, v in zip(names, values, strict=True)}
        t = rows.tables
        memory = estimate_memory(
            model=t.model, batch=t.batch, plan=t.plan, precision=t.precision, constants=replace(base, **changes)
        )
        return np.where(reserved, memory.reserved_bytes, memory.allocated_bytes) / measured

    values = start.astype(float)
    for _ in range(iterations):
        error = predicted(values) - 1
        steps = 0.01 * np.abs(values) + np.where(values == 0, 0.01, 0)
        J = np.stack([(predicted(values + d) - 1 - error) / d.sum() for d in np.diag(steps)], axis=1)
        weight = 1 / np.sqrt(np.maximum(np.abs(error), 1e-3))
        change, *_ = np.linalg.lstsq(J * weight[:, None], -error * weight, rcond=None)
        values = np.maximum(values + 0.5 * change, 0)
    return values


def print_speed(num_plans: int = 1_000_000) -> None:
    """Seconds for a million plans of mixed degrees, sharding and recomputation, one core."""
    rng = np.random.default_rng(0)
    choices = [
        Plan(tensor=t, pipeline=p, data_shard=d, sharding=s, micro_batch=b, recompute=r)
        for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) for d in (8, 64)
        for s in Sharding for b in (1, 2) for r in (Recompute.NONE, Recompute.FULL)
    ]  # fmt: skip
    plan = PlanTable.stack([plan_row(p) for p in choices]).take(rng.integers(len(choices), size=num_plans))
    for name in ("llama3.1-405b", "deepseek-v3"):
        arguments = {
            "model": model_row(catalog.model(name)),
            "batch": BatchTable(seq_len=4096, global_batch=8192),
            "precision": precision_row(PRECISIONS["bf16"]),
            "constants": memory_constants(Stack(framework="torchtitan")),
        }
        seconds = min(timeit.repeat(lambda a=arguments: estimate_memory(plan=plan, **a), number=1, repeat=3))
        print(f"{name}: {seconds:.2f} s for {num_plans:,} plans")


if __name__ == "__main__":
    main()
