"""Low-rank adapters (Hu et al. 2021): a frozen matrix W plus a trained product of two narrow ones.

    y = x W^T + (alpha / r) dropout(x) A^T B^T        A [r, in], B [out, r]; B begins at zero

DoRA (Liu et al. 2024, equations 5 and 11) gives each row of the adapted matrix a trained length m, its magnitude. The
gradient takes the length that the row has without it as a constant:

    y = m / |W + (alpha / r) B A| (W + (alpha / r) B A) x        m begins as the lengths of the rows of W

PiSSA (Meng et al. 2024, section 3) and OLoRA (Büyükakyüz 2024, section 3) begin with a part of the matrix, A0 and B0,
and subtract this part from the base. The adapter then changes the model by s (B A - B0 A0):

    pissa   W = U S V^T:  B0 = U_r (S_r / s)^½   A0 = (S_r / s)^½ V_r^T     olora   W = Q R:  B0 = Q_r   A0 = R_r
    y = (W - s B0 A0) x + s B A x                                           s = alpha / r

An adapted matrix keeps its name and its place; `lora_a` and `lora_b` are added below it. The target `qkv` is one
adapter of query, key and value as one matrix: one A, one dropout, and a B of all outputs, held in three parts.
Embedding and head may be trained whole beside the adapters (PEFT's `modules_to_save`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.kernels.linear import linear
from meshwright.specs.model import QKV, SAVED_MODULES, AttentionKind, BaseFormat, Lora, Model
from meshwright.training.models.attention import GroupedAttention
from meshwright.training.models.quantized import QuantizedWeight
from meshwright.training.models.transformer import Transformer

GROUPED_TARGETS = {
    "query": ("attention.query",),
    "key": ("attention.key",),
    "value": ("attention.value",),
    QKV: ("attention.qkv",),
    "output": ("attention.output",),
    "gate": ("ffn.gate",),
    "up": ("ffn.up",),
    "down": ("ffn.down",),
}
"""Matrices of a layer that a target means; matrices that a layer lacks are skipped."""

LATENT_TARGETS = {target: places for target, places in GROUPED_TARGETS.items() if target != QKV} | {
    "query": ("attention.query", "attention.query_down", "attention.query_up"),
    "key": ("attention.kv_down", "attention.kv_up"),
    "value": ("attention.kv_down", "attention.kv_up"),
}
"""Matrices of targets in latent attention: keys and values share matrices, and no one matrix makes all three."""


def places_of(model: Model) -> dict[str, tuple[str, ...]]:
    """The matrices of a layer that each target means."""
    return LATENT_TARGETS if model.attention.kind is AttentionKind.MLA else GROUPED_TARGETS


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained, with `weight` and `bias` of the layer it replaces.

    In 8 or 4 bits it has `quantized` in place of its weight.
    """

    def __init__(self, base: nn.Linear, *, base_format: BaseFormat) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.quantized = None
        if base_format is not BaseFormat.FULL:
            del self.weight
            with base.weight.device:
                self.quantized = QuantizedWeight(base.out_features, base.in_features, kind=base_format)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the frozen weight."""
        if self.quantized is None:
            return linear(input, self.weight, self.bias)
        out = self.quantized(input)
        return out if self.bias is None else out + self.bias


class LoraLinear(FrozenLinear):
    """A frozen linear layer with an adapter, which can be switched off."""

    is_off = False
    initial_a: Tensor | None  # A and B at the beginning, where the base lost them
    initial_b: Tensor

    def __init__(self, base: nn.Linear, lora: Lora, *, dtype: torch.dtype) -> None:
        super().__init__(base, base_format=lora.base_format)
        device = base.weight.device
        self.scale = lora.alpha / lora.rank
        self.dropout = nn.Dropout(lora.dropout)
        self.lora_a = nn.Linear(base.in_features, lora.rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.Linear(lora.rank, base.out_features, bias=False, device=device, dtype=dtype)
        magnitude = torch.empty(base.out_features, device=device, dtype=dtype)
        self.lora_magnitude = nn.Parameter(magnitude) if lora.use_dora else None
        self.init = lora.init
        for name, matrix in (("initial_a", self.lora_a), ("initial_b", self.lora_b)):
            self.register_buffer(name, torch.empty_like(matrix.weight) if lora.moves_base else None)

    def update(self) -> Tensor:
        """Update that merging adds to the matrix as the files of the base have it, without DoRA; fp32."""
        change = self.lora_b.weight.float() @ self.lora_a.weight.float()
        if self.initial_a is not None:
            change -= self.initial_b.float() @ self.initial_a.float()
        return change * self.scale

    def forward(self, input: Tensor) -> Tensor:
        """Adapters multiply in their own dtype, which may be wider than the frozen weight's."""
        base = super().forward(input)
        if self.is_off:
            return base
        dropped = self.dropout(input)
        narrow = self.lora_a(dropped.to(self.lora_a.weight.dtype))
        update = (self.lora_b(narrow) * self.scale).to(base.dtype)
        if self.lora_magnitude is None:
            return base + update
        norms = row_norms(self.weight, self.lora_a.weight, self.lora_b.weight, scale=self.scale)
        plain = frozen_part(self, base, dropped, weight=self.weight, bias=self.bias)
        return base + resized(plain, update, self.lora_magnitude / norms)


