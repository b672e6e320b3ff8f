"""Models as torchtitan's configuration trees, with any shape that its classes support.

    family        Hugging Face's name          torchtitan's models
    llama3        LlamaForCausalLM             grouped attention, rotary pairs as complex numbers
    qwen3         Qwen3(Moe)ForCausalLM        ... with normalised queries and keys; experts with softmax scores
    deepseek_v3   DeepseekV3ForCausalLM        latent attention, sigmoid scores, shared experts
    gpt_oss       GptOssForCausalLM            attention sinks, a sliding window in every other layer

Weight initialization has the distributions of the native engine: normal with a standard deviation of 0.02, or of
0.02 / sqrt(2 L) for matrices that write to the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.catalog.stacks import switches_of
from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.torchtitan.config_module.python_source import Call, Name, call
from meshwright.files import record_of, toml_table
from meshwright.specs import model_parts
from meshwright.specs.features import Dispatcher
from meshwright.specs.model import AttentionKind, Experts, Lora, Model, RopeScaling, Router
from meshwright.specs.run import Run

STD = 0.02
MATRIX, RESIDUAL, NORM = Name("MATRIX"), Name("RESIDUAL"), Name("NORM")
GPT_OSS = "GptOssForCausalLM"


@dataclass(frozen=True, kw_only=True)
class TorchtitanFamily:
    """Torchtitan's name of a model family, and the names of its classes and functions."""

    name: str
    prefix: str  # of its classes
    parallelize: str
    architecture: str  # Hugging Face's name; of Qwen3 with experts it is another one
    rope: str  # ComplexRoPE rotates adjacent pairs, CosSinRoPE pairs of the two halves
    scaling: RopeScaling | None = None  # of RoPE, besides none
    has_experts_hook: bool = True


_TABLES = toml_table(Path(__file__).with_suffix(".toml"))
_FAMILIES = {name: record_of(TorchtitanFamily, row, name=name) for name, row in _TABLES["families"].items()}
ARCHITECTURES = {f.name: f.architecture for f in _FAMILIES.values()}
"""Hugging Face's names of torchtitan's families."""

SCALINGS = {RopeScaling(scaling): (row["name"], row["fields"]) for scaling, row in _TABLES["scalings"].items()}
"""Torchtitan's names of the scalings of RoPE, and its fields with those of `Rope`."""

HOMES = {name: module for module, names in _TABLES["homes"].items() for name in names} | {
    name: f"torchtitan.models.{f.name}.{module}"
    for f in _FAMILIES.values()
    for name, module in (
        (f"{f.prefix}Model", "model"),
        (f"{f.prefix}TransformerBlock", "model"),
        (f.parallelize, "parallelize"),
        (f"{f.prefix}StateDictAdapter", "state_dict_adapter"),
    )
}
"""Modules from which a configuration module imports its names."""


def family_of(model: Model) -> TorchtitanFamily | None:
    """Return torchtitan's family that supports `model`; None: there is none."""
    a, x = model.attention, model.experts
    if model.norm_bias or not model.gated_ffn or model.learned_positions:
        return None
    if model.family == GPT_OSS:
        return _FAMILIES["gpt_oss"] if x is not None and x.router is Router.SOFTMAX else None
    if a.bias or model.num_windowed_layers:
        return None
    if a.kind is AttentionKind.MLA:
        return _FAMILIES["deepseek_v3"] if x is not None and x.num_shared else None
    if a.qk_norm:
        softmax = x is None or (
            x.router is Router.SOFTMAX and not (x.num_groups or x.num_dense_layers or x.shared_hidden)
        )
        return _FAMILIES["qwen3"] if softmax else None
    return _FAMILIES["llama3"] if x is None else None


def check_model(model: Model) -> Iterator[Unsupported]:
    """Reasons for which torchtitan does not support `model`."""
    is_gpt_oss = model.family == GPT_OSS
    yield from refusals.model_parts(model, has=model_parts.GPT_OSS if is_gpt_oss else {}, reads_fused=is_gpt_oss)
    family = family_of(model)
    if family is None:
        yield Unsupported(
            key="model",
            reason=f"torchtitan 0.3.0 has no model with the shapes of {model.name}",
            hint=f"it has the families {', '.join(_FAMILIES)}",
        )
        return
    yield from refusals.predictions(model)
    if model.tied_embeddings and family.name not in ("llama3", "qwen3"):
        yield Unsupported(key="model", reason=f"{family.name} of torchtitan 0.3.0 has no tied embeddings")
    rope = model.rope
    supported = (RopeScaling.NONE, *([family.scaling] if family.scaling else []))
    if rope.scaling not in supported:
        names = ", ".join(s.value for s in supported)
        yield Unsupported(key="model", reason=f"RoPE scaling of {family.name} must be one of: {names}")
    if family.name == "deepseek_v3" and rope.scaling is RopeScaling.YARN and rope.mscale != rope.mscale_all_dims:
        yield Unsupported(
            key="model", reason="rope.mscale and rope.mscale_all_dims differ: torchtitan scales only scores"
        )


