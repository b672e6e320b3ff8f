"""A plan's parallel structure on local processes, compared with one process.

`shrink` makes a plan small enough for this machine: fewer processes on every axis, a model of toy width with the same
kinds of layers. `rehearse` runs it. Every process takes some steps of the plan; as a reference the first one takes the
same steps by itself on the whole batch. Compared are

    losses      of every step: forward, backward and optimizer
    gradients   of the first step, parameter by parameter
    weights     after the last step

An error is the largest difference of a tensor's elements over its largest element. A process that hangs is ended, and
its stack is reported.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.parallel.mesh import MeshCoordinates, mesh_coordinates
from meshwright.engines.native.reference import score_references
from meshwright.errors import InfeasibleError
from meshwright.specs.model import Attention, AttentionKind, BaseFormat, Experts, Lora, Model, Rope
from meshwright.specs.plan import Plan, Schedule
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Data, Run, StateFormat
from meshwright.training import device
from meshwright.training.data import open_data
from meshwright.training.distributed_tensors import whole_tensor
from meshwright.training.optimizer import learning_rate
from meshwright.training.processes import WorkerLostError, run_ranks

NUM_STEPS = 2
"""The second one shows the update of the first, and its own update the optimizer states that were kept."""
TOLERANCE = 1e-4
"""fp32 sums in another order differ by two orders of magnitude less; a missing or repeated sum by 0.1 and more."""
TIMEOUT_S = 120.0
"""Toy steps take a second; the rest is for starting processes on a busy machine."""
AXES = {"pipeline": "PP", "tensor": "TP", "context": "CP", "data_shard": "DP", "data_replicate": "replicas"}
"""Axes of a plan in the order in which they are kept when processes do not suffice for all, and their short names."""
EPSILON = 1e-3
"""AdamW's, in both: with the usual one a gradient that is all rounding error still moves its weight a whole step."""

MUON_RATE = 1e-3
"""Largest rate of Muon, with one Newton-Schulz iteration: five of them make singular values that are all rounding error
as large as the others, and its bf16 rounds by up to 2^-8 of an update."""


@dataclass(frozen=True, kw_only=True)
class RehearsalResult:
    """Losses and errors of a plan against one process."""

    plan: str
    num_processes: int
    losses: list[float]
    reference_losses: list[float]
    gradient_errors: dict[str, float]  # by parameter; the worst process
    weight_errors: dict[str, float]
    memory_bytes: list[int]  # of every process; the first has taken the reference's steps too
    seconds: float

    @property
    def loss_error(self) -> float:
        """The largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, self.reference_losses, strict=True))

    @property
    def gradient_error(self) -> float:
        """The largest error of a gradient."""
        return max(self.gradient_errors.values())

    @property
    def weight_error(self) -> float:
        """The largest error of a weight."""
        return max(self.weight_errors.values())

    @property
    def is_equal(self) -> bool:
        """True if all errors are within `TOLERANCE`; NaN is not."""
        errors = [self.loss_error, *self.gradient_errors.values(), *self.weight_errors.values()]
        return all(error <= TOLERANCE for error in errors)


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A run and its plan, small enough for this machine."""

    run: Run
    plan: Plan
    changes: tuple[str, ...]  # of the plan: "TP 8 -> 2"
    omitted_axes: tuple[str, ...]  # axes of the plan that had no room


