"""A plan's parallel structure on local processes, compared with one process that does all of it alone.

Every process takes some steps of the plan and, beside them, the same steps alone on the whole batch. Equal are then

    losses      of every step: forward, backward and optimizer
    gradients   of the first step, parameter by parameter
    weights     after the last step

An error is the largest difference of a tensor's elements over its largest element.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.engines.native import device
from meshwright.engines.native.assembly import Assembly, assemble
from meshwright.engines.native.data import open_data
from meshwright.engines.native.feed import Feed, num_labels
from meshwright.engines.native.optimize import learning_rate
from meshwright.engines.native.parallel.mesh import Place, place_process
from meshwright.engines.native.processes import run_ranks
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

NUM_STEPS = 3
EPSILON = 1e-3
"""AdamW's, in both: with the usual one a gradient that is all rounding error still moves its weight a whole step."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a plan is from one process."""

    plan: str
    num_processes: int
    losses: list[float]
    losses_alone: list[float]
    gradient_errors: dict[str, float]  # by parameter; the worst process
    weight_errors: dict[str, float]
    memory_bytes: list[int]  # of every process, the reference included
    seconds: float

    @property
    def loss_error(self) -> float:
        """The largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, self.losses_alone, strict=True))

    @property
    def gradient_error(self) -> float:
        """The largest error of a gradient."""
        return max(self.gradient_errors.values())

    @property
    def weight_error(self) -> float:
        """The largest error of a weight."""
        return max(self.weight_errors.values())


@dataclass(frozen=True, kw_only=True)
class _Case:
    run: Run
    plan: Plan
    answer: Path


def compare(run: Run, plan: Plan) -> Comparison:
    """Take `NUM_STEPS` steps of `run` under `plan` and alone, on local CPU processes.

    The plan must be one that `check` passes; the data should be small, `synthetic` best.
    """
    run = replace(run, optimizer=replace(run.optimizer, epsilon=EPSILON))
    with TemporaryDirectory() as folder:
        case = _Case(run=run, plan=plan, answer=Path(folder) / "comparison.json")
        run_ranks(_compare_rank, case, num_ranks=plan.num_devices, device_type="cpu")
        return Comparison(**json.loads(case.answer.read_text(encoding="utf-8")))


def _compare_rank(rank: int, num_ranks: int, case: _Case) -> None:
    start_s = time.perf_counter()
    cpu = torch.device("cpu")
    place = place_process(plan=case.plan, device=cpu, rank=rank, num_ranks=num_ranks)
    alone = Place(plan=Plan(micro_batch=case.plan.micro_batch), device=cpu)
    mine = _Rehearsed(case.run, place)
    reference = _Rehearsed(case.run, alone)
    losses = [mine.step(i) for i in range(NUM_STEPS)]
    losses_alone = [reference.step(i) for i in range(NUM_STEPS)]
    found = (
        _errors(mine.first_gradients, reference.first_gradients),
        _errors(mine.weights(), reference.weights()),
        device.peak_memory_bytes(cpu),
    )
    everywhere = [found]
    if num_ranks > 1:
        everywhere = [found] * num_ranks
        dist.all_gather_object(everywhere, found)
    if place.is_main:
        comparison = Comparison(
            plan=case.plan.describe(),
            num_processes=num_ranks,
            losses=losses,
            losses_alone=losses_alone,
            gradient_errors=_worst([errors for errors, _, _ in everywhere]),
            weight_errors=_worst([errors for _, errors, _ in everywhere]),
            memory_bytes=[memory for _, _, memory in everywhere],
            seconds=time.perf_counter() - start_s,
        )
        case.answer.write_text(json.dumps(asdict(comparison)), encoding="utf-8")


class _Rehearsed:
    """A model at a place, with its data."""

    def __init__(self, run: Run, place: Place) -> None:
        self.run, self.place = run, place
        self.parts: Assembly = assemble(run, place=place)
        self.feed = Feed(run, place=place, corpus=open_data(run))
        self.first_gradients: dict[str, Tensor] = {}

    def step(self, index: int) -> float:
        """One optimizer step; the mean loss of the global batch."""
        batch = self.feed.batch(index)
        is_alone = self.place.num_ranks == 1
        count = num_labels(batch)
        if not is_alone:
            dist.all_reduce(count)
        loss = self.parts.stepper.forward_backward(batch, scale=self.place.num_copies / count.item())
        loss = loss / self.place.plan.tensor
        if not is_alone:
            dist.all_reduce(loss)
        if index == 0:
            self.first_gradients = self._gradients()
        self.parts.optimizer.step(
            learning_rate=learning_rate(self.run.optimizer, step=index, num_steps=NUM_STEPS)
        )
        self.parts.after_step()
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        """Whole weights of this process's stages, by name; all processes of a mesh take part."""
        state = self.parts.state()
        return {
            name.removeprefix("weights."): _whole(tensor)
            for name, tensor in state.items()
            if name.startswith("weights.")
        }

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for master in self.parts.optimizer.masters:
            gradient = master.local.grad if master.is_copy else master.parameter.grad
            if gradient is not None:
                gradients[master.name] = _whole(gradient).clone()
        return gradients


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, tensor in found.items():
        largest = expected[name].abs().max().clamp(min=1e-20)
        errors[name] = float((tensor - expected[name]).abs().max() / largest)
    return errors


def _worst(parts: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: max(part[name] for part in parts if name in part) for name in names}
