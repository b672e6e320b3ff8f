"""Activation recomputation: activations of a layer that the backward pass recomputes instead of saving them.

    full                whole layers; only their inputs are kept                              Chen et al. 2016
    core_attention      attention without its projections: scores, where a kernel writes them
    norm                outputs of both norms, which projections keep as inputs
    activation          silu(gate) * up of a feed-forward (or its other function), which its last matrix keeps; of
                        experts too
    mla_up_projection   queries, keys and values that MLA's latents grow into
    mlp, moe            whole feed-forward blocks of dense layers, of expert layers
    shared_experts      the block that every token goes through
    alternate_matmuls   all but attention and every second GEMM

Three ways: `from_inputs` around a module frees what is inside it; `recomputing_outputs` frees an output that others
keep; PyTorch's selective checkpoint of a layer decides by operation. Tests measure that each frees the bytes that
`cost.memory.activations` counts.

Methods are replaced, not modules: names stay, and hooks of FSDP stay around them, so that a layer's weights are
gathered once for its recomputation and its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.engines.native.facts import WITHOUT_CHECKPOINT
from meshwright.engines.native.output_recomputation import discard, from_inputs, recomputed, recomputing_outputs
from meshwright.kernels.linear import OWN_GEMMS
from meshwright.specs.plan import Plan, Recompute
from meshwright.training.models import Block
from meshwright.training.models.attention import LatentAttention
from meshwright.training.models.experts import MixtureOfExperts, RoutedExperts
from meshwright.training.models.feed_forward import FeedForward, GatedActivation
from meshwright.training.models.norm import ResidualNorm, ResidualSum


def uses_checkpoint(plan: Plan, *, has_dropout: bool) -> bool:
    """Return True if a layer of `plan` runs inside PyTorch's checkpoint, whose first use imports the compiler."""
    if plan.recompute is Recompute.FULL:
        return has_dropout
    named = set() if plan.recompute is Recompute.NONE else set(plan.recompute_modules)
    return "alternate_matmuls" in named or (has_dropout and not named <= {*WITHOUT_CHECKPOINT})


def _replace(owner: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Put `method` in the place of a method or function of a module."""
    setattr(owner, name, method)


def recompute(layers: Sequence[nn.Module], *, plan: Plan, num_before: int = 0) -> None:
    """Make the `layers` of a stage recompute the activations that `plan` names.

    `num_before`: layers of the rank in earlier stages.
    """
    if plan.recompute is Recompute.FULL:
        count = len(layers) if plan.recompute_layers is None else max(0, plan.recompute_layers - num_before)
        for layer in layers[:count]:
            layer.forward = _checkpointed(layer.forward, of=layer)
    elif plan.recompute is Recompute.SELECTIVE:
        for layer in layers:
            assert isinstance(layer, Block)
            if "alternate_matmuls" in plan.recompute_modules:
                _alternate(layer)
            else:
                _selective(layer, frozenset(plan.recompute_modules))


def _selective(layer: Block, names: frozenset[str]) -> None:
    attention, block = layer.attention, "moe" if isinstance(layer.ffn, MixtureOfExperts) else "mlp"
    if "core_attention" in names:
        attention.core.forward = _checkpointed(attention.core.forward, of=layer)
    if "mla_up_projection" in names and isinstance(attention, LatentAttention):
        _replace(attention, "expand", partial(recomputed, attention.expand))
    if "norm" in names:
        _replace(layer.attention_norm, "forward", partial(recomputed, layer.attention_norm.forward))
        if block not in names:
            _recompute_norm_of_sum(layer.ffn_norm)
    if block in names:
        _checkpoint_block(layer, with_norm="norm" in names)
    elif isinstance(layer.ffn, MixtureOfExperts):
        if "shared_experts" in names and layer.ffn.shared is not None:
            layer.ffn.shared.forward = _checkpointed(layer.ffn.shared.forward, of=layer)
        elif "activation" in names and layer.ffn.shared is not None:
            _recompute_activation(layer.ffn.shared)
        if "activation" in names:
            _recompute_activation(layer.ffn.experts)
    elif "activation" in names:
        _recompute_activation(layer.ffn)
    if names & {"norm", "activation", "mla_up_projection"}:
        layer.forward = _recomputing_outputs(layer.forward)


def _recompute_norm_of_sum(norm: nn.Module) -> None:
    """Recompute the norm from the sum, which is kept anyway: from branch and residual, the branch would be kept too."""
    assert isinstance(norm, ResidualNorm)
    whole = norm.forward

    def forward(x_BTD: Tensor, residual_BTD: Tensor) -> tuple[Tensor, Tensor]:
        normed_BTD, total_BTD = whole(x_BTD, residual_BTD)
        discard(normed_BTD, function=norm.normed, inputs=(total_BTD,))
        return normed_BTD, total_BTD

    _replace(norm, "forward", forward)


def _checkpoint_block(layer: Block, *, with_norm: bool) -> None:
    """Recompute the feed-forward block; with its norm, whose output would otherwise be saved."""
    ffn, norm = layer.ffn.forward, layer.ffn_norm
    if with_norm:
        assert isinstance(norm, ResidualNorm)
        _replace(norm, "forward", ResidualSum().forward)
        layer.ffn.forward = _checkpointed(lambda x_BTD, *others: ffn(norm.normed(x_BTD), *others), of=layer)
    else:
        layer.ffn.forward = _checkpointed(ffn, of=layer)


def _recomputing_outputs(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Any) -> Tensor:
        with recomputing_outputs():
            return forward(*inputs)

    return run


def _checkpointed(forward: Callable[..., Tensor], *, of: nn.Module) -> Callable[..., Tensor]:
    """`forward` under a checkpoint: it saves its inputs only. PyTorch's own repeats a dropout, and can be traced."""
    draws = any(isinstance(module, nn.Dropout) and module.p for module in of.modules())
    again = partial(_counted_once, of) if any(isinstance(m, MixtureOfExperts) for m in of.modules()) else nullcontext

    def run(*inputs: Any) -> Any:
        if draws or torch.compiler.is_compiling():
            return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))
        return from_inputs(forward, *inputs, again=again)

    return run


