"""Tensor parallelism, with sequence parallelism: each layer's matrices are sharded over ranks.

    query key value gate up   by columns: each rank has some heads, some feed-forward widths
    output down               by rows: a collective sums the partial outputs
    router                    replicated: each rank scores its own tokens; `expert` shards the experts
    an adapter's matrices     the wide side like the matrix it belongs to, the narrow one replicated (`adapters`)
    embedding head            by rows of the vocabulary; the loss is taken without gathering logits;
                              tied ones are one matrix here too
    latent attention          matrices that grow heads out of latents by columns; those that make latents are whole,
                              and it is the narrow latents that are gathered

With sequence parallelism norms and residuals hold T / tensor tokens: inputs are gathered before the columns and sums
scattered after the rows, which moves what an all-reduce moves and keeps a fraction of the activations.

    B T/t D  --norm-->  B T/t D  --gather-->  B T D  --columns, rows-->  B T D partial  --scatter-->  B T/t D

Weights of norms are replicated distributed tensors: so their gradients are summed over ranks that saw different tokens
or heads. What they norm is plain tensors.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from meshwright.engines.native.parallel.adapters import LoraColwiseParallel, LoraRowwiseParallel, QkvParallel
from meshwright.engines.native.parallel.mesh import sharded
from meshwright.kernels.cross_entropy import capped
from meshwright.kernels.linear import Linear, linear
from meshwright.training.models import LoraLinear, Transformer
from meshwright.training.models.attention import GroupedAttention, LatentAttention
from meshwright.training.models.experts import MixtureOfExperts, TopKRouter
from meshwright.training.models.feed_forward import FeedForward
from meshwright.training.models.norm import Norm
from meshwright.training.models.transformer import Head

TOKENS = Shard(1)  # T of B T D


def shard_matrices(model: Transformer, *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard the matrices of `model` (or a stage of one) over `mesh`, in place, all but those of routed experts."""
    residual = TOKENS if sequence_parallel else Replicate()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if sequence_parallel:
        model.own_tokens = partial(_own_columns, mesh=mesh)
        for layer in model.blocks().values():
            layer.dropout.own_tokens, layer.dropout.width = model.own_tokens, mesh.size()
    for layer in model.blocks().values():
        of_attention = _latent_plan if isinstance(layer.attention, LatentAttention) else _grouped_plan
        norms = {name: _on_residual(residual) for name, part in layer.named_children() if isinstance(part, Norm)}
        output = {"attention.output": _rows(layer.attention.output, residual)}
        parallelize_module(layer, mesh, of_attention(layer.attention, residual) | norms | output)
        if isinstance(layer.attention, GroupedAttention) and layer.attention.sinks is not None:
            parallelize_module(layer.attention, mesh, _SinksOfHeads())
        feed_forward = layer.ffn
        if isinstance(feed_forward, MixtureOfExperts):
            parallelize_module(feed_forward.router, mesh, _OnLocalTensors(sees_all=False))
            if sequence_parallel:
                feed_forward.own_tokens = partial(_own_columns, mesh=mesh)
            feed_forward = feed_forward.shared
        if feed_forward is not None:
            parallelize_module(feed_forward, mesh, _gathered(residual, num_inputs=1))
            parallelize_module(feed_forward, mesh, _feed_forward_plan(feed_forward, residual))
            feed_forward.in_fp8 = partial(_local_feed_forward, feed_forward, residual=residual)
    for module in model.predictions.values():
        names = ("embedding_norm", "hidden_norm", "projection", "norm")
        parallelize_module(module, mesh, {name: _on_residual(residual) for name in names})
    for embedding in (model.embedding, model.prediction_embedding):
        if embedding is not None:
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
            parallelize_module(embedding, mesh, style)
    if model.norm is not None:
        parallelize_module(model.norm, mesh, _on_residual(residual))
    if model.head is not None:
        shard_head = _score_on_all_ranks if model.model.num_labels else shard_vocabulary
        shard_head(model.head, mesh=mesh, residual=residual)
    model.tie()
    for name, parameter in model.named_parameters():  # PyTorch's styles make some frozen ones trainable
        parameter.requires_grad_(name in trained)


