"""The optimizer of a run: learning rate of a step, clipping by the global norm, updates of masters by name.

    adamw       PyTorch's fused AdamW; `optimizer_states.ChunkedAdamW` for narrow states and states in host memory
    adamw8bit   torchao's
    lion        lion-pytorch's
    muon        `muon.Muon` for the matrices of hidden layers, AdamW for embedding, head and vectors

All of them update the fp32 masters of `masters`. Weight decay is decoupled and of matrices only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.kernels.adamw import clip_scale, gradient_squares
from meshwright.specs.run import DecayShape, LearningRateSchedule, RateGroup, StateFormat
from meshwright.specs.run import Optimizer as Settings
from meshwright.training.distributed_tensors import is_distributed
from meshwright.training.host_memory import HostCopies
from meshwright.training.masters import Master, is_partial, local_part
from meshwright.training.muon import Muon, is_hidden_matrix
from meshwright.training.optimizer_states import ChunkedAdamW
from meshwright.training.optimizer_updates import (
    EightBitAdamW,
    FusedAdamW,
    Lion,
    States,
    Update,
    foreach_copy,
    foreach_lerp,
)

AVERAGE = "average"
"""Name of the averages of weights among the states of a checkpoint."""


def learning_rate(settings: Settings, *, step: int, num_steps: int) -> float:
    """The rate of step `step` (0 is the first) of `num_steps`.

    Linear warm-up from peak / warmup_steps to the peak; then by schedule down to peak x final_ratio, which the last
    step has. WSD stays at the peak until the last `decay_ratio` of all steps, at least one, and falls by `decay_shape`.
    Rates of the other schedules are those of transformers' functions of the same names, one step later, as these
    start with a rate of 0.

    >>> s = Settings(learning_rate=1.0, warmup_steps=2, final_ratio=0.0, schedule=LearningRateSchedule.LINEAR)
    >>> [learning_rate(s, step=i, num_steps=6) for i in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    peak, taken = settings.learning_rate, step + 1
    if taken <= settings.warmup_steps:
        return peak * taken / settings.warmup_steps
    if settings.schedule is LearningRateSchedule.INVERSE_SQRT:
        return peak * max(settings.final_ratio, math.sqrt(max(1, settings.warmup_steps) / taken))
    start, shape = settings.warmup_steps, settings.schedule.value
    if settings.schedule is LearningRateSchedule.WSD:
        shape = settings.decay_shape.value
        falling = max(1, round(settings.decay_ratio * num_steps)) if settings.decay_ratio else 0
        start = max(start, num_steps - falling)
    elapsed = min(1.0, max(0.0, (taken - start) / max(1, num_steps - start)))
    if settings.schedule is LearningRateSchedule.COSINE_WITH_RESTARTS:
        elapsed, shape = settings.cycles * elapsed % 1.0 if elapsed < 1 else 1.0, DecayShape.COSINE
    is_polynomial = settings.schedule is LearningRateSchedule.POLYNOMIAL
    fallen = 1 - (1 - elapsed) ** settings.power if is_polynomial else FALLEN[shape](elapsed)
    return peak * (1 - (1 - settings.final_ratio) * fallen)


FALLEN: Mapping[str, Callable[[float], float]] = {
    LearningRateSchedule.CONSTANT: lambda x: 0.0,
    DecayShape.LINEAR: lambda x: x,
    DecayShape.COSINE: lambda x: 0.5 * (1 - math.cos(math.pi * x)),
    DecayShape.SQRT: math.sqrt,
    DecayShape.EXPONENTIAL: lambda x: 2 - 2 ** (1 - x),
}
"""Share of its fall that a rate has fallen, by the share of its decay that is over."""


class MasterOptimizer:
    """The optimizer of this process's masters. `is_single_process`: no other process holds parts of the model.

    `after_update` is called whenever masters have changed, to refresh other copies of them. `offloads`: optimizer
    states lie in host memory, which only AdamW does.
    """

    def __init__(
        self,
        masters: list[Master],
        *,
        settings: Settings,
        is_single_process: bool,
        seed: int = 0,
        after_update: Callable[[], None] | None = None,
        offloads: bool = False,
    ) -> None:
        self.masters = [m for m in masters if m.local.numel()]  # a small tensor leaves some shards empty
        self.settings = settings
        self.is_single_process = is_single_process
        self.after_update = after_update
        self.updates = list(_updates(masters, settings=settings, seed=seed, offloads=offloads))
        self.num_steps = 0
        self.averages = [m.values.detach().clone() for m in self.masters] if settings.average_decay else []

    def step(self, *, learning_rate: float, accepts: Callable[[float], bool] = math.isfinite) -> float:
        """Clip, update the masters, refresh the parameters, free the gradients. Returns the norm before clipping.

        If `accepts` refuses the norm, no master is updated.
        """
        self._take_gradients()
        norm = self._gradient_norm()
        if accepts(norm):
            scale = self._clip_scale(norm)
            for update, rate_ratio in self.updates:
                update.step(learning_rate=learning_rate * rate_ratio, gradient_scale=scale)
            self._refresh(m for m in self.masters if m.host is None)  # the others' updates did
            self._average()
        for master in self.masters:
            master.forget_gradient()
        return norm

    def _average(self) -> None:
        """Move the averages towards the masters; the first step's masters are their beginning."""
        if self.averages:
            weight = 1 - self.settings.average_decay if self.num_steps else 1.0
            foreach_lerp(self.averages, [m.values for m in self.masters], weight)
        self.num_steps += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the averages of the weights where the run keeps them, until the context closes."""
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        for master, average in zip(self.masters, self.averages, strict=False):
            kept = master.values.clone()
            master.values.copy_(average)
            average.copy_(kept)
        if self.settings.average_decay:
            self.refresh()

    def refresh(self) -> None:
        """Round the masters into the parameters that compute."""
        self._refresh(self.masters)

    def _refresh(self, masters: Iterable[Master]) -> None:
        copies = [m for m in masters if m.is_copy]
        if copies:
            foreach_copy([local_part(m.parameter.detach()) for m in copies], [m.values for m in copies])
        if self.after_update is not None:
            self.after_update()

    def _take_gradients(self) -> None:
        in_parts: dict[DeviceMesh, list[Tensor]] = {}
        for master in self.masters:
            gradient = master.gradient
            if gradient is None:
                master.local.grad = None
                continue
            master.local.grad = local_part(gradient)
            if is_distributed(gradient) and is_partial(gradient):
                in_parts.setdefault(gradient.device_mesh, []).append(master.local.grad)
        for mesh, sums in in_parts.items():
            whole = torch.cat([s.flatten() for s in sums])  # one collective
            dist.all_reduce(whole, group=mesh.get_group())
            parts = whole.split([s.numel() for s in sums])
            foreach_copy(sums, [part.view_as(s) for part, s in zip(parts, sums, strict=True)])

    def _gradient_norm(self) -> float:
        """The norm of all gradients of all processes."""
        held = [(m.local.grad, m.copies) for m in self.masters if m.local.grad is not None]
        squares = gradient_squares([grad for grad, _ in held], copies=[copies for _, copies in held])
        if not self.is_single_process:
            dist.all_reduce(squares)
        return squares.sqrt().item()

    def _clip_scale(self, norm: float) -> Tensor | None:
        """Return the scale of clipping as a scalar on the masters' device; None: gradients are not clipped."""
        scale = clip_scale(norm, self.settings.gradient_clip)
        if scale is None or not self.masters:
            return None
        return torch.full((), scale, dtype=torch.float32, device=self.masters[0].local.device)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by name: `weights.NAME`, and `STATE.NAME` for each state, such as
        `exp_avg.NAME`.

        Weights are the live ones, and so are their averages, `average.NAME`. The others may be copies: after loading
        into them, call `restore`.
        """
        state = {f"weights.{m.name}": m.like(m.values) for m in self.masters}
        state |= {f"{AVERAGE}.{m.name}": m.like(a) for m, a in zip(self.masters, self.averages, strict=False)}
        for master, name, tensor in self._stored():
            has_its_shape = tensor.shape == master.local.shape
            state[f"{name}.{master.name}"] = master.like(tensor) if has_its_shape else tensor
        return state

    def restore(self, state: Mapping[str, Tensor], *, step: int) -> None:
        """Continue from a loaded `state` after `step` steps."""
        self.num_steps = step
        states: dict[Tensor, States] = {}
        for master, name, _ in self._stored():
            states.setdefault(master.local, {})[name] = local_part(state[f"{name}.{master.name}"])
        for update, _ in self.updates:
            update.restore(states, num_steps=step)
        self.refresh()

    def _stored(self) -> Iterator[tuple[Master, str, Tensor]]:
        """Every optimizer state with its master and its name."""
        masters = {m.local: m for m in self.masters}
        for update, _ in self.updates:
            for local, states in update.stored():
                for name, tensor in states.items():
                    yield masters[local], name, tensor


def _updates(masters: list[Master], *, settings: Settings, seed: int, offloads: bool) -> Iterator[tuple[Update, float]]:
    """Yield updates of groups of masters, each with its learning rate relative to the run's."""
    held = [m for m in masters if m.local.numel()]  # a small tensor leaves some shards empty
    assert not offloads or settings.name == "adamw", settings.name  # others are refused by the engine's check
    if settings.name == "muon":
        # Ranks with empty shards gather too.
        yield Muon([m for m in masters if is_hidden_matrix(m.name, m.parameter)], settings=settings), 1.0
        held = [m for m in held if not is_hidden_matrix(m.name, m.parameter)]
        own_rate = settings.adamw_learning_rate or settings.learning_rate
        for update in _elementwise(held, settings=replace(settings, name="adamw"), seed=seed):
            yield update, own_rate / settings.learning_rate
    else:
        factors = {m.name: _rate_factor(m, settings.rate_factors) for m in held}
        for factor in dict.fromkeys(factors.values()):
            group = [m for m in held if factors[m.name] == factor]
            for update in _elementwise(group, settings=settings, seed=seed, offloads=offloads):
                yield update, factor


def _rate_factor(master: Master, factors: Mapping[RateGroup, float]) -> float:
    """Return the factor of the first group that holds `master`; 1 where none does."""
    holds = {
        RateGroup.EMBEDDING: master.name.startswith("embedding."),
        RateGroup.HEAD: master.name.startswith("head."),
        RateGroup.LORA_B: ".lora_b." in master.name,
        RateGroup.VECTORS: not master.is_matrix,
    }
    return next((factors[group] for group, is_held in holds.items() if is_held and group in factors), 1.0)


ELEMENTWISE = {"adamw": FusedAdamW, "adamw8bit": EightBitAdamW, "lion": Lion}
"""Updates of single values, or of blocks of them, by the optimizer's name."""


def _elementwise(masters: list[Master], *, settings: Settings, seed: int, offloads: bool = False) -> Iterator[Update]:
    """Group masters: matrices have weight decay, vectors do not. Masters with copies on the same processes share a flat
    space of narrow states, so that all copies are rounded with the same noise."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Tensor]] = {}
    for m in masters:
        along = () if settings.states is StateFormat.FP32 else m.copied_along
        groups.setdefault((m.is_matrix, along), []).append(m.local)
    copies = HostCopies(masters[0].local.device) if offloads and masters else None
    on_host = {m.local: m for m in masters if m.host is not None}
    for (is_matrix, _), tensors in groups.items():
        decay = settings.weight_decay if is_matrix else 0.0
        if settings.states is StateFormat.FP32 and copies is None:
            yield ELEMENTWISE[settings.name](tensors, settings=settings, weight_decay=decay)
        else:
            yield ChunkedAdamW(
                tensors, settings=settings, weight_decay=decay, seed=seed, copies=copies, on_host=on_host
            )