def shrink(run: Run, plan: Plan, *, num_processes: int) -> Toy:
    """A small `run` and `plan` of at most `num_processes` processes with the same structure, in fp32, on random tokens.

    Every axis above 1 is kept, as 2, and doubled again while there is room; a plan that fits stays as it is. The
    structure is also: sharding, schedule, virtual stages, recomputation, several micro-batches, and of the model the
    kinds of layers, grouped heads, experts, tied embeddings.
    """
    degrees = _degrees(plan, num_processes=num_processes)
    degrees |= _expert_degrees(plan, num_ranks=math.prod(degrees.values()) // degrees["pipeline"])
    virtual = min(plan.virtual_pipeline, 2) if degrees["pipeline"] > 1 else 1
    stages = degrees["pipeline"] * virtual
    is_uneven = run.model.num_layers % (plan.pipeline * plan.virtual_pipeline) or (
        plan.layers_per_stage is not None and len(set(plan.layers_per_stage)) > 1
    )
    small = replace(
        plan,
        **degrees,
        virtual_pipeline=virtual,
        schedule=plan.schedule if virtual > 1 or plan.schedule is not Schedule.INTERLEAVED else Schedule.ONE_F_ONE_B,
        micro_batch=min(plan.micro_batch, 2),
        layers_per_stage=None,
        recompute_layers=None,
    )
    num_micro = min(plan.num_micro_batches(run.global_batch), 2 * degrees["pipeline"])
    if small.schedule is Schedule.INTERLEAVED:  # whole rounds of stages
        num_micro = max(degrees["pipeline"], num_micro - num_micro % degrees["pipeline"])
    length = 16 * small.tensor * small.context
    num_layers = max(4, stages) + (1 if is_uneven and stages > 1 else 0)
    toy = replace(
        run,
        model=_toy_model(run.model, num_layers=num_layers, small=small, window=length // 2, of=plan.tensor),
        sequence_length=length,
        global_batch=small.micro_batch * small.data * num_micro,
        label_tokens=None,
        micro_batch=small.micro_batch,
        plan=small,
        cluster=None,
        precision=PRECISIONS["fp32"],
        data=Data(),
        weights=None,
        lora=run.lora and _toy_lora(run.lora),
        train=replace(
            run.train,
            steps=NUM_STEPS,
            tokens=None,
            epochs=None,
            checkpoint=None,
            evaluate=None,
            neftune_alpha=0,
            residual_dropout=0.0,
            attention_dropout=0.0,
        ),
        # Narrow states are rounded stochastically, and differently in shards.
        optimizer=replace(run.optimizer, states=StateFormat.FP32),
    )
    names = AXES | {"expert": "EP", "expert_tensor": "ETP", "virtual_pipeline": "VPP"}
    changed = [(names[a], getattr(plan, a), getattr(small, a)) for a in names if getattr(plan, a) != getattr(small, a)]
    return Toy(
        run=toy,
        plan=small,
        changes=tuple(f"{name} {before} -> {after}" for name, before, after in changed),
        omitted_axes=tuple(name for name, _, after in changed if after == 1),
    )


def _degrees(plan: Plan, *, num_processes: int) -> dict[str, int]:
    """Processes along every axis."""
    whole = {axis: getattr(plan, axis) for axis in AXES}
    if plan.num_devices <= num_processes:
        return whole
    degrees, left = dict.fromkeys(AXES, 1), num_processes
    for _ in range(num_processes.bit_length()):  # first a 2 for each, then doublings
        for axis, degree in degrees.items():
            if left >= 2 and 2 * degree <= whole[axis]:
                degrees[axis], left = 2 * degree, left // 2
    return degrees


def _expert_degrees(plan: Plan, *, num_ranks: int) -> dict[str, int]:
    """Degrees that shard experts over the `num_ranks` of a stage: at most the plan's, with replicas if it has any."""

    def preference(pair: tuple[int, int]) -> tuple[int, ...]:
        expert, width = pair
        groups = num_ranks // (expert * width)
        return (expert > 1, width > 1, groups > 1 and plan.expert_data > 1, expert, width)

    pairs = itertools.product(range(1, plan.expert + 1), range(1, plan.expert_tensor + 1))
    expert, width = max((p for p in pairs if num_ranks % math.prod(p) == 0), key=preference)
    return {"expert": expert, "expert_tensor": width}


def _toy_model(model: Model, *, num_layers: int, small: Plan, window: int, of: int) -> Model:
    """`model` with the same kinds of layers at toy width, for the plan `small`. `of`: ranks over which its heads were
    sharded."""
    windowed, tensor = model.num_windowed_layers, small.tensor
    toy_attention = _toy_attention(model.attention, tensor=tensor, of=of)
    if not model.attention.window_pattern:
        toy_windowed = num_layers if windowed >= model.num_layers else min(windowed, num_layers // 2)
        toy_attention = replace(toy_attention, num_windowed_layers=toy_windowed)
    return replace(
        model,
        name=f"{model.name} at toy width",
        hidden=32,
        num_layers=num_layers,
        vocab=64 * tensor,
        ffn_hidden=64 * tensor if model.ffn_hidden else 0,
        attention=replace(toy_attention, window=window if windowed else 0),
        rope=_toy_rope(model.rope, head_dim=toy_attention.head_dim),
        windowed_rope=model.windowed_rope and _toy_rope(model.windowed_rope, head_dim=toy_attention.head_dim),
        experts=model.experts and _toy_experts(model.experts, small=small),
    )


def _toy_attention(a: Attention, *, tensor: int, of: int) -> Attention:
    if a.kind is AttentionKind.MLA:
        ranks = {"query_lora_rank": 16 if a.query_lora_rank else 0, "kv_lora_rank": 16}
        widths = {"head_dim": 16, "rope_head_dim": 8, "value_head_dim": 8}
        return replace(a, num_heads=2 * tensor, num_kv_heads=2 * tensor, **ranks, **widths)
    num_kv_heads = tensor * min(2, max(1, a.num_kv_heads // of))  # one a rank stays one a rank
    group = min(2, a.num_heads // a.num_kv_heads)
    return replace(a, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=8, value_head_dim=None)


def _toy_rope(rope: Rope, *, head_dim: int) -> Rope:
    """LongRoPE has a divisor for each frequency, and the toy has fewer frequencies."""
    num = rope.rotary_width(head_dim) // 2
    return replace(rope, short_factors=rope.short_factors[:num], long_factors=rope.long_factors[:num])


def _toy_lora(lora: Lora) -> Lora:
    """The adapters in all layers of the toy, without dropout, which differs between processes."""
    return replace(
        lora, rank=min(lora.rank, 4), dropout=0.0, base_format=BaseFormat.FULL, ranks={}, alphas={}, layers=None
    )


def _toy_experts(x: Experts, *, small: Plan) -> Experts:
    return replace(
        x,
        num_experts=math.lcm(8, small.expert),
        top_k=min(x.top_k, 2),
        ffn_hidden=32 * small.expert_tensor,
        num_shared=min(x.num_shared, 1),
        shared_ffn_hidden=32 * small.tensor if x.shared_hidden else None,
        num_dense_layers=min(x.num_dense_layers, 1),
        num_groups=min(x.num_groups, 2),
        groups_per_token=min(x.groups_per_token, 1),
    )


@dataclass(frozen=True, kw_only=True)
class _Cases:
    runs: tuple[tuple[Run, Plan], ...]
    answer: Path
    timeout_s: float

    def stack(self, rank: int) -> Path:
        """The file for the stack of a rank that hangs."""
        return self.answer.with_name(f"stack-{rank}.txt")


def rehearse(run: Run, plan: Plan, *, timeout_s: float = TIMEOUT_S) -> RehearsalResult:
    """Take `NUM_STEPS` steps of `run` under `plan` and in one process, on local CPU processes.

    The plan must be one that `check` passes; the data should be small, `synthetic` best.

    Raises InfeasibleError when a process fails, or has not ended after `timeout_s`: then with the place of each one.
    """
    return rehearse_each([(run, plan)], timeout_s=timeout_s)[0]


def rehearse_each(runs: Sequence[tuple[Run, Plan]], *, timeout_s: float = TIMEOUT_S) -> list[RehearsalResult]:
    """As `rehearse`, for plans of the same number of processes: these are started once for all of them."""
    (num_processes,) = {plan.num_devices for _, plan in runs}
    with TemporaryDirectory() as folder:
        cases = _Cases(
            runs=tuple((_damped(run), plan) for run, plan in runs),
            answer=Path(folder) / "comparisons.json",
            timeout_s=timeout_s,
        )
        try:
            run_ranks(_compare_rank, cases, num_ranks=num_processes, device_type="cpu")
        except WorkerLostError as error:
            plans = ", ".join(plan.describe() for _, plan in runs)
            raise InfeasibleError(_why_lost(cases, num_processes, error), hint=f"compared: {plans}") from error
        return [RehearsalResult(**values) for values in json.loads(cases.answer.read_text(encoding="utf-8"))]


def _damped(run: Run) -> Run:
    """The run with an optimizer that does not magnify rounding errors."""
    damped = replace(run.optimizer, epsilon=EPSILON)
    if damped.name == "muon":
        rate = min(damped.learning_rate, MUON_RATE)
        damped = replace(damped, newton_schulz_steps=1, learning_rate=rate, adamw_learning_rate=rate)
    return replace(run, optimizer=damped)


def _why_lost(cases: _Cases, num_processes: int, error: WorkerLostError) -> str:
    places = []
    for rank in range(num_processes):
        path = cases.stack(rank)
        stack = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if stack:
            places.append(f"process {rank} in {_where(stack)}")
    if not places:
        return error.message
    return f"deadlock: not done after {cases.timeout_s:g} s; {', '.join(places)}"


def _where(stack: str) -> str:
    """The innermost line of Meshwright in a stack of `faulthandler`: "pipeline.py:88 _run".

    `faulthandler` writes the main thread last. Only that is read: a thread that watches is always somewhere.
    """
    threads = [re.findall(r'File "(.*)", line (\d+) in (.*)', thread) for thread in stack.split("\n\n")]
    frames = next((found for found in reversed(threads) if found), [])
    ours = [f for f in frames if "meshwright" in Path(f[0]).parts and not f[2].startswith(("run_ranks", "_worker"))]
    file, line, function = (ours or frames or [("?", "?", "?")])[0]
    return f"{Path(file).name}:{line} {function}"


def _compare_rank(rank: int, num_ranks: int, cases: _Cases) -> None:
    # Weights are gathered to be compared. PyTorch warns that this is slow, which does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    comparisons, references = [], _References()
    for run, plan in cases.runs:
        with cases.stack(rank).open("w", encoding="utf-8") as stack:
            faulthandler.dump_traceback_later(cases.timeout_s, exit=True, file=stack)
            try:
                comparisons.append(_comparison_of_rank(rank, num_ranks, run, plan, references))
            finally:
                faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        cases.answer.write_text(json.dumps([asdict(c) for c in comparisons]), encoding="utf-8")


def _comparison_of_rank(rank: int, num_ranks: int, run: Run, plan: Plan, references: _References) -> RehearsalResult:
    """The same on every process."""
    start_s = time.perf_counter()
    cpu = torch.device("cpu")
    mine = _take_steps(run, mesh_coordinates(plan=plan, device=cpu, rank=rank, num_ranks=num_ranks))
    reference = references.find(run, micro_batch=plan.micro_batch, rank=rank, num_ranks=num_ranks)
    found = (
        _errors(mine.first_gradients, reference.first_gradients),
        _errors(mine.weights, reference.weights),
        device.peak_memory_bytes(cpu),
    )
    everywhere = [found]
    if num_ranks > 1:
        everywhere = [found] * num_ranks
        dist.all_gather_object(everywhere, found)
    return RehearsalResult(
        plan=plan.describe(),
        num_processes=num_ranks,
        losses=mine.losses,
        reference_losses=reference.losses,
        gradient_errors=_worst([errors for errors, _, _ in everywhere], names=reference.first_gradients),
        weight_errors=_worst([errors for _, errors, _ in everywhere], names=reference.weights),
        memory_bytes=[memory for _, _, memory in everywhere],
        seconds=time.perf_counter() - start_s,
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Losses of global batches; of the stages of a process first gradients and last weights, whole and by name."""

    losses: list[float]
    first_gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def _take_steps(run: Run, coordinates: MeshCoordinates) -> _Steps:
    """Take the optimizer steps of the part of a model at `coordinates`. Collective."""
    parts = assemble(run, coordinates=coordinates)
    loader = BatchLoader(run, coordinates=coordinates, corpus=open_data(run))
    score_references(loader, parts.stepper, num_steps=NUM_STEPS)
    losses, gradients = [], {}
    for index in range(NUM_STEPS):
        batch = loader.batch(index)
        parts.before_step(index)
        parts.scale_router_losses(batch.counts.router_loss_scale)
        loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale) / coordinates.plan.tensor
        if coordinates.num_ranks > 1:
            dist.all_reduce(loss)
        if index == 0:
            found = ((master.name, master.gradient) for master in parts.masters)  # of a small one a shard may be empty
            gradients = {name: _whole(gradient).clone() for name, gradient in found if gradient is not None}
        parts.optimizer.step(learning_rate=learning_rate(run.optimizer, step=index, num_steps=NUM_STEPS))
        parts.after_step(parts.collect_expert_load())
        losses.append(loss.item())
    weights = {name: _whole(tensor) for name, tensor in parts.trained().items()}
    return _Steps(losses=losses, first_gradients=gradients, weights=weights)


class _References:
    """Steps of one process on the whole batch. Several plans of one run are compared with the same ones."""

    def __init__(self) -> None:
        self._known: list[tuple[Run, int, _Steps]] = []

    def find(self, run: Run, *, micro_batch: int, rank: int, num_ranks: int) -> _Steps:
        """The reference of `run` in these micro-batches. All ranks call it; the first computes, the others receive."""
        for known_run, known_micro_batch, reference in self._known:
            if (known_run, known_micro_batch) == (run, micro_batch):
                return reference
        single = MeshCoordinates(plan=Plan(micro_batch=micro_batch), device=torch.device("cpu"))
        eager = replace(run, train=replace(run.train, compile=False))
        shared = [_take_steps(eager, single) if rank == 0 else None]
        if num_ranks > 1:
            dist.broadcast_object_list(shared)
        (reference,) = shared
        assert reference is not None
        self._known.append((run, micro_batch, reference))
        return reference


def _whole(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor).detach()


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, tensor in found.items():
        largest = expected[name].abs().max().clamp(min=1e-20)
        errors[name] = float((tensor - expected[name]).abs().max() / largest)
    return errors


def _worst(parts: list[dict[str, float]], *, names: Iterable[str]) -> dict[str, float]:
    """The largest error over processes; 1 for a tensor that none of them has."""
    return {name: max((part[name] for part in parts if name in part), default=1.0) for name in names}
