"""The model that options of Megatron-LM describe, as a run file's `model`."""

from __future__ import annotations

from typing import Any

from meshwright.engines.megatron.megatron_lm.arithmetic import evaluated
from meshwright.engines.megatron.megatron_lm.options import Options
from meshwright.errors import InputError
from meshwright.runfile.inline import catalogue_name

GPT2_VOCABULARY = 50_257
LLAMA3 = {
    "original_context": 8192,
    "low_frequency": 1.0,
    "high_frequency": 4.0,
}  # Megatron's, for all factors
YARN_CONTEXT = 4096  # MLATransformerConfig.original_max_position_embeddings

OTHER_MODELS = (
    "activation-func-clamp-value", "apply-residual-connection-post-layernorm", "attention-output-gate",
    "experimental-attention-variant", "glu-linear-offset", "heterogeneous-layers-config-encoded-json",
    "heterogeneous-layers-config-path", "hybrid-attention-ratio", "hybrid-mlp-ratio", "hybrid-override-pattern",
    "is-hybrid-model", "linear-attention-freq", "moe-latent-size", "moe-shared-expert-gate", "mrope-section",
    "no-rope-freq", "qk-l2-norm", "quick-geglu", "relative-attention-num-buckets", "rotary-interleaved",
    "rotary-seq-len-interpolation-factor", "softmax-type", "squared-relu", "window-size",
)  # fmt: skip
"""Options that make a model which no run file can express."""


def model_section(options: Options, *, name: str) -> dict[str, Any] | str:
    """The catalogue's name of a model that is the same in all that is said here, or its shapes.

    Raises InputError for what a run file cannot say. Defaults are those of megatron/training/arguments.py and of
    TransformerConfig at core_v0.16.1.
    """
    for wrong in OTHER_MODELS:
        if wrong in options:
            raise InputError(
                f"a model that run files cannot express: --{wrong}",
                got=" ".join(options.words(wrong)) or None,
            )
    section = {"name": name, **_shapes(options)}
    rope = _positions(options, section)
    section |= {"rope": rope} if rope else {}
    if "num-experts" in options:
        section["experts"] = _experts(options, section)
        if not section["experts"]["num_dense_layers"]:
            del section["ffn_hidden"]
    return catalogue_name(section) or section


def _shapes(options: Options) -> dict[str, Any]:
    for needed in ("num-layers", "hidden-size", "num-attention-heads"):
        if options.whole(needed, 0) < 1:
            raise InputError(f"the arguments lack --{needed}", got=str(options.path))
    hidden, is_gated = options.whole("hidden-size", 0), options.flag("swiglu")
    width = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    norm = options.word("normalization", "LayerNorm")
    biased, one_more = not options.flag("disable-bias-linear"), options.flag("add-qkv-bias")
    if biased and is_gated:
        options.note(
            "biases of gated feed-forward blocks are not carried over: a run file has those of attention"
        )
    if one_more and not biased:
        options.note("--add-qkv-bias: the run file's biases are those of all projections of attention")
    for dropout in ("hidden-dropout", "attention-dropout"):
        if rate := options.number(dropout, 0.1):
            options.note(f"--{dropout} {rate:g} is not carried over: nothing is dropped")
    return {
        "hidden": hidden,
        "num_layers": options.whole("num-layers", 0),
        "vocab": _vocab(options),
        "attention": _attention(options, hidden=hidden) | {"bias": biased or one_more},
        "ffn_hidden": options.whole("ffn-hidden-size", width),
        "gated_ffn": is_gated,
        "tied_embeddings": not options.flag("untie-embeddings-and-output-weights"),
        "num_mtp_layers": options.whole("mtp-num-layers", 0),
        "norm_bias": norm == "LayerNorm",
        "norm_epsilon": options.number("norm-epsilon", 1e-5),
    }


def _vocab(options: Options) -> int:
    tokenizer = options.word("tokenizer-type", "GPT2BPETokenizer")  # pretrain_gpt.py's own default
    padded = options.whole("padded-vocab-size", 0)
    found = options.whole("vocab-size", padded or (GPT2_VOCABULARY if tokenizer == "GPT2BPETokenizer" else 0))
    if not found:
        raise InputError(
            f"the vocabulary is what {tokenizer} finds in its file",
            hint=f'say how large it is: "{options.path.name} --vocab-size 32000"',
        )
    return found


