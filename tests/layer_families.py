"""Random models whose layers are of several kinds: state space, linear, sparse and compressed attention, mixtures.

They are mappings as the `model` of a run file, so that the run file's checks are passed through too.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Section = dict[str, Any]


@st.composite
def experts(draw, *, num_layers: int, dense: bool) -> Section:
    """A mixture; `dense`: some layers may have none."""
    found: Section = {
        "num_experts": draw(st.sampled_from([4, 6, 64])),
        "top_k": draw(st.sampled_from([1, 2, 4])),
        "ffn_hidden": draw(st.sampled_from([256, 704])),
        "num_shared": draw(st.integers(0, 2)),
        "num_dense_layers": draw(st.sampled_from([0, 1, num_layers])) if dense else 0,
    }
    for key, value in (("latent", 128), ("bias", True), ("shared_gate", True)):
        if draw(st.integers(0, 3)) == 0:
            found[key] = value
    return found


@st.composite
def hybrids(draw, num_layers: int) -> Section:
    """Layers of one block each."""
    letters = draw(st.sampled_from(["M*-E", "M*-", "ME*", "M", "*-", "ME"]))
    pattern = "".join(draw(st.sampled_from(letters)) for _ in range(num_layers))
    model: Section = {"layer_pattern": pattern, "gated_ffn": draw(st.booleans()), "attention": draw(grouped())}
    if "M" in pattern:
        groups = draw(st.sampled_from([1, 2, 8]))
        heads = draw(st.sampled_from([8, 24]))
        model["state_space"] = {"state_size": 128, "num_heads": heads, "head_dim": 64, "num_groups": groups}
    if "E" in pattern:
        model["experts"] = draw(experts(num_layers=num_layers, dense=False))
    model["ffn_hidden"] = 2048 if "-" in pattern else 0
    if modules := draw(st.integers(0, 2)):
        held = "".join(draw(st.lists(st.sampled_from(pattern), min_size=1, max_size=3)))
        model |= {"num_mtp_layers": modules, "mtp_pattern": held, "mtp_shared": draw(st.booleans())}
    return model


@st.composite
def grouped(draw) -> Section:
    heads = draw(st.sampled_from([4, 8, 12]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": draw(st.sampled_from([64, 80, 128]))}


@st.composite
def latent(draw) -> Section:
    heads = draw(st.sampled_from([4, 8]))
    return {
        "kind": "mla", "num_heads": heads, "num_kv_heads": heads, "head_dim": 96, "value_head_dim": 64,
        "kv_lora_rank": draw(st.sampled_from([64, 512])), "rope_head_dim": 32,
        "query_lora_rank": draw(st.sampled_from([0, 96])),
    }  # fmt: skip


@st.composite
def linear(draw, num_layers: int) -> Section:
    """Linear attention beside grouped or latent attention."""
    attention = draw(st.one_of(grouped(), latent()))
    if attention.get("kind") is None:
        attention["output_gate"] = draw(st.booleans())
    heads = draw(st.sampled_from([2, 8]))
    pattern = draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(any))
    return {
        "attention": attention,
        "linear_attention": {
            "kind": draw(st.sampled_from(["gdn", "kda"])), "num_key_heads": heads,
            "num_value_heads": heads * draw(st.integers(1, 2)), "key_head_dim": 64,
            "value_head_dim": draw(st.sampled_from([64, 128])), "pattern": pattern,
        },
    }  # fmt: skip


@st.composite
def selecting(draw, num_layers: int) -> Section:
    """Latent attention with an indexer."""
    attention = draw(latent()) | {"query_lora_rank": 96}
    top_k = draw(st.sampled_from([64, 2048]))
    indexer: Section = {"num_heads": 4, "head_dim": 64, "top_k": top_k, "is_trained": draw(st.booleans())}
    if draw(st.booleans()):
        indexer["num_layers"] = draw(st.integers(1, num_layers))
    return {"attention": attention | {"indexer": indexer}}


@st.composite
def compressed(draw, num_layers: int) -> Section:
    """Attention and residual streams of DeepSeek-V4."""
    strides = [draw(st.sampled_from([0, 4, 128])) for _ in range(num_layers)]
    attention: Section = {
        "kind": "shared", "num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "query_lora_rank": 96,
        "output_lora_rank": 64, "output_groups": draw(st.sampled_from([1, 4])), "rope_head_dim": 32, "window": 128,
        "num_windowed_layers": num_layers, "sinks": True, "compression": {"strides": strides},
    }  # fmt: skip
    if 4 in strides:
        attention["indexer"] = {"num_heads": 4, "head_dim": 64, "top_k": 128}
    return {"attention": attention, "residual_streams": draw(st.sampled_from([1, 4]))}


@st.composite
def windowed(draw, num_layers: int) -> Section:
    """Windows, with full layers of another shape where there are layers of both kinds."""
    attention = draw(grouped())
    pattern = draw(st.lists(st.booleans(), min_size=1, max_size=3).filter(any))
    attention |= {"window": draw(st.sampled_from([128, 4096])), "window_pattern": pattern}
    if num_layers >= len(pattern) and not all(pattern) and draw(st.booleans()):
        shares = draw(st.booleans())
        attention["full_layers"] = {"head_dim": 256, "num_kv_heads": 1, "shares_values": shares}
    return {"attention": attention}


@st.composite
def models(draw) -> Section:
    """A model of any of these kinds, of 1 to 8 layers."""
    num_layers = draw(st.integers(1, 8))
    kinds = st.sampled_from([hybrids, linear, selecting, compressed, windowed])
    model = draw(draw(kinds)(num_layers))
    if "layer_pattern" not in model:
        if draw(st.booleans()):
            model["experts"] = draw(experts(num_layers=num_layers, dense=True))
        dense = model.get("experts", {}).get("num_dense_layers", num_layers)
        model |= {"ffn_hidden": 2752 if dense else 0, "num_mtp_layers": draw(st.integers(0, 1))}
    return model | {
        "hidden": draw(st.sampled_from([512, 1024])), "num_layers": num_layers, "vocab": 32_000,
        "tied_embeddings": draw(st.booleans()),
    }  # fmt: skip


def twice(model: Section) -> Section:
    """`model` with all of its layers twice."""
    doubled = model | {"num_layers": 2 * model["num_layers"]}
    if "layer_pattern" in model:
        doubled["layer_pattern"] = 2 * model["layer_pattern"]
    attention = dict(model["attention"])
    if attention.get("num_windowed_layers"):
        attention["num_windowed_layers"] *= 2
    if "compression" in attention:
        attention["compression"] = {"strides": 2 * attention["compression"]["strides"]}
    if attention.get("indexer", {}).get("num_layers"):
        attention["indexer"] = attention["indexer"] | {"num_layers": 2 * attention["indexer"]["num_layers"]}
    if "window_pattern" in attention:
        pattern, num = attention["window_pattern"], model["num_layers"]
        attention["window_pattern"] = 2 * [pattern[i % len(pattern)] for i in range(num)]
    if "linear_attention" in model:
        linear, num = model["linear_attention"], model["num_layers"]
        pattern = 2 * [linear["pattern"][i % len(linear["pattern"])] for i in range(num)]
        doubled["linear_attention"] = linear | {"pattern": pattern}
    if "experts" in model:
        dense = 2 * model["experts"].get("num_dense_layers", 0)
        doubled["experts"] = model["experts"] | {"num_dense_layers": dense}
    return doubled | {"attention": attention}
