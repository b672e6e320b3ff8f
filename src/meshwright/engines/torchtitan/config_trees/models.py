"""Models in trees of torchtitan's configurations as shapes of a run file. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.catalog.config_keys import in_layers
from meshwright.engines.torchtitan.config_module.models import ARCHITECTURES, LORA_TARGETS, SCALINGS, STD, residual_std
from meshwright.errors import InputError
from meshwright.specs.model import Activation, Attention, AttentionKind, Experts, Model, Rope, RopeScaling, Router

Node = dict[str, Any]

RECIPES = {"Float8Linear": "fp8_rowwise", "MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}
"""Precision recipes by the classes with which torchtitan's converters replace `Linear`."""

ADAPTED = {"wqkv": ("query", "key", "value"), "wq": ("query",), "wkv": ("key", "value")} | {
    name: (target,) for target, name in LORA_TARGETS.items() if target not in ("query", "key", "value")
}
"""Targets of a run file by the modules of torchtitan that have adapters."""


BACKENDS = {
    "AllToAllTokenDispatcher": "standard",
    "DeepEPTokenDispatcher": "deepep",
    "HybridEPTokenDispatcher": "hybridep",
    "MinimalAsyncEPTokenDispatcher": "minimal_async_ep",
}
"""Torchtitan's `comm_backend` of experts by the class that it makes."""


OVERLAPPED = ("AllGatherFusedFeedForward", "RowParallelLinear")
"""Classes of torchtitan's `tp_gemm_backend: dist_gemm`."""


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """A model of a configuration, with everything that its tree contains."""

    model: Model
    lora: Node | None  # the section of a run file
    recipe: str | None  # None: no matrix is quantised
    balance_rate: float | None  # None: no routing biases are updated
    max_sequence: int | None  # tokens in the RoPE table; None: as many as a sequence has
    comm_backend: str  # of experts; empty: there are none
    attention: str = "flex"  # torchtitan's `attn_backend`
    overlaps_tensor: bool = False  # tensor-parallel collectives run in parts inside of their GEMMs
    notes: tuple[str, ...]

    @property
    def content(self) -> str | dict[str, Any]:
        """Return the catalogue's name of an equal model, else the shapes."""
        for name in catalog.model_names():
            if same_model(catalog.model(name), self.model):
                return name
        return _section(self.model)


def read_model(spec: Node) -> ImportedModel:
    """Return the model of a `ModelSpec` tree. Raises InputError for one that no run file can express."""
    name, tree = field(spec, "name"), field(spec, "model")
    if name not in ARCHITECTURES:
        raise InputError("a model that run files do not support", got=name, allowed=", ".join(ARCHITECTURES))
    layers = field(tree, "layers")
    first, last = layers[0], layers[-1]
    num_dense = sum(field(layer, "moe") is None for layer in layers)
    if any(field(layer, "moe") is None for layer in layers[num_dense:]):
        raise InputError("dense layers between layers with experts", got=f"{num_dense} of {len(layers)}")
    moe = field(last, "moe")
    rope = field(field(first, "attention"), "rope") or field(tree, "rope")  # of the model before 0.3.0
    model = Model(
        name=f"{name}-{field(spec, 'flavor')}".lower(),
        family="Qwen3MoeForCausalLM" if name == "qwen3" and moe else ARCHITECTURES[name],
        hidden=field(tree, "dim"),
        num_layers=len(layers),
        vocab=field(tree, "vocab_size"),
        attention=_attention(layers),
        activation=Activation.CLAMPED_SWIGLU if name == "gpt_oss" else Activation.SILU,
        ffn_hidden=_width(field(first, "feed_forward"), "w1") if num_dense else 0,
        experts=_experts(moe, num_dense=num_dense) if moe else None,
        tied_embeddings=bool(field(tree, "enable_weight_tying")),
        num_mtp_layers=len(field(tree, "mtp_layers") or ()),
        norm_epsilon=field(field(tree, "norm"), "eps"),
        rope=_rope(field(first, "attention"), rope),
    )
    linears = [(path, node) for path, node in _nodes(layers) if "in_features" in node["fields"]]
    recipe, notes = _recipe(linears)
    kernels = (field(field(layer, "attention"), "inner_attention") for layer in layers)
    return ImportedModel(
        model=model,
        lora=_lora(_nodes(tree)),
        recipe=recipe,
        balance_rate=field(moe, "load_balance_coeff") if moe else None,
        max_sequence=field(rope, "max_seq_len"),
        comm_backend=_comm_backend(moe) if moe else "",
        attention=" and ".join(dict.fromkeys(_attention_kernel(kernel) for kernel in kernels)),
        overlaps_tensor=any(node["is"] in OVERLAPPED for _, node in _nodes(layers)),
        notes=(*notes, *_initialization_notes(tree, model)),
    )


