"""MaxText's rematerialisation policies as modules that are recomputed, and the share of kept tensors on the host.

A policy keeps named tensors of a layer, on the device or in host memory, beside the layer's input (layers/
nnx_decoders.py, get_remat_policy). The backward pass computes a layer's other tensors again from these.
"""

from __future__ import annotations

from meshwright.engines.maxtext.config.keys import MaxTextKeys
from meshwright.specs.plan import RECOMPUTE_MODULES

INPUT = "decoder_layer_input"
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
BEFORE_ACTIVATION = ("mlpwi", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
OUTPUTS = ("context", "attention_out", "out_proj", "mlpwo", "moe_mlpwo")

_DENSE = ("mlpwi", "mlpwi_0", "mlpwi_1", "out_proj", "mlpwo")
KEPT = {
    "full": (),
    "minimal": (*PROJECTIONS, *_DENSE),
    "minimal_with_context": (*PROJECTIONS, "context", *_DENSE),
    "minimal_flash": (*PROJECTIONS, "context", *_DENSE),  # its older name
    "minimal_offloaded": (*PROJECTIONS, *_DENSE),
    "save_dot_with_context_except_mlp": (*PROJECTIONS, "context", "out_proj"),
    "save_dot_except_mlpwi": (*PROJECTIONS, "out_proj", "mlpwo"),
    "save_dot_except_mlp": (*PROJECTIONS, "out_proj"),
    "save_qkv_proj": PROJECTIONS,
    "qkv_proj_offloaded": PROJECTIONS,
    "save_out_proj": ("out_proj",),
}
"""Tensors that the policies with a name keep; `custom` has a key for each."""
OFFLOADED = ("minimal_offloaded", "qkv_proj_offloaded")
"""Policies that keep them in host memory, and the layer's input on the device."""


def recomputation(settings: MaxTextKeys) -> tuple[object, float]:
    """Return `parallel.recompute` and `stack.offloaded_activations` of the settings."""
    policy = settings.take("remat_policy")
    places = {name: settings.take(name) for name in (INPUT, *PROJECTIONS, *BEFORE_ACTIVATION, *OUTPUTS)}
    if policy in KEPT:
        where = "offload" if policy in OFFLOADED else "device"
        places = {INPUT: "device"} | dict.fromkeys(KEPT[policy], where)
    elif policy != "custom":
        settings.note(f"remat_policy = {policy!r} is not carried over: full recomputation is used instead")
        return "full", 0.0
    kept = {name for name, place in places.items() if place != "remat"}
    share = _offloaded_share(settings, {name: places[name] == "offload" for name in kept})
    has_projections = "qkv_proj" in kept or {"query_proj", "key_proj", "value_proj"} <= kept
    if not has_projections or settings.peek("attention_type") == "mla":  # no set of modules has latents
        if others := sorted(kept - {INPUT}):
            settings.note(f"{', '.join(others)} are kept, and the estimate computes whole layers again")
        return "full", share
    modules = {"norm", "activation"}
    modules |= set() if "context" in kept else {"core_attention"}
    modules |= set() if kept & set(BEFORE_ACTIVATION) else {"moe" if settings.peek("num_experts") > 1 else "mlp"}
    return {"modules": [module for module in RECOMPUTE_MODULES if module in modules]}, share


def _offloaded_share(settings: MaxTextKeys, is_offloaded: dict[str, bool]) -> float:
    """Share of the kept elements of a layer that lie in host memory; a tensor with two names counts once."""
    heads, keys = (settings.peek(f"base_num_{kind}_heads") * settings.peek("head_dim") for kind in ("query", "kv"))
    hidden, inner, copies = settings.peek("base_emb_dim"), settings.peek("base_mlp_dim"), 1
    if settings.peek("num_experts") > 1:
        copies = settings.peek("num_experts_per_tok")
        inner = copies * settings.peek("base_moe_mlp_dim")
    widths = {
        "query_proj": heads, "key_proj": keys, "value_proj": keys, "kv_proj": 0, "qkv_proj": 0, "context": heads,
        "attention_out": 0 if "context" in is_offloaded else heads, "mlpwi": 0, "mlpwi_0": inner, "mlpwi_1": inner,
        "moe_mlpwi_0": 0 if "mlpwi_0" in is_offloaded else inner,
        "moe_mlpwi_1": 0 if "mlpwi_1" in is_offloaded else inner,
        "mlpwo": copies * hidden, "moe_mlpwo": 0 if "mlpwo" in is_offloaded else copies * hidden,
    }  # fmt: skip
    sizes = {name: widths.get(name, hidden) for name in is_offloaded}
    offloaded = sum(size for name, size in sizes.items() if is_offloaded[name])
    return round(offloaded / max(sum(sizes.values()), 1), 3)
