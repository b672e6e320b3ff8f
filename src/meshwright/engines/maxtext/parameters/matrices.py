"""The matrices of one layer: path in MaxText, name in a Hugging Face file, and shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.engines.maxtext.config.models import is_gpt_oss, is_interleaved, is_latent, is_routed_as_v3
from meshwright.specs.model import Model

STD = 0.02
"""Of the initialization; STD / sqrt(2 L) for matrices that write to the residual stream. As in the native engine."""

GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of a feed-forward block's matrices in most files."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of MaxText's parameters, or a matrix of one layer, which `leaves` stacks."""

    path: str  # keys, joined by slashes; of a matrix below the layer
    name: str  # in the file; {layer} and {expert} are replaced by numbers. Of a matrix after `model.layers.{layer}.`
    layers: tuple[int, ...] = ()  # in the order of the grid; (): outside the layers
    num_experts: int = 0  # 0: the matrix is not an expert's
    experts_first: bool = False  # the grid's rows are experts, not layers
    grid: tuple[int, ...] = ()  # number of tensors along each of `axes`; (): one tensor
    axes: tuple[int, ...] = ()
    shape: tuple[int, ...]  # of one tensor, transposed
    transpose: bool = True
    num_inputs: int = 1  # axes of `shape` that are one axis of the matrix, its inputs
    interleave: bool = False  # rows of each head: the two halves become adjacent pairs
    std: float | None = STD  # of the initialization; None: ones
    is_adapter: bool = False  # its tensors are in a file of adapters
    is_state: bool = False  # without gradient: separate from the weights, and always fp32
    is_flat: bool = False  # all axes of `shape` are one axis in the file
    column: int | None = None  # 0, 1: every second column of the file's tensor; the others are another leaf


def layer_matrices(model: Model, *, has_experts: bool) -> Iterator[Leaf]:
    """Yield all matrices of a layer of `model`, dense or with experts."""
    h = model.hidden
    yield _norm("pre_self_attention_layer_norm", "input_layernorm", h)
    yield from _latent(model) if is_latent(model) else _grouped(model)
    yield _norm("post_self_attention_layer_norm", "post_attention_layernorm", h)
    if is_gpt_oss(model):
        yield from _fused_experts(model)
    elif has_experts:
        yield from _experts(model)
    else:
        yield from _gated(model, width=model.ffn_hidden, path="mlp/{}/kernel", name="mlp.{}.weight")


def _norm(path: str, name: str, width: int, *, interleave: bool = False) -> Leaf:
    return Leaf(
        path=f"{path}/scale", name=f"{name}.weight", shape=(width,), transpose=False, interleave=interleave,
        std=None,
    )  # fmt: skip


def _bias(path: str, name: str, *shape: int, column: int | None = None, is_flat: bool = False) -> Leaf:
    return Leaf(path=path, name=name, shape=shape, transpose=False, std=0.0, column=column, is_flat=is_flat)


def _grouped(model: Model) -> Iterator[Leaf]:
    a, h = model.attention, model.hidden
    home = "GptOssAttention" if is_gpt_oss(model) else "self_attention"
    interleaves = is_interleaved(model)
    for path, name, heads in (
        ("query", "q_proj", a.num_heads),
        ("key", "k_proj", a.num_kv_heads),
        ("value", "v_proj", a.num_kv_heads),
    ):
        yield Leaf(
            path=f"{home}/{path}/kernel", name=f"self_attn.{name}.weight", shape=(h, heads, a.head_dim),
            interleave=interleaves and path != "value",
        )  # fmt: skip
        if a.bias:
            yield _bias(f"{home}/{path}/bias", f"self_attn.{name}.bias", heads, a.head_dim, is_flat=True)
    if a.qk_norm:
        yield _norm(f"{home}/query_norm", "self_attn.q_norm", a.head_dim, interleave=interleaves)
        yield _norm(f"{home}/key_norm", "self_attn.k_norm", a.head_dim, interleave=interleaves)
    yield _attention_output(model, home)
    if a.bias:
        yield _bias(f"{home}/out/bias", "self_attn.o_proj.bias", h)
    if is_gpt_oss(model):
        yield Leaf(path=f"{home}/sinks", name="self_attn.sinks", shape=(a.num_heads,), transpose=False)


