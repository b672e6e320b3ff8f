"""Linear layers that multiply in 8 or 4 bits: which of them, on which devices, their weight cache and their history.

The recipes and their GEMMs are those of `kernels.fp8.layer`. Every linear layer of a block is converted: attention,
feed-forward, experts; embedding, router and head stay as they are. Weights, masters and communication are those of
bf16, dispatched tokens too.

On a CPU operands are rounded to the format and multiplied in fp32 (`is_emulated`), as e2m1 is everywhere. That has the
numerics of the format and not its speed: the record notes it, and nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.kernels.fp8.feed_forward import MATRICES
from meshwright.kernels.fp8.formats import Element, Scaling
from meshwright.kernels.fp8.layer import RECIPES, Fp8State, cache_bytes, fp8_linear
from meshwright.kernels.linear import Linear
from meshwright.specs.plan import Plan
from meshwright.specs.precision import Precision
from meshwright.specs.run import Run
from meshwright.training.device import FP8_DEVICES, device_name, has_mx, multiplies_fp8
from meshwright.training.distributed_tensors import own_part
from meshwright.training.models.experts import RoutedExperts
from meshwright.training.models.feed_forward import FeedForward

CHECKPOINTED = "fp8."
"""Begins the names of delayed scales in a checkpoint. A checkpoint of another precision has none."""


def require(precision: Precision, *, device: torch.device) -> None:
    """Raise InputError when `device` is a GPU that does not multiply in `precision`. A CPU emulates all of them."""
    if precision.name not in RECIPES or device.type == "cpu":
        return
    if RECIPES[precision.name].scaling is Scaling.MX and not has_mx(device):
        raise InputError(
            f"precision {precision.name}: this GPU has other 8-bit formats than MX",
            got=device_name(device),
            hint="--set precision=fp8_rowwise or precision=fp8_blockwise",
        )
    if not multiplies_fp8(device):
        raise InputError(
            f"precision {precision.name} needs a GPU that multiplies fp8",
            got=device_name(device),
            allowed=FP8_DEVICES,
            hint="train on this device with --set precision=bf16",
        )


def is_emulated(precision: Precision, *, device: torch.device) -> bool:
    """Return True if `device` rounds operands to the format and multiplies them in fp32.

    >>> from meshwright.specs.precision import PRECISIONS
    >>> [is_emulated(PRECISIONS[name], device=torch.device("cpu")) for name in ("bf16", "fp8")]
    [False, True]
    """
    recipe = RECIPES.get(precision.name)
    return recipe is not None and (device.type == "cpu" or recipe.values is Element.E2M1)


def convert(blocks: Iterable[nn.Module], *, precision: Precision, caches_weights: bool = False) -> None:
    """Make all linear layers and experts of `blocks` multiply in `precision`, in place; names and weights stay."""
    recipe = RECIPES[precision.name]
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Linear):
                module.multiply = partial(fp8_linear, state=Fp8State(recipe, caches_weight=caches_weights))
            elif isinstance(module, RoutedExperts):
                module.fp8_states = {name: Fp8State(recipe, caches_weight=caches_weights) for name in MATRICES}
        for module in block.modules():
            if isinstance(module, FeedForward):
                module.fp8_states = {name: _state_of(module.get_submodule(name)) for name in MATRICES}


def _state_of(linear: nn.Module) -> Fp8State:
    assert isinstance(linear, Linear)
    assert isinstance(linear.multiply, partial)
    return linear.multiply.keywords["state"]


def named_states(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Fp8State]]:
    """Names and states of all converted layers; of experts one for each of their matrices."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, Linear) and isinstance(part.multiply, partial):
                yield name, _state_of(part)
            elif isinstance(part, RoutedExperts) and part.fp8_states is not None:
                yield from ((f"{name}.{matrix}", state) for matrix, state in part.fp8_states.items())


def states_of(modules: Iterable[nn.Module]) -> Iterator[Fp8State]:
    """The states of all converted layers."""
    return (state for _, state in named_states(modules))


def fill_caches(module: nn.Module) -> None:
    """Cast the weights that the caches of `module` lack, ahead of a compiled pass, which only reads them."""
    for part in module.modules():
        if isinstance(part, Linear) and isinstance(part.multiply, partial):
            _state_of(part).fill(own_part(part.weight))
        elif isinstance(part, RoutedExperts) and part.fp8_states is not None:
            for name, state in part.fp8_states.items():
                state.fill(own_part(part.get_parameter(name)))


def delayed_states(modules: Iterable[nn.Module], *, device: torch.device) -> dict[str, Fp8State]:
    """The states with a history of scales by name, allocated on `device`."""
    found = {name: state for name, state in named_states(modules) if state.recipe.history}
    for state in found.values():
        state.allocate(device)
    return found


def histories(states: Mapping[str, Fp8State]) -> dict[str, Tensor]:
    """The tensors of delayed scaling that a checkpoint holds."""
    return {
        f"{CHECKPOINTED}{name}.amax_history": state.amax_history_3H
        for name, state in states.items()
        if state.amax_history_3H is not None
    }


def end_step(states: Mapping[str, Fp8State], *, group: dist.ProcessGroup | None) -> None:
    """Move the largest magnitudes of a step, over the processes of `group`, into the histories. Collective."""
    found = [state.amax_3 for state in states.values() if state.amax_3 is not None]
    if found and group is not None:
        largest = torch.stack(found)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for amax_3, value in zip(found, largest, strict=True):
            amax_3.copy_(value)
    for state in states.values():
        state.end_step()


def expire_caches(modules: Iterable[nn.Module]) -> None:
    """Forget all cached weights, which have changed."""
    for state in states_of(modules):
        state.expire()


def caches_weights(plan: Plan, *, num_micro_batches: int, cache: str = "auto") -> bool:
    """Return True if weights are cast once a step. `cache`: the run file's `kernels.weight_cache`.

    >>> [caches_weights(Plan(), num_micro_batches=n) for n in (1, 4)]
    [False, True]
    """
    wanted = num_micro_batches > 1 if cache == "auto" else cache == "on"
    return wanted and plan.keeps_weights_whole


def notes(run: Run, plan: Plan, *, device: torch.device) -> list[str]:
    """Notes for the record."""
    name = run.precision.name
    if name not in RECIPES:
        return []
    sent = ", tokens sent to experts" if plan.expert > 1 else ""
    found = [
        f"in bf16, not in {name}: embedding, head, attention between its projections{sent}; in fp32: router and norms"
    ]
    if is_emulated(run.precision, device=device):
        found.append(
            f"{name} is emulated on this device: operands are rounded to it and multiplied in fp32. "
            "Losses are as in the format, times are not; no MFU is given"
        )
    num_micro_batches = plan.num_micro_batches(run.global_batch)
    if caches_weights(plan, num_micro_batches=num_micro_batches, cache=run.kernels.weight_cache):
        each = cache_bytes((4096, 4096), RECIPES[run.precision.name]) / 4096**2
        found.append(
            f"weights are cast to {name} once a step and kept, {each:.2f} bytes for each weight of a linear layer"
        )
    return found