def frozen_part(layer: LoraLinear, base: Tensor, dropped: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The frozen matrix times the input of the adapter: `base` without its bias, unless dropout drops anything."""
    if layer.training and layer.dropout.p:
        return linear(dropped, weight)
    return base if bias is None else base - bias


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Lengths of the rows of an adapted matrix, in fp32."""
    return torch.linalg.vector_norm(torch.addmm(weight.float(), b.float(), a.float(), alpha=scale), dim=1)


def resized(base: Tensor, update: Tensor, ratio: Tensor) -> Tensor:
    """Return the change that DoRA makes: `update`, with `base` and it resized by the `ratio` of lengths of rows."""
    ratio = ratio.to(base.dtype)
    return (ratio - 1) * base + ratio * update


@torch.no_grad()
def init_magnitudes(built: nn.Module) -> None:
    """Set the magnitudes of DoRA to the lengths of the rows of the weights as they are, whose adapters are zero."""
    for _, layer in adapted(built):
        if layer.lora_magnitude is not None:
            lengths = row_norms(layer.weight, layer.lora_a.weight, layer.lora_b.weight, scale=layer.scale)
            layer.lora_magnitude.copy_(lengths)


def beginning(weight: Tensor, init: str, *, rank: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of PiSSA or OLoRA for a matrix, fp32. Raises InputError where it has a lower rank.

    `seed` is for the random vectors that the iterations of `pissa_niter_N` start from.

    >>> a, b = beginning(torch.diag(torch.tensor([2.0, 3.0])), "pissa", rank=1, scale=2.0)
    >>> (2.0 * b @ a).round(decimals=4).tolist()
    [[0.0, 0.0], [0.0, 3.0]]
    """
    if rank > min(weight.shape):
        raise InputError(
            f"lora.init: {init} takes its adapters from a matrix", got=f"rank {rank}", allowed=min(weight.shape)
        )
    if init == "olora":
        q, r = torch.linalg.qr(weight.float())
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if iterations := init.removeprefix("pissa").removeprefix("_niter_"):
        with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            u, s, columns = torch.svd_lowrank(weight.float(), rank, niter=int(iterations))
        v = columns.T
    else:
        u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root


class QkvAdapter(nn.Module):
    """The adapter of query, key and value as one matrix [(H + G) K + G V, D]."""

    is_off = False

    def __init__(self, attention: GroupedAttention, lora: Lora, *, dtype: torch.dtype) -> None:
        super().__init__()
        parts = {name: attention.get_submodule(name) for name in ("query", "key", "value")}
        device, width = attention.query.weight.device, attention.query.in_features
        self.scale = lora.alpha / lora.rank
        self.dropout = nn.Dropout(lora.dropout)
        self.lora_a = nn.Linear(width, lora.rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.ModuleDict(
            {
                name: nn.Linear(lora.rank, part.out_features, bias=False, device=device, dtype=dtype)
                for name, part in parts.items()
                if isinstance(part, nn.Linear)
            }
        )

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return the updates of query, key and value."""
        narrow = self.lora_a(self.dropout(input).to(self.lora_a.weight.dtype))
        return tuple((part(narrow) * self.scale).to(input.dtype) for part in self.lora_b.values())

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each part and its update, which merging adds to the matrix, in fp32."""
        for name, part in self.lora_b.items():
            yield name, part.get_parameter("weight").float() @ self.lora_a.weight.float() * self.scale


def add_adapters(built: Transformer, lora: Lora, *, dtype: torch.dtype = torch.float32) -> None:
    """Freeze `built` and give the matrices that `lora` targets an adapter, in place.

    Call before sharding and `materialize`; then `init_weights` or `init_adapters` fills them. Raises
    InputError for a target that the model does not have. A quantised base quantises the other linear layers
    of the blocks too.
    """
    built.requires_grad_(False)
    table = places_of(built.model)
    for target in lora.targets:
        if target not in table:
            raise InputError("no such LoRA target", got=target, allowed=", ".join(table))
        if built.model.experts and table[target][0].startswith("ffn."):
            raise InputError(
                f"{built.model.name}: in a mixture of experts only attention is adapted",
                got=target,
                allowed=", ".join(t for t, where in table.items() if where[0].startswith("attention.")),
            )
    for index, layer in built.layers.items():
        attention = layer.get_submodule("attention")
        for target in lora.targets:
            own = lora.at(target, layer=int(index))
            if own is None:
                continue
            if target == QKV and isinstance(attention, GroupedAttention):
                attention.qkv = QkvAdapter(attention, own, dtype=dtype)
            for place in table[target]:
                if _has_linear(layer, place) and not isinstance(base := layer.get_submodule(place), LoraLinear):
                    assert isinstance(base, nn.Linear)
                    layer.set_submodule(place, LoraLinear(base, own, dtype=dtype))
        if lora.base_format is not BaseFormat.FULL:
            _freeze_others(layer, lora.base_format)
    for name in lora.modules_to_save:
        if (module := getattr(built, name)) is not None:
            module.to(dtype).requires_grad_(True)
    if built.model.tied_embeddings and lora.modules_to_save and built.head is not None:  # of its own in the last stage
        built.head.to(dtype).requires_grad_(True)
    built.tie()


def saved_modules(built: Transformer) -> dict[str, nn.Module]:
    """Embedding and head where they are trained beside adapters, by name."""
    if all(p.requires_grad for p in built.parameters()):
        return {}
    both = {name: module for name in SAVED_MODULES if isinstance(module := getattr(built, name), nn.Module)}
    return {name: module for name, module in both.items() if next(module.parameters()).requires_grad}


def _freeze_others(layer: nn.Module, base_format: BaseFormat) -> None:
    """Quantise the linear layers that have no adapter."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, FrozenLinear) and ".lora_" not in name:
            layer.set_submodule(name, FrozenLinear(module, base_format=base_format))


def _has_linear(layer: nn.Module, place: str) -> bool:
    try:
        return isinstance(layer.get_submodule(place), nn.Linear)
    except AttributeError:
        return False


def quantized_weights(built: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Matrices in 8 or 4 bits, by the names of the weights they stand for."""
    for name, module in built.named_modules():
        if isinstance(module, FrozenLinear) and module.quantized is not None:
            yield f"{name}.weight", module.quantized


@torch.no_grad()
def dequantise(built: nn.Module, *, dtype: torch.dtype) -> None:
    """Give every quantised matrix of `built` the weight that its codes stand for, in their place."""
    for module in built.modules():
        if isinstance(module, FrozenLinear) and module.quantized is not None:
            weight, module.quantized = module.quantized.whole(dtype), None
            module.weight = nn.Parameter(weight, requires_grad=False)


def adapted(built: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Adapted layers by name, in the order of the model."""
    for name, module in built.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def adapters_of(built: nn.Module) -> Iterator[LoraLinear | QkvAdapter]:
    """All adapters."""
    yield from (module for module in built.modules() if isinstance(module, LoraLinear | QkvAdapter))


def adapter_matrices(built: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Linear]]:
    """A and B of all adapters, by name. `prefix` is the name of `built`."""
    for name, module in built.named_modules(prefix=prefix):
        if ".lora_" in name and isinstance(module, nn.Linear):
            yield name, module


@torch.no_grad()
def merge_adapters(built: Transformer) -> None:
    """Add every adapter to its matrix, in fp32, and remove it. Not for sharded models."""
    for name, layer in list(adapted(built)):
        assert layer.quantized is None, "call dequantise, or load the weights as they were before they were rounded"
        update = layer.update()
        if layer.lora_magnitude is not None:
            norms = row_norms(layer.weight, layer.lora_a.weight, layer.lora_b.weight, scale=layer.scale)
            ratio = (layer.lora_magnitude / norms)[:, None]
            update = ratio * update + (ratio - 1) * layer.weight.float()
        layer.weight.copy_(layer.weight.float() + update)
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        built.set_submodule(name, plain)
    for layer in built.layers.values():
        attention = layer.get_submodule("attention")
        if isinstance(attention, GroupedAttention) and isinstance(adapter := attention.qkv, QkvAdapter):
            for name, update in adapter.updates():
                base = attention.get_parameter(f"{name}.weight")
                base.copy_(base.float() + update)
            attention.qkv = None
    for module in saved_modules(built).values():
        module.to(built.get_parameter("norm.weight").dtype)
    built.tie()