def _latent(model: Model) -> Iterator[Leaf]:
    a, h = model.attention, model.hidden
    queries, latents = a.query_lora_rank, a.kv_lora_rank
    matrices = [
        ("wkv_a", "kv_a_proj_with_mqa", (h, latents + a.rope_head_dim)),
        ("wkv_b", "kv_b_proj", (latents, a.num_heads, a.head_dim - a.rope_head_dim + a.v_dim)),
    ]
    if queries:
        yield _norm("self_attention/q_norm", "self_attn.q_a_layernorm", queries)
        matrices += [("wq_a", "q_a_proj", (h, queries)), ("wq_b", "q_b_proj", (queries, a.num_heads, a.head_dim))]
    else:
        matrices.append(("query", "q_proj", (h, a.num_heads, a.head_dim)))
    yield _norm("self_attention/kv_norm", "self_attn.kv_a_layernorm", latents)
    for path, name, shape in matrices:
        yield Leaf(path=f"self_attention/{path}/kernel", name=f"self_attn.{name}.weight", shape=shape)
    yield _attention_output(model, "self_attention")


def _attention_output(model: Model, home: str) -> Leaf:
    a = model.attention
    return Leaf(
        path=f"{home}/out/kernel", name="self_attn.o_proj.weight", shape=(a.num_heads, a.v_dim, model.hidden),
        num_inputs=2, std=_residual_std(model),
    )  # fmt: skip


def _experts(model: Model) -> Iterator[Leaf]:
    x = model.experts
    assert x is not None
    block = "DeepSeekMoeBlock_0/MoeBlock_0" if is_latent(model) else "moe_block"
    is_mixtral = model.family == "MixtralForCausalLM" or not (
        model.family or model.attention.qk_norm or is_latent(model)
    )
    theirs = "block_sparse_moe" if is_mixtral else "mlp"
    router = f"{theirs}.gate"
    yield Leaf(path=f"{block}/gate/kernel", name=f"{router}.weight", shape=(model.hidden, x.num_experts))
    if is_routed_as_v3(model):
        yield Leaf(
            path=f"{block}/gate/bias", name=f"{router}.e_score_correction_bias", shape=(x.num_experts,),
            transpose=False, std=0.0, is_state=True,
        )  # fmt: skip
    yield from _gated(
        model, width=x.ffn_hidden, path=f"{block}/{{}}", name=f"{theirs}.experts.{{{{expert}}}}.{{}}.weight",
        names=("w1", "w3", "w2") if is_mixtral else GATED, num_experts=x.num_experts,
    )  # fmt: skip
    if x.shared_hidden:
        path = "DeepSeekMoeBlock_0/shared_experts/{}/kernel"
        yield from _gated(model, width=x.shared_hidden, path=path, name="mlp.shared_experts.{}.weight")


def _gated(
    model: Model, *, width: int, path: str, name: str, names: tuple[str, str, str] = GATED, num_experts: int = 0
) -> Iterator[Leaf]:
    """Yield the three matrices of a feed-forward block; `{}` in `path` and `name` is replaced for each."""
    gate, up, down = names
    h = model.hidden
    for mine, theirs, shape, std in (
        ("wi_0", gate, (h, width), STD),
        ("wi_1", up, (h, width), STD),
        ("wo", down, (width, h), _residual_std(model)),
    ):
        yield Leaf(path=path.format(mine), name=name.format(theirs), shape=shape, std=std, num_experts=num_experts)


def _fused_experts(model: Model) -> Iterator[Leaf]:
    """Yield the experts of gpt-oss: one tensor per layer in a file, with alternating columns of gate and up."""
    x, h, home = model.experts, model.hidden, "GptOssMlp"
    assert x is not None
    e, f = x.num_experts, x.ffn_hidden
    yield Leaf(path=f"{home}/gate/kernel", name="mlp.router.weight", shape=(h, e))
    yield _bias(f"{home}/gate/bias", "mlp.router.bias", e)
    for mine, theirs, shape, column, std in (
        ("wi_0", "gate_up_proj", (e, h, f), 0, STD),
        ("wi_1", "gate_up_proj", (e, h, f), 1, STD),
        ("wo", "down_proj", (e, f, h), None, _residual_std(model)),
    ):
        yield Leaf(
            path=f"{home}/{mine}", name=f"mlp.experts.{theirs}", shape=shape, transpose=False, column=column,
            std=std,
        )  # fmt: skip
        yield _bias(f"{home}/{mine}_bias", f"mlp.experts.{theirs}_bias", e, shape[2], column=column)


def _residual_std(model: Model) -> float:
    return STD / math.sqrt(2 * model.num_layers)
