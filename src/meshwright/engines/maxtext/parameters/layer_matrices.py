"""The matrices of one layer: each one's place in MaxText, its name in a Hugging Face file, and its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.engines.maxtext.config.models import is_gpt_oss, is_interleaved, is_latent, is_routed_as_v3
from meshwright.specs.model import Model

STD = 0.02
"""Of first weights; of those that write to the residual stream STD / sqrt(2 L). As in the native engine."""

GATED = ("gate_proj", "up_proj", "down_proj")
"""A feed-forward block's matrices in most files."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One matrix of a layer; `weights.Leaf` says what the fields mean."""

    place: str
    name: str  # behind `model.layers.{layer}.`; {expert} stands for a number
    shape: tuple[int, ...]
    transpose: bool = True
    num_inputs: int = 1
    interleave: bool = False
    std: float | None = STD
    per_expert: bool = False
    is_state: bool = False
    is_flat: bool = False
    column: int | None = None


def parts_of(model: Model, *, has_experts: bool) -> Iterator[Part]:
    """All of a layer of `model`, one that has experts or a dense one."""
    h = model.hidden
    yield _norm("pre_self_attention_layer_norm", "input_layernorm", h)
    yield from _latent(model) if is_latent(model) else _grouped(model)
    yield _norm("post_self_attention_layer_norm", "post_attention_layernorm", h)
    if is_gpt_oss(model):
        yield from _fused_experts(model)
    elif has_experts:
        yield from _experts(model)
    else:
        yield from _gated(model, width=model.ffn_hidden, place="mlp/{}/kernel", name="mlp.{}.weight")


def _norm(place: str, name: str, width: int, *, interleave: bool = False) -> Part:
    return Part(
        place=f"{place}/scale", name=f"{name}.weight", shape=(width,), transpose=False, interleave=interleave,
        std=None,
    )  # fmt: skip


def _bias(place: str, name: str, *shape: int, column: int | None = None, is_flat: bool = False) -> Part:
    return Part(place=place, name=name, shape=shape, transpose=False, std=0.0, column=column, is_flat=is_flat)


def _grouped(model: Model) -> Iterator[Part]:
    a, h = model.attention, model.hidden
    home = "GptOssAttention" if is_gpt_oss(model) else "self_attention"
    turned = is_interleaved(model)
    for place, name, heads in (
        ("query", "q_proj", a.num_heads),
        ("key", "k_proj", a.num_kv_heads),
        ("value", "v_proj", a.num_kv_heads),
    ):
        yield Part(
            place=f"{home}/{place}/kernel", name=f"self_attn.{name}.weight", shape=(h, heads, a.head_dim),
            interleave=turned and place != "value",
        )  # fmt: skip
        if a.bias:
            yield _bias(f"{home}/{place}/bias", f"self_attn.{name}.bias", heads, a.head_dim, is_flat=True)
    if a.qk_norm:
        yield _norm(f"{home}/query_norm", "self_attn.q_norm", a.head_dim, interleave=turned)
        yield _norm(f"{home}/key_norm", "self_attn.k_norm", a.head_dim, interleave=turned)
    yield _attention_output(model, home)
    if a.bias:
        yield _bias(f"{home}/out/bias", "self_attn.o_proj.bias", h)
    if is_gpt_oss(model):
        yield Part(place=f"{home}/sinks", name="self_attn.sinks", shape=(a.num_heads,), transpose=False)


def _latent(model: Model) -> Iterator[Part]:
    a, h = model.attention, model.hidden
    queries, latents = a.query_lora_rank, a.kv_lora_rank
    matrices = [
        ("wkv_a", "kv_a_proj_with_mqa", (h, latents + a.rope_head_dim)),
        ("wkv_b", "kv_b_proj", (latents, a.num_heads, a.head_dim - a.rope_head_dim + a.v_dim)),
    ]
    if queries:
        yield _norm("self_attention/q_norm", "self_attn.q_a_layernorm", queries)
        matrices += [
            ("wq_a", "q_a_proj", (h, queries)),
            ("wq_b", "q_b_proj", (queries, a.num_heads, a.head_dim)),
        ]
    else:
        matrices.append(("query", "q_proj", (h, a.num_heads, a.head_dim)))
    yield _norm("self_attention/kv_norm", "self_attn.kv_a_layernorm", latents)
    for place, name, shape in matrices:
        yield Part(place=f"self_attention/{place}/kernel", name=f"self_attn.{name}.weight", shape=shape)
    yield _attention_output(model, "self_attention")


