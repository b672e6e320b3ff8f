"""Updates of fp32 tensors by optimizers that treat every value, or every block of values, by itself.

`optimizer_states` has AdamW with states of this project's own narrow formats, `muon` the update of whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.errors import MissingDependencyError
from meshwright.kernels.adamw import AdamStates, AdamWStep, adamw, fused_adamw
from meshwright.kernels.dispatch import choose
from meshwright.programs import install_command
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.run import Optimizer as Settings

States = dict[str, Tensor]
"""Optimizer states of one tensor, by name."""

# One kernel for all tensors of a list; `torch.optim` is built on them. Its classes import the compiler
# (`torch._dynamo`), which costs a process 0.6 s and 95 MiB.
foreach_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_add = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]


class Update(Protocol):
    """The update of some tensors, with their optimizer states."""

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """Update every tensor that has a gradient, times `gradient_scale` (a scalar on its device; None: 1)."""
        ...

    def stored(self) -> Iterable[tuple[Tensor, States]]:
        """Every tensor with its states, as a checkpoint stores them: in its shape, or in one of their own."""
        ...

    def restore(self, states: Mapping[Tensor, States], *, num_steps: int) -> None:
        """Continue from `states` (by tensor) after `num_steps` steps."""
        ...


def adamw_step(settings: Settings, *, learning_rate: float, weight_decay: float) -> AdamWStep:
    """AdamW's settings of a step, but for its number."""
    return AdamWStep(
        learning_rate=learning_rate, betas=settings.betas, epsilon=settings.epsilon, weight_decay=weight_decay
    )


def scale_gradients(tensors: Iterable[Tensor], scale: Tensor | None) -> None:
    """Multiply the gradients of `tensors` in place: for updates that do not read a scale themselves."""
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if gradients and scale is not None:
        foreach_mul(gradients, scale)


def require(settings: Settings) -> None:
    """Raise MissingDependencyError where the package of the optimizer is absent."""
    package = OPTIMIZERS[settings.name].package
    if package is not None and find_spec(package) is None:
        raise MissingDependencyError(
            f"optimizer {settings.name} needs {package.replace('_', '-')}", hint=install_command("optimizers")
        )


class FusedAdamW:
    """AdamW with states in fp32: PyTorch's own kernel for all tensors, as `torch.optim.AdamW(fused=True)` calls it."""

    def __init__(self, tensors: list[Tensor], *, settings: Settings, weight_decay: float) -> None:
        self.tensors, self.settings, self.weight_decay = tensors, settings, weight_decay
        self.states: dict[Tensor, States] = {}
        self.num_steps: dict[Tensor, Tensor] = {}  # of each tensor, fp32, where the kernel reads it

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """See `Update`."""
        gradients = {tensor: tensor.grad for tensor in self.tensors if tensor.grad is not None}
        if not gradients:
            return
        tensors = list(gradients)
        states = [self._states_of(tensor) for tensor in tensors]
        num_steps = [self.num_steps[tensor] for tensor in tensors]
        foreach_add(num_steps, 1)
        both = [own["exp_avg"] for own in states], [own["exp_avg_sq"] for own in states]
        step = adamw_step(self.settings, learning_rate=learning_rate, weight_decay=self.weight_decay)
        if choose("adamw", tensors[0], gradients[tensors[0]], both[0][0]) == "fused":
            fused_adamw(tensors, list(gradients.values()), *both, num_steps, step, scale=gradient_scale)
            return
        for tensor, number, first, second in zip(tensors, num_steps, *both, strict=True):
            flat = AdamStates(first=first.view(-1), second=second.view(-1))
            adamw(tensor, gradients[tensor], flat, replace(step, number=int(number)), scale=gradient_scale)

    def _states_of(self, tensor: Tensor) -> States:
        if tensor not in self.states:
            self.states[tensor] = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
            self.num_steps[tensor] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        return self.states[tensor]

    def stored(self) -> Iterator[tuple[Tensor, States]]:
        """See `Update`. The live states, created here before the first step."""
        for tensor in self.tensors:
            yield tensor, dict(self._states_of(tensor))

    def restore(self, states: Mapping[Tensor, States], *, num_steps: int) -> None:
        """See `Update`."""
        for tensor, own in self.stored():
            self.num_steps[tensor].fill_(num_steps)
            copy_states(own, states[tensor])


class Lion:
    """Lion with its state in fp32: the sign of a mean of gradients. lion-pytorch updates all tensors at once."""

    def __init__(self, tensors: list[Tensor], *, settings: Settings, weight_decay: float) -> None:
        from lion_pytorch.foreach import Lion as LionOfLibrary

        self.tensors = tensors
        self.lion = LionOfLibrary(tensors, lr=settings.learning_rate, betas=settings.betas, weight_decay=weight_decay)

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """See `Update`."""
        scale_gradients(self.tensors, gradient_scale)
        self.lion.param_groups[0]["lr"] = learning_rate
        self.lion.step()

    def stored(self) -> Iterator[tuple[Tensor, States]]:
        """See `Update`. The live state, created here before the first step."""
        for tensor in self.tensors:
            if not self.lion.state[tensor]:
                self.lion.state[tensor] = {"exp_avg": torch.zeros_like(tensor)}
            yield tensor, {"exp_avg": self.lion.state[tensor]["exp_avg"]}

    def restore(self, states: Mapping[Tensor, States], *, num_steps: int) -> None:
        """See `Update`. Lion counts no steps."""
        for tensor, own in self.stored():
            copy_states(own, states[tensor])


class EightBitAdamW:
    """AdamW with states in 8 bits, and a scale for each block of 256: torchao's.

    It rounds to the nearest code, and keeps states of small tensors in fp32. Each shape is compiled at its first step.
    Codes and scales are stored as they are: a decoded state would be rounded to other codes.
    """

    def __init__(self, tensors: list[Tensor], *, settings: Settings, weight_decay: float) -> None:
        from torchao.optim import AdamW8bit

        self.tensors = tensors
        self.adamw = AdamW8bit(
            tensors, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, weight_decay=weight_decay
        )

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """See `Update`."""
        scale_gradients(self.tensors, gradient_scale)
        self.adamw.param_groups[0]["lr"].fill_(learning_rate)
        self.adamw.step()

    def stored(self) -> Iterator[tuple[Tensor, States]]:
        """See `Update`. The live states, created here before the first step."""
        for tensor in self.tensors:
            if not self.adamw.state[tensor]:
                # The library alone decides which tensors are large enough for 8 bits.
                new = self.adamw._new_buffer
                self.adamw.state[tensor] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": new(tensor, True),
                    "exp_avg_sq": new(tensor, False),
                }
            held = self.adamw.state[tensor]
            yield tensor, _parts("exp_avg", held["exp_avg"]) | _parts("exp_avg_sq", held["exp_avg_sq"])

    def restore(self, states: Mapping[Tensor, States], *, num_steps: int) -> None:
        """See `Update`."""
        for tensor, own in self.stored():
            self.adamw.state[tensor]["step"].fill_(num_steps)
            copy_states(own, states[tensor])


def _parts(name: str, state: Any) -> States:
    """Tensors of a state of torchao: codes and scales, or a single fp32 tensor."""
    if hasattr(state, "codes"):
        return {f"{name}_codes": state.codes, f"{name}_scale": state.scale}
    return {name: state}


def copy_states(own: States, loaded: States) -> None:
    """Copy loaded states into live ones, where they are not the same tensors already."""
    foreach_copy([own[name] for name in own], [loaded[name] for name in own])