def _own_columns(is_token_BS: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the tokens of every sequence."""
    return is_token_BS.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def _grouped_plan(attention: nn.Module, residual: Shard | Replicate) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"attention": _gathered(residual, num_inputs=2)}
    for name in ("query", "key", "value"):
        plan[f"attention.{name}"] = _columns(attention.get_submodule(name))
    if "qkv" in dict(attention.named_children()):
        plan["attention.qkv"] = QkvParallel()
    for name in ("query_norm", "key_norm"):
        if isinstance(attention.get_submodule(name), Norm):
            plan[f"attention.{name}"] = _OnLocalTensors(sees_all=False)
    return plan


def _latent_plan(attention: nn.Module, residual: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Everything before the heads runs on the residual's tokens."""
    layouts = (residual, None)
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts, use_local_output=False),
        "attention.rotary_key": _SharedByHeads(),
    }
    for name, module in attention.named_children():
        if name in ("query_down", "query_norm", "kv_down", "kv_norm"):
            plan[f"attention.{name}"] = _Replicated()
        elif name in ("query", "query_up", "kv_up"):
            plan[f"attention.{name}"] = _columns(module, input_layouts=residual)
    return plan


def _feed_forward_plan(layer: nn.Module, residual: Shard | Replicate) -> dict[str, ParallelStyle]:
    return {
        "gate": _columns(layer.get_submodule("gate")),
        "up": _columns(layer.get_submodule("up")),
        "down": _rows(layer.get_submodule("down"), residual),
    }


def _columns(linear: nn.Module, *, input_layouts: Shard | Replicate | None = None) -> ParallelStyle:
    """Column-wise style. `input_layouts`: placement of an input that must be gathered."""
    adapted = isinstance(linear, LoraLinear)
    return LoraColwiseParallel() if adapted else _Columns(input_layouts=input_layouts)


def _rows(linear: nn.Module, residual: Shard | Replicate) -> ParallelStyle:
    return LoraRowwiseParallel(residual) if isinstance(linear, LoraLinear) else _Rows(output_layouts=residual)


def _gathered(residual: Shard | Replicate, *, num_inputs: int) -> ParallelStyle:
    """Gather all tokens of the first input. It stays a distributed tensor, so that query, key and value (gate and up)
    share one reduction in the backward pass."""
    others = (None,) * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(residual, *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
    )


def _on_residual(residual: Shard | Replicate) -> ParallelStyle:
    """Style of a module with replicated weights that takes what the residual stream holds."""
    return _OnLocalTensors(sees_all=residual != TOKENS)


class _Columns(ColwiseParallel):
    """Columns of a matrix, with the GEMM routes of `kernels.linear`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        return _with_local_gemm(module, x=Replicate(), out=Shard(-1))


class _Rows(RowwiseParallel):
    """Rows of a matrix, with the GEMM routes of `kernels.linear`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        return _with_local_gemm(module, x=Shard(-1), out=Partial())


def _with_local_gemm(module: nn.Module, *, x: Shard | Replicate, out: Shard | Partial) -> nn.Module:
    """Make `module` multiply local tensors: an input of placement `x`, an output of placement `out`.

    PyTorch's own GEMM of distributed tensors does not use the kernels that `linear` chooses.
    """
    if type(module) is not Linear or (module.bias is not None and isinstance(out, Partial)):
        return module
    grad_placements = [Partial()] if isinstance(x, Replicate) else None

    def forward(input: DTensor) -> DTensor:
        bias = None if module.bias is None else _local(module.bias, None)
        local = module.multiply(_local(input, grad_placements), _local(module.weight, None), bias)
        return DTensor.from_local(local, input.device_mesh, [out], run_check=False)

    module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]  # torch's hooks pass a DTensor
    return module


def _local_feed_forward(block: FeedForward, x_BTD: Tensor, *, residual: Shard | Replicate) -> Tensor:
    """The whole block in 8 bits on local tensors, with the collective of its last matrix."""
    assert isinstance(x_BTD, DTensor)
    weights = [_local(linear.weight, None) for linear in (block.gate, block.up, block.down)]
    partial_BTD = block.multiply(_local(x_BTD, [Partial()]), *weights)
    whole_BTD = DTensor.from_local(partial_BTD, x_BTD.device_mesh, [Partial()], run_check=False)
    return whole_BTD.redistribute(placements=[residual], async_op=True).to_local()