def _attention(options: Options, *, hidden: int) -> dict[str, Any]:
    heads = options.whole("num-attention-heads", 0)
    is_grouped, groups = options.flag("group-query-attention"), options.whole("num-query-groups", 1)
    normalised, width = options.flag("qk-layernorm"), options.whole("kv-channels", hidden // heads)
    if "num-query-groups" in options and not is_grouped:
        options.note(f"--num-query-groups {groups} has no effect without --group-query-attention")
    if options.flag("multi-latent-attention"):
        rotary = options.whole("qk-pos-emb-head-dim", 64)
        return {  # --qk-layernorm is of its latent vectors, which are always normalised; --kv-channels says nothing
            "kind": "mla",
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": options.whole("qk-head-dim", 128) + rotary,
            "value_head_dim": options.whole("v-head-dim", 128),
            "query_lora_rank": options.whole("q-lora-rank", 0),
            "kv_lora_rank": options.whole("kv-lora-rank", 32),
            "rope_head_dim": rotary,
        }
    return {
        "num_heads": heads,
        "num_kv_heads": groups if is_grouped else heads,
        "head_dim": width,
        "qk_norm": normalised,
    }


def _positions(options: Options, section: dict[str, Any]) -> dict[str, Any]:
    """What turns queries and keys; a learned table goes into `section`."""
    kind = options.word("position-embedding-type", "learned_absolute")
    if options.flag("use-rotary-position-embeddings"):
        kind = "rope"
    longest, unlearned = options.whole("max-position-embeddings", 0), options.flag("no-position-embedding")
    theta, share = options.number("rotary-base", 10_000.0), options.number("rotary-percent", 1.0)
    stretched, factor = options.flag("use-rope-scaling"), options.number("rope-scaling-factor", 8.0)
    yarn = options.number("rotary-scaling-factor", 1.0)
    temperatures = {
        "mscale": options.number("mscale", 1.0),
        "mscale_all_dims": options.number("mscale-all-dim", 0.0),
    }
    is_latent = section["attention"].get("kind") == "mla"
    stretch = options.word("rope-type", "yarn" if is_latent else "rope")
    if is_latent:
        scaled = {"scaling": "yarn", "factor": yarn, "original_context": YARN_CONTEXT, **temperatures}
        return {"theta": theta} | (scaled if yarn != 1 and stretch == "yarn" else {})
    if kind == "learned_absolute" and not unlearned:
        section["learned_positions"] = longest
        return {}
    if kind != "rope" or stretch != "rope":
        raise InputError(
            "positions that run files cannot express",
            got=f"{kind}, {stretch}",
            allowed="rope, learned_absolute",
        )
    if share != 1:
        got = f"--rotary-percent {share}"
        raise InputError("a model that run files cannot express: some dimensions do not turn", got=got)
    return {"theta": theta} | ({"scaling": "llama3", "factor": factor, **LLAMA3} if stretched else {})


def _experts(options: Options, section: dict[str, Any]) -> dict[str, Any]:
    width = options.whole("moe-ffn-hidden-size", section["ffn_hidden"])
    shared = options.whole("moe-shared-expert-intermediate-size", 0)
    router = options.word("moe-router-score-function", "softmax")
    before = options.flag("moe-router-pre-softmax")
    is_biased = options.flag("moe-router-enable-expert-bias")
    if is_biased != (router == "sigmoid"):
        raise InputError(
            "routers that run files cannot express: softmax has no biases, sigmoid has them",
            got=f"--moe-router-score-function {router} {'with' if is_biased else 'without'} biases",
        )
    experts: dict[str, Any] = {
        "num_experts": options.whole("num-experts", 0),
        "top_k": options.whole("moe-router-topk", 2),
        "ffn_hidden": width,
        "num_dense_layers": _dense_layers(options, section["num_layers"]),
        "router": router,
        "num_groups": options.whole("moe-router-num-groups", 0),
        "groups_per_token": options.whole("moe-router-group-topk", 0),
        "normalize_top_k": router == "sigmoid" or not before,
        "routed_scale": options.number("moe-router-topk-scaling-factor", 1.0),
    }
    if shared:
        whole = width > 0 and shared % width == 0
        experts |= (
            {"num_shared": shared // width} if whole else {"num_shared": 1, "shared_ffn_hidden": shared}
        )
    return experts


def _dense_layers(options: Options, num_layers: int) -> int:
    """How many layers before the first mixture; mixtures may not stand between dense layers."""
    text = options.word("moe-layer-freq", "1")
    pattern = evaluated(text, what="--moe-layer-freq")
    if isinstance(pattern, int):
        pattern = [int(k % pattern == 0) for k in range(num_layers)] if pattern > 0 else []
    if len(pattern) != num_layers:
        raise InputError(
            "--moe-layer-freq", got=f"{len(pattern)} layers", allowed=f"the model's {num_layers}"
        )
    dense = pattern.count(0)
    if pattern != [0] * dense + [1] * (num_layers - dense):
        raise InputError("a model that run files cannot express: dense layers behind mixtures", got=text)
    return dense