def model_spec(run: Run) -> tuple[dict[str, Any], Call]:
    """Return functions of the module (name -> tree of the result, of layers by `index`) and the ModelSpec."""
    model = run.model
    family = family_of(model)
    assert family is not None  # `check` refuses a run without
    layers, functions = _layers(run, family)
    tied = {"enable_weight_tying": True} if model.tied_embeddings else {}
    embedding = {"weight": Name("skip_param_init")} if model.tied_embeddings else MATRIX
    tree = call(
        f"{family.prefix}Model.Config",
        dim=model.hidden,
        vocab_size=model.vocab,
        **tied,
        tok_embeddings=call(
            "Embedding.Config", num_embeddings=model.vocab, embedding_dim=model.hidden, param_init=embedding
        ),
        norm=_norm(model, model.hidden),
        lm_head=_linear(model.hidden, model.vocab, MATRIX),
        layers=layers,
    )
    spec = call(
        "ModelSpec",
        name=family.name,
        flavor=model.name,
        model=_converted(tree, run),
        parallelize_fn=Name(family.parallelize),
        pipelining_fn=Name("pipeline_llm"),
        post_optimizer_build_fn=Name("register_moe_load_balancing_hook") if family.has_experts_hook else None,
        state_dict_adapter=Name(f"{family.prefix}StateDictAdapter"),
    )
    return functions, spec


def _converted(tree: Call, run: Run) -> Call:
    """Return `tree` with fp8 linear layers or adapters if the run has them."""
    if run.precision.name == "fp8_rowwise":
        converter = call(
            "Float8LinearConverter.Config",
            recipe_name="rowwise",
            filter_fqns=["lm_head", "router.gate"],
            model_compile_enabled=bool(switches_of(run).compiles),
        )
        tree = call("convert", converter, tree)
    if run.lora is not None:
        converter = call(
            "LoRAConverter.Config",
            rank=run.lora.rank,
            alpha=float(run.lora.alpha),
            target_modules=list(lora_targets(run.lora)),
        )
        tree = call("convert", converter, tree)
    return tree


LORA_TARGETS = {"query": "wq", "key": "wkv", "value": "wkv", "output": "wo", "gate": "w1", "up": "w3", "down": "w2"}
"""Torchtitan's names of the modules with adapters by target; keys and values are one setting."""


def lora_targets(lora: Lora) -> tuple[str, ...]:
    """Return the names of the modules with adapters, without repetitions."""
    return tuple(dict.fromkeys(LORA_TARGETS[target] for target in lora.targets))


def _layers(run: Run, family: TorchtitanFamily) -> tuple[Any, dict[str, Any]]:
    """Return the list of layers and the functions that it calls."""
    model, x = run.model, run.model.experts
    dense, num_layers = model.num_dense_layers, model.num_layers
    if family.name == "gpt_oss":
        return Name(f"[layer(index) for index in range({num_layers})]"), {"layer": _gpt_oss_layer(run)}
    functions = {}
    if dense:
        functions["dense_layer" if x else "layer"] = _layer(run, family, is_dense=True)
    if x is not None:
        functions["moe_layer" if dense else "layer"] = _layer(run, family, is_dense=False)
    if dense and x is not None:
        return Name(
            f"[dense_layer(index) if index < {dense} else moe_layer(index) for index in range({num_layers})]"
        ), functions
    return Name(f"[layer(index) for index in range({num_layers})]"), functions


def _layer(run: Run, family: TorchtitanFamily, *, is_dense: bool) -> Call:
    model = run.model
    latent = model.attention.kind is AttentionKind.MLA
    body = {"feed_forward": _feed_forward(model, model.ffn_hidden)} if is_dense else {"moe": _moe(run)}
    return call(
        f"{family.prefix}TransformerBlock.Config",
        attention_norm=_norm(model, model.hidden),
        ffn_norm=_norm(model, model.hidden),
        attention=_latent_attention(run, family) if latent else _grouped_attention(run, family),
        **body,
    )