def field(node: Node | None, name: str) -> Any:
    """Return a field of a node; None if its class has no such field."""
    if node is None:
        raise another_version(f"model_spec: {name} in its place")
    return node["fields"].get(name)


def another_version(key: str) -> InputError:
    """Return the error for a configuration without a key that all of 0.3.0 have."""
    return InputError(
        "the classes of the configuration are not of torchtitan 0.3.0, which is read", got=f"no {key}",
        hint="write the configuration for 0.3.0, or read the TOML file of a version up to 0.2",
    )  # fmt: skip


def _width(node: Node, name: str) -> int:
    return field(field(node, name), "out_features")


def _attention(layers: list[Node]) -> Attention:
    first = field(layers[0], "attention")
    heads = field(first, "n_heads")
    if field(first, "kv_lora_rank"):
        return Attention(
            kind=AttentionKind.MLA,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=field(first, "qk_nope_head_dim") + field(first, "qk_rope_head_dim"),
            value_head_dim=field(first, "v_head_dim"),
            query_lora_rank=field(first, "q_lora_rank"),
            kv_lora_rank=field(first, "kv_lora_rank"),
            rope_head_dim=field(first, "qk_rope_head_dim"),
        )
    qkv = field(first, "qkv_linear")
    width = field(qkv, "head_dim")
    fused = field(qkv, "wqkv")
    num_kv = field(qkv, "n_kv_heads") if fused else _width(qkv, "wkv") // width
    windows = [field(field(layer, "attention"), "sliding_window_size") or 0 for layer in layers]
    attention = Attention(
        num_heads=heads,
        num_kv_heads=num_kv,
        head_dim=width,
        window=max(windows),
        sinks="sinks" in (field(first, "param_init") or {}),
        bias=bool(field(fused or field(qkv, "wq"), "bias")),
        qk_norm=field(first, "qk_norm") is not None,
    )
    return in_layers(attention, [window > 0 for window in windows])


def _experts(moe: Node, *, num_dense: int) -> Experts:
    router, shared = field(moe, "router"), field(moe, "shared_experts")
    routed = field(moe, "routed_experts")
    width = field(field(routed, "inner_experts") if routed else field(moe, "experts"), "hidden_dim")
    of_shared = _width(shared, "w1") if shared else 0
    whole = of_shared % width == 0
    return Experts(
        num_experts=field(moe, "num_experts"),
        top_k=field(router, "top_k"),
        ffn_hidden=width,
        num_shared=of_shared // width if whole else 1,
        shared_ffn_hidden=None if whole else of_shared,
        num_dense_layers=num_dense,
        router=Router(field(router, "score_func")),
        num_groups=field(router, "num_expert_groups") or 0,
        groups_per_token=field(router, "num_limited_groups") or 0,
        normalize_top_k=field(router, "route_norm"),
        routed_scale=field(router, "route_scale"),
        bias=bool(field(field(router, "gate"), "bias")),
    )


def _comm_backend(moe: Node) -> str:
    kind: str = field(field(moe, "routed_experts") or field(moe, "experts"), "token_dispatcher")["is"]
    return BACKENDS.get(kind, kind)


def _attention_kernel(node: Node) -> str:
    kind, options = node["is"], field(node, "kernel_options")
    if kind == "FlexAttention":
        return "flex_flash" if options == {"BACKEND": "FLASH"} else f"flex {options}" if options else "flex"
    return "varlen" if kind == "VarlenAttention" else kind


def _rope(attention: Node, tree: Node) -> Rope:
    rope = Rope(theta=float(field(tree, "theta")))
    for scaling, (kind, fields) in SCALINGS.items():
        if field(tree, "scaling") == kind:
            rope = replace(rope, scaling=scaling, **{ours: field(tree, theirs) for theirs, ours in fields.items()})
    if rope.scaling is not RopeScaling.YARN:
        return rope
    scale = field(attention, "mscale") or 0.0
    return replace(rope, mscale=scale, mscale_all_dims=scale)