def _attention_output(model: Model, home: str) -> Part:
    a = model.attention
    return Part(
        place=f"{home}/out/kernel", name="self_attn.o_proj.weight", shape=(a.num_heads, a.v_dim, model.hidden),
        num_inputs=2, std=_residual_std(model),
    )  # fmt: skip


def _experts(model: Model) -> Iterator[Part]:
    x = model.experts
    assert x is not None
    block = "DeepSeekMoeBlock_0/MoeBlock_0" if is_latent(model) else "moe_block"
    is_mixtral = model.family == "MixtralForCausalLM" or not (
        model.family or model.attention.qk_norm or is_latent(model)
    )
    theirs = "block_sparse_moe" if is_mixtral else "mlp"
    router = f"{theirs}.gate"
    yield Part(place=f"{block}/gate/kernel", name=f"{router}.weight", shape=(model.hidden, x.num_experts))
    if is_routed_as_v3(model):
        yield Part(
            place=f"{block}/gate/bias", name=f"{router}.e_score_correction_bias", shape=(x.num_experts,),
            transpose=False, std=0.0, is_state=True,
        )  # fmt: skip
    yield from _gated(
        model, width=x.ffn_hidden, place=f"{block}/{{}}", name=f"{theirs}.experts.{{{{expert}}}}.{{}}.weight",
        names=("w1", "w3", "w2") if is_mixtral else GATED, per_expert=True,
    )  # fmt: skip
    if x.shared_hidden:
        place = "DeepSeekMoeBlock_0/shared_experts/{}/kernel"
        yield from _gated(model, width=x.shared_hidden, place=place, name="mlp.shared_experts.{}.weight")


def _gated(
    model: Model,
    *,
    width: int,
    place: str,
    name: str,
    names: tuple[str, str, str] = GATED,
    per_expert: bool = False,
) -> Iterator[Part]:
    """The three matrices of a feed-forward block; `{}` in `place` and `name` stands for one of them."""
    gate, up, down = names
    h = model.hidden
    for mine, theirs, shape, std in (
        ("wi_0", gate, (h, width), STD),
        ("wi_1", up, (h, width), STD),
        ("wo", down, (width, h), _residual_std(model)),
    ):
        yield Part(
            place=place.format(mine), name=name.format(theirs), shape=shape, std=std, per_expert=per_expert
        )


def _fused_experts(model: Model) -> Iterator[Part]:
    """Experts of gpt-oss: a file has those of a layer in one tensor, columns of gate and up next to each other."""
    x, h, home = model.experts, model.hidden, "GptOssMlp"
    assert x is not None
    e, f = x.num_experts, x.ffn_hidden
    yield Part(place=f"{home}/gate/kernel", name="mlp.router.weight", shape=(h, e))
    yield _bias(f"{home}/gate/bias", "mlp.router.bias", e)
    for mine, theirs, shape, column, std in (
        ("wi_0", "gate_up_proj", (e, h, f), 0, STD),
        ("wi_1", "gate_up_proj", (e, h, f), 1, STD),
        ("wo", "down_proj", (e, f, h), None, _residual_std(model)),
    ):
        yield Part(
            place=f"{home}/{mine}", name=f"mlp.experts.{theirs}", shape=shape, transpose=False, column=column,
            std=std,
        )  # fmt: skip
        yield _bias(f"{home}/{mine}_bias", f"mlp.experts.{theirs}_bias", e, shape[2], column=column)


def _residual_std(model: Model) -> float:
    return STD / math.sqrt(2 * model.num_layers)
