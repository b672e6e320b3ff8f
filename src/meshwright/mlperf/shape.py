"""Shape mode: a benchmark's model, sequence length and batch on random tokens, for its rate. Never a result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.engines.base import Measuring, TrainOptions, find_engine, pinned_plan, refuse
from meshwright.engines.choice import planned
from meshwright.errors import InfeasibleError
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.run_files import DEFAULT_BATCH, references, run_content
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.units import format_bytes

LABEL = "Not a result: random tokens, no target, no clock. {what} were trained for their rate only."


def measure_shape(
    benchmark: Benchmark, *, overrides: tuple[str, ...], num_steps: int, dry_run: bool, started_s: float
) -> dict[str, Any]:
    """Plan the memory, train `num_steps` on random tokens, and return rate and MFU.

    A dry run for a cluster that the run names needs none of its devices. Raises InfeasibleError where the plan does not
    fit the devices.
    """
    run = shape_run(benchmark, overrides=overrides, num_steps=num_steps)
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainOptions(
            folder=Path(scratch) / "shape",
            measuring=Measuring.NEVER if dry_run else Measuring.ONCE,
            only_steps=True,
            started_s=started_s,
        )
        engine = find_engine(run.engine)
        if dry_run and run.cluster is not None:
            refuse(run.engine, engine.check(run))
            return _document(benchmark, planned(run), overrides=overrides, num_steps=num_steps, notes=(), is_here=False)
        start = engine.prepare(run, options=options)
        planned_here = replace(start.run, plan=start.plan)
        document = _document(
            benchmark, planned_here, overrides=overrides, num_steps=num_steps, notes=start.notes, is_here=True
        )  # fmt: skip
        if dry_run:
            return document
        engine.launch(start)
        found = engine.read(options.folder).statistics
    return document | {
        "tokens_per_s_per_device": found["tokens_per_s_per_device"],
        "mfu": found["mfu"],
        "mfu_convention": found["mfu_convention"],
        "step_s": found["step_s"].get("median"),
        "peak_memory_bytes": found["peak_memory_bytes"],
    }


def _document(
    benchmark: Benchmark, run: Run, *, overrides: tuple[str, ...], num_steps: int, notes: Iterable[str], is_here: bool
) -> dict[str, Any]:
    plan = pinned_plan(run)
    memory = planned_memory(run, plan)
    needed = _needed_bytes(memory) if is_here else memory.reserved_bytes
    available = _available_bytes(memory, plan) if is_here else memory.usable_bytes
    text = _arithmetic(memory, needed=needed, available=available)
    if needed > available:
        raise InfeasibleError(
            f"the shapes do not fit {'this machine' if is_here else run.cluster_name} under the plan "
            f"{plan.describe()}: {text}",
            hint="shard over more devices, --set parallel.recompute=full, optimizer.states=int8, or fewer layers",
        )
    return {
        "benchmark": benchmark.name, "model": run.model.name, "overrides": list(overrides), "plan": plan.describe(),
        "steps": num_steps, "memory": text, "memory_bytes": needed,
        "label": LABEL.format(what=_shapes(benchmark, overrides)), "notes": list(notes),
        **dict.fromkeys(("tokens_per_s_per_device", "mfu", "mfu_convention", "step_s")),
    }  # fmt: skip


def _shapes(benchmark: Benchmark, overrides: tuple[str, ...]) -> str:
    """Name of the shapes that are trained, with the settings that change them."""
    changed = [line for line in overrides if line.startswith(("model", "lora", "data.sequence_length"))]
    return f"{benchmark.name}'s shapes" + (f", changed by {', '.join(changed)}," if changed else "")


def shape_run(benchmark: Benchmark, *, overrides: tuple[str, ...], num_steps: int) -> Run:
    """The run of a benchmark without its data, weights, evaluation and target."""
    content = run_content(benchmark)
    content["name"] = f"shape of {benchmark.name}"
    content["data"] = {"source": "synthetic", "sequence_length": content["data"]["sequence_length"]}
    batch = next((point.global_batch for point in references(benchmark)), DEFAULT_BATCH)
    content["batch"] = {"global_sequences": batch}
    content["train"] = {"steps": num_steps}
    return runfile.from_mapping(content, overrides=overrides)


def planned_memory(run: Run, plan: Plan) -> MemoryEstimate:
    """Memory of a device under `plan`, for the devices of this machine or those that the run names."""
    device = devices.find_device()
    cluster = run.cluster or devices.cluster_here(device, num_devices=plan.num_devices, rates=None)
    return estimate_plan(request_for(replace(run, cluster=cluster)), plan).step.memory


def _needed_bytes(memory: MemoryEstimate) -> float:
    """On a CPU there are neither contexts nor communicators of a GPU."""
    if devices.find_device().type == "cuda":
        return memory.reserved_bytes
    return memory.allocated_bytes - memory.workspace_bytes


def _available_bytes(memory: MemoryEstimate, plan: Plan) -> float:
    device = devices.find_device()
    if device.type == "cuda":
        return memory.usable_bytes
    return devices.memory_bytes(device) / plan.num_devices


def _arithmetic(memory: MemoryEstimate, *, needed: float, available: float) -> str:
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer states": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
    }
    sizes = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"{sizes}: {format_bytes(needed)} a device of {format_bytes(available)}"