def _nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield `tree` and every node below it with its path: `layers.0.attention.wo`."""
    if isinstance(tree, list):
        for i, one in enumerate(tree):
            yield from _nodes(one, f"{path}.{i}" if path else str(i))
    elif isinstance(tree, dict) and "is" in tree:
        yield path, tree
        for name, value in tree["fields"].items():
            yield from _nodes(value, f"{path}.{name}" if path else name)


def _recipe(linears: list[tuple[str, Node]]) -> tuple[str | None, list[str]]:
    """Return the number format of the layers' GEMMs (None: not quantised), and notes on matrices without it."""
    kinds = [RECIPES.get(node["is"].removeprefix("LoRA")) for path, node in linears if "router" not in path]
    found = sorted({kind for kind in kinds if kind})
    if not found:
        return None, []
    if len(found) > 1:
        raise InputError("several number formats in one model", got=", ".join(found))
    plain = kinds.count(None)
    notes = (
        [f"model_spec: {plain} of {len(kinds)} matrices stay in 16 bits, which is not carried over"] if plain else []
    )
    settings = [config for _, node in linears if (config := field(node, "_torchao_config"))]
    if settings and field(settings[0], "emulate"):
        notes.append("model_spec: fp8 is emulated, which is not carried over")
    elif settings and field(settings[0], "from_recipe_name") == ["rowwise_with_gw_hp"]:
        notes.append("model_spec: gradients of weights are multiplied in 16 bits, which is not carried over")
    return found[0], notes


def _lora(nodes: Iterator[tuple[str, Node]]) -> Node | None:
    """Return the `lora` section; None: there are no adapters."""
    adapted = {path: node for path, node in nodes if "rank" in node["fields"]}
    if not adapted:
        return None
    names = {path.rpartition(".")[2] for path in adapted}
    if unknown := sorted(names - set(ADAPTED)):
        raise InputError("adapters on modules that run files do not support", got=", ".join(unknown))
    targets = {target for name in names for target in ADAPTED[name]}
    one = next(iter(adapted.values()))
    return {
        "rank": field(one, "rank"),
        "alpha": field(one, "alpha"),
        "targets": [target for target in LORA_TARGETS if target in targets],
    }


def _initialization_notes(tree: Node, model: Model) -> Iterator[str]:
    """Yield a note if the weight initialization differs from Meshwright's."""
    ours = {("normal_", STD), ("normal_", residual_std(model))}
    fixed = ("zeros_", "ones_", "skip_param_init")
    for _, node in _nodes(tree):
        for init in (field(node, "param_init") or {}).values():
            kind, std = init["function"].rpartition(".")[2], init.get("std")
            if kind not in fixed and (kind, std) not in ours:
                yield "model_spec: the weight initialization has other distributions, which is not carried over"
                return


def same_model(one: Model, other: Model) -> bool:
    """Return True if two models are equal in everything that a configuration of torchtitan contains."""
    return _canonical(one) == _canonical(other)


def _canonical(model: Model) -> Model:
    a, x, rope = model.attention, model.experts, model.rope
    if a.kind is AttentionKind.MLA:
        a = replace(a, num_kv_heads=a.num_heads)
    if x is not None:
        x = replace(x, num_shared=1, shared_ffn_hidden=x.shared_hidden)
    if rope.scaling is RopeScaling.NONE:
        rope = Rope(theta=rope.theta)
    a = replace(a, num_windowed_layers=0, window_pattern=model.windowed_layers, output_bias=a.has_output_bias)
    return replace(
        model,
        name="",
        family="",
        attention=replace(a, value_head_dim=a.v_dim),
        ffn_hidden=model.ffn_hidden if model.num_dense_layers else 0,
        experts=x,
        rope=rope,
    )


def _section(model: Model) -> dict[str, Any]:
    """Return a model as a run file's section: the values that are not at their defaults."""
    default = Model(
        name="", hidden=0, num_layers=0, vocab=0, ffn_hidden=0,
        attention=Attention(num_heads=0, num_kv_heads=0, head_dim=0),
        experts=Experts(num_experts=0, top_k=0, ffn_hidden=0),
    )  # fmt: skip
    return _changed(asdict(model), asdict(default))


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in values.items() if value is not None and value != defaults[key]}
    return {
        key: _changed(value, defaults[key]) if isinstance(defaults[key], dict) else getattr(value, "value", value)
        for key, value in changed.items()
    }