def _local(tensor: Any, grad_placements: list[Partial] | None) -> Tensor:
    """This rank's part, after its collective has completed."""
    return _completed(tensor.to_local(grad_placements=grad_placements))


def _completed(part: Tensor) -> Tensor:
    return _Wait.apply(part) if isinstance(part, AsyncCollectiveTensor) else part


class _Wait(Function):
    """Waits for an asynchronous collective. Its own `wait` gives a tensor that autograd does not know.

    Gathers of one sequence are asynchronous; those of several are put in order, which waits.
    """

    @staticmethod
    def forward(ctx: Any, part: AsyncCollectiveTensor) -> Tensor:
        return part.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _OnLocalTensors(ParallelStyle):
    """A module with replicated weights that computes on plain tensors: this rank's tokens, or its heads.

    `sees_all`: every rank has the same input, and so the same gradient; else that of a weight is a sum over ranks.
    """

    def __init__(self, *, sees_all: bool) -> None:
        super().__init__()
        self.sees_all = sees_all

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, sharded(parameter, device_mesh, Replicate()))
        placement = Replicate() if self.sees_all else Partial()

        def plain(parameter: Tensor) -> Tensor:
            assert isinstance(parameter, DTensor)
            return parameter.to_local(grad_placements=[placement])

        if isinstance(module, TopKRouter | Norm):
            module.plain = plain
        else:
            assert type(module) is Linear
            assert module.bias is None
            module.forward = lambda input: module.multiply(input, plain(module.weight), None)  # pyright: ignore[reportAttributeAccessIssue]
        module.register_forward_pre_hook(lambda module, inputs: tuple(map(_completed, inputs)))
        return module


class _SinksOfHeads(ParallelStyle):
    """Sinks sharded like the heads that they belong to."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GroupedAttention)
        assert module.sinks is not None
        module.sinks = sharded(module.sinks, device_mesh, Shard(0))

        def own_sinks() -> Tensor:
            assert isinstance(module.sinks, DTensor)
            return module.sinks.to_local()

        module.own_sinks = own_sinks
        return module


class _Replicated(ParallelStyle):
    """A module with replicated weights; inputs and outputs are distributed tensors of any placement."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class _SharedByHeads(ParallelStyle):
    """An activation that all heads read: gathered on every rank; its gradient is the sum over the ranks' heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def local(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            return output.redistribute(device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_hook(local)
        return module


def _score_on_all_ranks(head: Head, *, mesh: DeviceMesh, residual: Shard | Replicate) -> None:
    """Give every rank the whole head of a reward model and all tokens: it computes the same scores and gradients."""
    head.weight = sharded(head.weight, mesh, Replicate())

    def forward(h_BTD: Tensor) -> Tensor:
        whole = DTensor.from_local(h_BTD, mesh, [residual], run_check=False).redistribute(mesh, [Replicate()])
        return linear(whole.to_local(), _local(head.weight, None))

    head.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def shard_vocabulary(head: Head, *, mesh: DeviceMesh, residual: Shard | Replicate) -> None:
    """Shard `head` by rows of its weight, in place; `residual` is the placement of its input.

    The loss and its gradients are those of `kernels.linear_cross_entropy`, whose ranks reduce the largest logit and the
    sum of exponentials. The gradient of the hidden states is partial on each rank, and reduced with the gather's
    backward.
    """
    head.weight = sharded(head.weight, mesh, Shard(0))

    def forward(h_BTD: Tensor, labels_BT: Tensor | None = None, weights_BT: Tensor | None = None) -> Tensor:
        whole = DTensor.from_local(h_BTD, mesh, [residual], run_check=False).redistribute(mesh, [Replicate()])
        whole_BTD = whole.to_local(grad_placements=[Partial()])
        assert isinstance(head.weight, DTensor)
        weight_VD = head.weight.to_local()
        if labels_BT is None:
            local_BTV = capped(linear(whole_BTD, weight_VD), head.cap)
            return DTensor.from_local(local_BTV, mesh, [Shard(2)], run_check=False).full_tensor()
        return head.loss(whole_BTD, weight_VD, labels_BT, weights_BT, group=mesh.get_group())

    head.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