@contextmanager
def _counted_once(layer: nn.Module) -> Iterator[None]:
    """Undo what routers add to the load of experts while a layer is recomputed."""
    loads = [(buffer, buffer.clone()) for name, buffer in layer.named_buffers() if name.endswith("load_E")]
    try:
        yield
    finally:
        for buffer, before in loads:
            buffer.copy_(before)


# --- the activation, saving its inputs only ---


def _recompute_activation(block: FeedForward | RoutedExperts) -> None:
    function = swiglu if block.kind == "silu" else partial(_from_inputs, block.activation)
    _replace(block, "activation", partial(recomputed, function))
    block.drops_hidden = True  # in 8 bits the activation is a part of the block


def _from_inputs(activation: GatedActivation, gate: Tensor, up: Tensor) -> Tensor:
    """Any activation, saving gate and up: the backward pass computes what lies between again."""
    if torch.compiler.is_compiling():
        return checkpoint(activation, gate, up, use_reentrant=False)
    return from_inputs(activation, gate, up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, saving gate and up; PyTorch's own multiplication also saves silu(gate)."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * functional.silu(gate)


# --- every second GEMM ---

GEMMS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} | OWN_GEMMS
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


class _EverySecond:
    """Saves attention and the first, third, ... GEMM of a layer. GEMMs of experts are neither counted nor saved."""

    def __init__(self) -> None:
        self.num_gemms = {False: 0, True: 0}  # in the forward pass, and in its recomputation
        self.in_experts = False

    def __call__(self, ctx: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        if operation in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation not in GEMMS or self.in_experts:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.num_gemms[ctx.is_recompute] += 1
        is_odd = self.num_gemms[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_odd else CheckpointPolicy.PREFER_RECOMPUTE


def _alternate(layer: Block) -> None:
    current: list[_EverySecond] = []

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        current[:] = [_EverySecond()]
        forward, again = create_selective_checkpoint_contexts(current[0])
        return forward, _both(again, _counted_once(layer))

    if isinstance(layer.ffn, MixtureOfExperts):
        layer.ffn.experts.forward = _apart(layer.ffn.experts.forward, current)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def _apart(forward: Callable[..., Tensor], current: list[_EverySecond]) -> Callable[..., Tensor]:
    def run(*inputs: Any) -> Tensor:
        for policy in current:
            policy.in_experts = True
        try:
            return forward(*inputs)
        finally:
            for policy in current:
                policy.in_experts = False

    return run


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(second)
        stack.enter_context(first)
        yield