def _linear(inputs: int, outputs: int, init: Any, *, kind: str = "Linear", bias: bool = False) -> Call:
    extra = {"bias": True} if bias else {}
    return call(f"{kind}.Config", in_features=inputs, out_features=outputs, **extra, param_init=init)


def _norm(model: Model, width: int) -> Call:
    return call("RMSNorm.Config", normalized_shape=width, eps=model.norm_epsilon, param_init=NORM)


def _feed_forward(model: Model, width: int) -> Call:
    return call(
        "FeedForward.Config",
        w1=_linear(model.hidden, width, MATRIX),
        w2=_linear(width, model.hidden, RESIDUAL),
        w3=_linear(model.hidden, width, MATRIX),
    )


def _rope(run: Run, family: TorchtitanFamily, width: int) -> Call:
    rope, scaled = run.model.rope, {}
    if rope.scaling in SCALINGS:
        kind, fields = SCALINGS[rope.scaling]
        scaled = {"scaling": kind, **{theirs: getattr(rope, ours) for theirs, ours in fields.items()}}
    return call(f"{family.rope}.Config", dim=width, max_seq_len=run.sequence_length, theta=rope.theta, **scaled)


def _qkv(run: Run, *, bias: bool = False) -> Call:
    """One GEMM for queries, keys and values; adapters need separate ones."""
    model, a = run.model, run.model.attention
    queries, others = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    if run.lora is not None:
        return call(
            "QKVLinear.Config",
            head_dim=a.head_dim,
            wq=_linear(model.hidden, queries, MATRIX, bias=bias),
            wkv=_linear(model.hidden, others, MATRIX, bias=bias),
        )
    return call(
        "FusedQKVLinear.Config",
        head_dim=a.head_dim,
        n_heads=a.num_heads,
        n_kv_heads=a.num_kv_heads,
        wqkv=_linear(model.hidden, queries + 2 * others, MATRIX, bias=bias),
    )


def _heads(model: Model) -> dict[str, int]:
    a = model.attention
    return {"dim": model.hidden, "n_heads": a.num_heads, "n_kv_heads": a.num_kv_heads, "head_dim": a.head_dim}


def _grouped_attention(run: Run, family: TorchtitanFamily) -> Call:
    model, a = run.model, run.model.attention
    norms = {"qk_norm": _norm(model, a.head_dim)} if a.qk_norm else {}
    return call(
        "GQAttention.Config",
        **_heads(model),
        qkv_linear=_qkv(run),
        wo=_linear(a.num_heads * a.head_dim, model.hidden, RESIDUAL),
        **norms,
        inner_attention=call("get_attention_config", "flex"),
        rope=_rope(run, family, a.head_dim),
    )


def _latent_attention(run: Run, family: TorchtitanFamily) -> Call:
    model, a = run.model, run.model.attention
    h, heads, plain = model.hidden, a.num_heads, a.head_dim - a.rope_head_dim
    if a.query_lora_rank:
        queries = {
            "wq_a": _linear(h, a.query_lora_rank, MATRIX),
            "wq_b": _linear(a.query_lora_rank, heads * a.head_dim, MATRIX),
            "q_norm": _norm(model, a.query_lora_rank),
        }
    else:  # the field of the norm is required, but the norm is not built
        queries = {"wq": _linear(h, heads * a.head_dim, MATRIX), "q_norm": _norm(model, 1)}
    return call(
        "Attention.Config",
        dim=h,
        n_heads=heads,
        q_lora_rank=a.query_lora_rank,
        kv_lora_rank=a.kv_lora_rank,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=a.rope_head_dim,
        v_head_dim=a.v_dim,
        mscale=model.rope.mscale_all_dims,
        **queries,
        wkv_a=_linear(h, a.kv_lora_rank + a.rope_head_dim, MATRIX),
        kv_norm=_norm(model, a.kv_lora_rank),
        wkv_b=_linear(a.kv_lora_rank, heads * (plain + a.v_dim), MATRIX),
        wo=_linear(heads * a.v_dim, h, RESIDUAL),
        inner_attention=call("get_attention_config", "flex"),
        rope=_rope(run, family, a.rope_head_dim),
    )


