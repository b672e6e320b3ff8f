"""Matrices that low-rank adapters stand beside, by the targets of `specs.model.Lora`, and their base's bytes.

Linear attention, state space, routed and shared experts have no adapters. Latent attention has two matrices for
queries, where they are of low rank, and two that keys and values share. The output of a gated attention is gated by
a part of the query's matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.specs.model import NF4_BLOCK, QKV, SCALE_BLOCK, AttentionKind, BaseFormat, BlockKind, Lora, Model

Widths = dict[str, tuple[tuple[int, int], ...]]
"""(inputs, outputs) of the matrices that each target names."""


@dataclass(frozen=True, kw_only=True)
class AdaptedMatrix:
    """A matrix with an adapter, in some of the layers."""

    target: str
    inputs: int
    outputs: int
    share: float  # of the layers
    by_inputs: bool  # tensor ranks split its inputs; otherwise its outputs


def adapted_matrices(model: Model, targets: Collection[str]) -> tuple[AdaptedMatrix, ...]:
    """All matrices of a mean layer that `targets` name, each once."""
    shared = model.attention.kind is AttentionKind.MLA and "key" in targets
    named = [target for target in targets if not (shared and target == "value")]
    return tuple(matrix for target in named for matrix in _matrices(model, target))


def sizes_of_adapters(model: Model, lora: Lora) -> tuple[Sequence[AdaptedMatrix], float]:
    """The adapted matrices of a mean layer, and the mean of their ranks by which their parameters are counted."""
    matrices = adapted_matrices(model, lora.targets)
    if not (lora.ranks or lora.layers):
        return matrices, lora.rank
    layers = range(model.num_layers)
    ranks = {t: [own.rank for i in layers if (own := lora.at(t, layer=i))] for t in lora.targets}
    chosen = [replace(m, share=m.share * len(ranks[m.target]) / model.num_layers) for m in matrices]
    widths = [(m.share * (m.inputs + m.outputs), ranks[m.target]) for m in chosen if m.share]
    total = sum(width * sum(of) / len(of) for width, of in widths)
    return chosen, total / sum(width for width, _ in widths) if widths else lora.rank


@dataclass(frozen=True, kw_only=True)
class QuantisedBase:
    """A layer's frozen matrices in 8 or 4 bits; 0 where they are as the run's precision has them."""

    bytes_per_weight: float = 0.0  # scales included
    largest_matrix: int = 0  # weights of the matrix that has most
    num_matrices: float = 0.0  # of a mean layer, without routed experts


TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


def quantised_base(model: Model, base_format: BaseFormat) -> QuantisedBase:
    """Return the size of the frozen matrices of `model`.

    A scale takes four bytes, and of double quantisation one, and four for 256 of them. In 8 bits a matrix has a scale
    for each output: the mean is over the matrices that adapters are known for, and over routed experts. Sources:
    Dettmers et al. 2022 (LLM.int8()), section 2; Dettmers et al. 2023 (QLoRA), section 3.
    """
    if base_format is BaseFormat.FULL:
        return QuantisedBase()
    matrices = adapted_matrices(model, TARGETS)
    shapes = [(m.share, m.inputs, m.outputs) for m in matrices] + list(_expert_shapes(model))
    num_bytes = {BaseFormat.NF4: 0.5 + 4 / NF4_BLOCK, BaseFormat.NF4_DOUBLE: 0.5 + (1 + 4 / SCALE_BLOCK) / NF4_BLOCK}
    if base_format is BaseFormat.INT8:
        rows = sum(share * outputs for share, _, outputs in shapes)
        num_bytes[base_format] = 1 + 4 * rows / sum(share * inputs * outputs for share, inputs, outputs in shapes)
    return QuantisedBase(
        bytes_per_weight=num_bytes[base_format],
        largest_matrix=max(inputs * outputs for _, inputs, outputs in shapes),
        num_matrices=sum(m.share for m in matrices),
    )


def _expert_shapes(model: Model) -> Iterator[tuple[float, int, int]]:
    """(matrices of a mean layer, inputs, outputs) of routed experts."""
    x = model.experts
    if x is None:
        return
    count = x.num_experts * model.num_moe_layers / model.num_layers
    width = x.latent or model.hidden
    yield count * (2 if model.gated_ffn else 1), width, x.ffn_hidden
    yield count, x.ffn_hidden, width


def absent_targets(model: Model, targets: Collection[str]) -> tuple[str, ...]:
    """The targets that name no matrix of `model`, or none that adapters are known for."""
    return tuple(target for target in targets if not list(_matrices(model, target)))


def _matrices(model: Model, target: str) -> Iterator[AdaptedMatrix]:
    for share, widths in _blocks(model):
        for inputs, outputs in widths.get(target, ()):
            if share and inputs and outputs:
                by_inputs = target in ("output", "down")
                yield AdaptedMatrix(target=target, inputs=inputs, outputs=outputs, share=share, by_inputs=by_inputs)


def _blocks(model: Model) -> Iterator[tuple[float, Widths]]:
    """Share of the layers and widths by target of each kind of block that adapters are known for."""
    dense = model.num_dense_layers / model.num_layers
    if model.layer_pattern:
        dense = model.share_of(BlockKind.FEED_FORWARD)
    h, f = model.hidden, model.ffn_hidden
    yield dense, {"gate": ((h, f),) if model.gated_ffn else (), "up": ((h, f),), "down": ((f, h),)}
    attention, full = model.share_of(BlockKind.ATTENTION) - model.linear_share, model.attention.full_layers
    if full is None:
        yield attention, _attention_widths(model)
        return
    windowed = model.num_windowed_layers / model.num_layers
    yield windowed, _attention_widths(model)
    other = replace(model.attention, head_dim=full.head_dim, num_kv_heads=full.num_kv_heads)
    widths = _attention_widths(replace(model, attention=other))
    yield 1 - windowed, widths | ({"value": (), QKV: ()} if full.shares_values else {})


def _attention_widths(model: Model) -> Widths:
    """(inputs, outputs) of the matrices of attention; none of compressed attention, where no program has adapters."""
    a, h = model.attention, model.hidden
    q, k, v = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.v_dim
    output = ((a.num_heads * a.v_dim, h),)
    if a.kind is AttentionKind.SHARED:
        return dict.fromkeys(("query", "key", "value", QKV, "output"), ())
    if a.kind is AttentionKind.GQA:
        q *= 1 + a.output_gate
        return {"query": ((h, q),), "key": ((h, k),), "value": ((h, v),), QKV: ((h, q + k + v),), "output": output}
    rank, expanded = a.kv_lora_rank, a.num_heads * (a.head_dim - a.rope_head_dim + a.v_dim)
    latent = ((h, rank + a.rope_head_dim), (rank, expanded))
    query = ((h, a.query_lora_rank), (a.query_lora_rank, q)) if a.query_lora_rank else ((h, q),)
    return {"query": query, "key": latent, "value": latent, QKV: (), "output": output}