def _router(run: Run, x: Experts, *, bias: bool = False) -> Call:
    limits = {"num_expert_groups": x.num_groups, "num_limited_groups": x.groups_per_token} if x.num_groups else {}
    return call(
        "TokenChoiceTopKRouter.Config",
        num_experts=x.num_experts,
        gate=_linear(run.model.hidden, x.num_experts, MATRIX, bias=bias),
        top_k=x.top_k,
        score_func=x.router.value,
        route_norm=x.normalize_top_k,
        route_scale=x.routed_scale,
        **limits,
    )


DISPATCHERS = {Dispatcher.ALL_TO_ALL: "standard", Dispatcher.DEEPEP: "deepep", Dispatcher.HYBRIDEP: "hybridep"}


def _routed(run: Run, x: Experts, *, experts: Call) -> Call:
    backend = DISPATCHERS[switches_of(run).dispatcher or Dispatcher.ALL_TO_ALL]
    width = {} if backend == "standard" else {"hidden_dim": run.model.hidden}  # of their buffers
    dispatcher = call(
        "make_token_dispatcher_config", num_experts=x.num_experts, top_k=x.top_k, comm_backend=backend, **width
    )
    return call("RoutedExperts.Config", inner_experts=experts, token_dispatcher=dispatcher)


def _mixture(
    run: Run, kind: str, *, experts: str, inits: dict[str, Name], bias: bool = False, shared: Call | None = None
) -> Call:
    """A layer's router and experts, of the classes `kind` and `experts`."""
    x = run.model.experts
    assert x is not None
    weights = call(experts, dim=run.model.hidden, hidden_dim=x.ffn_hidden, num_experts=x.num_experts, param_init=inits)
    return call(
        kind,
        num_experts=x.num_experts,
        load_balance_coeff=balance_rate(run),
        router=_router(run, x, bias=bias),
        routed_experts=_routed(run, x, experts=weights),
        **({"shared_experts": shared} if shared else {}),
    )


def _moe(run: Run) -> Call:
    x, matrix = run.model.experts, Name('MATRIX["weight"]')
    assert x is not None
    experts = "ExpertsInFp32.Config" if run.precision.name == "fp32" else "GroupedExperts.Config"
    inits = {"w1_EFD": matrix, "w2_EDF": Name('RESIDUAL["weight"]'), "w3_EFD": matrix}
    shared = _feed_forward(run.model, x.shared_hidden) if x.shared_hidden else None
    return _mixture(run, "MoE.Config", experts=experts, inits=inits, shared=shared)


def balance_rate(run: Run) -> float | None:
    """Update of routing biases per step. Only sigmoid routers have biases; torchtitan's default gives them to all."""
    x = run.model.experts
    moves = x is not None and x.router is Router.SIGMOID and run.lora is None
    return (run.train.balance_bias_rate or None) if moves else None


def _gpt_oss_layer(run: Run) -> Call:
    model, a, family = run.model, run.model.attention, _FAMILIES["gpt_oss"]
    init, zeros = Name('MATRIX["weight"]'), Name("nn.init.zeros_")
    inits = {
        "mlp1_weight_EGD": init, "mlp1_bias_EG": zeros, "mlp2_weight_EDF": Name('RESIDUAL["weight"]'),
        "mlp2_bias_ED": zeros,
    }  # fmt: skip
    attention = call(
        "gpt_oss.Attention.Config",
        **_heads(model),
        qkv_linear=_qkv(run, bias=True),
        wo=_linear(a.num_heads * a.head_dim, model.hidden, RESIDUAL, kind="ScaledBiasRowwiseLinear", bias=True),
        sliding_window_size=Name(f"{a.window} if index % 2 == 0 else None"),
        param_init={"sinks": init},
        inner_attention=call("get_attention_config", "flex"),
        rope=_rope(run, family, a.head_dim),
    )
    return call(
        "GptOssTransformerBlock.Config",
        attention_norm=_norm(model, model.hidden),
        ffn_norm=_norm(model, model.hidden),
        attention=attention,
        moe=_mixture(run, "GptOssMoE.Config", experts="GptOssGroupedExperts.Config", inits=inits, bias=True),
    )


def residual_std(model: Model) -> float:
    """Standard deviation of the initialization of matrices that write to the residual stream."""
    return STD / math.sqrt(2 * model.num_layers)
