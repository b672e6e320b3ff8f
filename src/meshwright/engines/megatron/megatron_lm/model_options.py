"""The model of Megatron-LM's options, as a run file's `model`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.catalog.models import model_like
from meshwright.engines.megatron.megatron_lm.arithmetic import evaluate
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions
from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.runfile.inline import catalogue_name
from meshwright.specs.model import Model

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt.py
GPT2_VOCABULARY = 50_257
TOKENIZERS = {"Llama2Tokenizer": "llama2-7b"}
"""Models by the type of their tokenizer."""
ENTRY_POINTS = "the options of pretrain_gpt.py"
OF_MODELS = ("HuggingFaceTokenizer", "Llama3Tokenizer", *TOKENIZERS)
"""Types of tokenizers that `--tokenizer-model ORGANISATION/MODEL`, or a file in the folder of a model, names."""
ITS_FILE = re.compile(r"tokenizer\.(model|json)|\$\{?\w+\}?|<.*>|")
MAY_BE_GPT2 = re.compile(r"gpt-?2|[$<]|^[^/]*$", re.IGNORECASE)  # files of vocabularies; others are of own tokenizers
OF_A_SIZE = re.compile(r"\d+b\b", re.IGNORECASE)
LLAMA3 = {"original_context": 8192, "low_frequency": 1.0, "high_frequency": 4.0}  # Megatron's, for all factors
SCALES = {
    "factor": "rope-factor", "low_frequency": "rope-low-freq-factor", "high_frequency": "rope-high-freq-factor",
    "original_context": "rope-original-max-positional-embeddings",
}  # fmt: skip
"""Keys of Llama 3's scaling by their options in a fork, which needs all of them."""
YARN_CONTEXT = 4096  # MLATransformerConfig.original_max_position_embeddings

_UNSUPPORTED = """
    activation-func-clamp-value apply-residual-connection-post-layernorm attention-output-gate enable-mhc-connections
    experimental-attention-variant heterogeneous-layers-config-encoded-json
    heterogeneous-layers-config-path hybrid-layer-pattern hybrid-override-pattern is-hybrid-model
    linear-attention-freq moe-latent-size moe-shared-expert-gate mrope-section mtp-hybrid-override-pattern
    mtp-use-repeated-layer no-rope-freq qk-l2-norm quick-geglu rotary-interleaved squared-relu use-mup window-size
    use-embedding-scaling
"""
UNSUPPORTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_UNSUPPORTED.split(), ()),
    "glu-linear-offset": ("0", "0.0"),
    "hybrid-attention-ratio": ("0", "0.0"),
    "hybrid-mlp-ratio": ("0", "0.0"),
    "relative-attention-num-buckets": ("32",),
    "rotary-seq-len-interpolation-factor": ("1", "1.0"),
    "softmax-type": ("vanilla",),
}
"""Options of models that no run file can express, with the values that have no effect."""


def model_section(options: MegatronOptions, *, name: str) -> dict[str, Any] | str:
    """Return the catalogue's name of an equal model, else the shapes.

    Raises InputError for what a run file cannot express. Defaults are those of megatron/training/arguments.py and of
    TransformerConfig at core_v0.16.1.
    """
    for option, no_effect in UNSUPPORTED.items():
        got = " ".join(options.values(option)) or None
        if option in options and got not in no_effect:
            raise InputError(f"a model that run files cannot express: --{option}", got=got)
    section = {"name": name, **_shapes(options)}
    rope = _positions(options, section)
    section |= {"rope": rope} if rope else {}
    if "num-experts" in options:
        section["experts"] = _experts(options, section)
        if not section["experts"]["num_dense_layers"]:
            del section["ffn_hidden"]
    return catalogue_name(section) or section


def idle_layers(options: MegatronOptions) -> list[int]:
    """Return the layers of --num-layers, from 0, that do nothing: with them, stages of MindSpeed-LLM are equal."""
    numbers = [part for part in options.text("noop-layers").split(",") if part]
    if not all(part.isdecimal() and int(part) < options.integer("num-layers", 0) for part in numbers):
        raise InputError("--noop-layers does not name layers", got=",".join(numbers), allowed="numbers from 0")
    return sorted({int(part) for part in numbers})


def _shapes(options: MegatronOptions) -> dict[str, Any]:
    for required in ("num-layers", "hidden-size", "num-attention-heads"):
        if options.integer(required, 0) < 1:
            raise InputError(f"the arguments lack --{required}", got=str(options.path))
    hidden, is_gated = options.integer("hidden-size", 0), options.flag("swiglu")
    width = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    multiplier = options.number("hidden-dim-multiplier", 1.0)
    if is_gated and (multiple := options.integer("multiple-of", 0)):  # of FlagScale
        width = math.ceil(int(int(4 * hidden * 2 / 3) * multiplier) / multiple) * multiple
    norm = options.text("normalization", "LayerNorm")
    has_biases, has_qkv_biases = not options.flag("disable-bias-linear"), options.flag("add-qkv-bias")
    if has_biases and is_gated:
        options.note("biases of gated feed-forward blocks are not carried over: run files have them in attention alone")
    for dropout in ("hidden-dropout", "attention-dropout"):
        if rate := options.number(dropout, 0.1):
            options.note(f"--{dropout} {rate:g} is not carried over: there is no dropout")
    return {
        "hidden": hidden,
        "num_layers": options.integer("num-layers", 0) - len(idle_layers(options)),
        "vocab": _vocab(options),
        "attention": _attention(options, hidden=hidden) | _biases(has_biases, of_inputs=has_qkv_biases),
        "ffn_hidden": options.integer("ffn-hidden-size", width),
        "gated_ffn": is_gated,
        "tied_embeddings": not options.flag("untie-embeddings-and-output-weights"),
        "num_mtp_layers": options.integer("mtp-num-layers", 0),
        "norm_bias": norm == "LayerNorm",
        "norm_epsilon": options.number("norm-epsilon", 1e-5),
    }


def _biases(of_all: bool, *, of_inputs: bool) -> dict[str, bool]:
    return {"bias": of_all or of_inputs} | ({"output_bias": False} if of_inputs and not of_all else {})


def _vocab(options: MegatronOptions) -> int:
    """Return the given size of the vocabulary, that of its file, or that which the tokenizer's name implies."""
    tokenizer, named = options.text("tokenizer-type", DEFAULT_TOKENIZER), options.paths("tokenizer-model")
    padded, file = options.integer("padded-vocab-size", 0), "".join(options.paths("vocab-file"))
    found = options.integer("vocab-size", padded)
    if file.endswith(".txt") or tokenizer.startswith("BertWordPiece"):  # GPT's are JSON
        got = f"{tokenizer} {file}".strip()
        raise InputError("a vocabulary of BERT or T5, which run files cannot express", got=got, allowed=ENTRY_POINTS)
    if not found and tokenizer == DEFAULT_TOKENIZER:
        found = _size_of(file, options.path) or 0
        if not found and (not file or MAY_BE_GPT2.search(file)):
            found = _assumed(options, tokenizer, "GPT-2", GPT2_VOCABULARY)
    if not found and (known := _model_of_tokenizer(tokenizer, "".join(named))):
        found = _assumed(options, " ".join((tokenizer, *named)), known.name, known.vocab)
    if not found:
        files = " ".join((tokenizer, *named, file)).strip()
        of = "is not given" if tokenizer == "NullTokenizer" else f"is in the file of {files}"
        raise InputError(
            f"the size of the vocabulary {of}", hint=f'give the size: "{options.path.name} --vocab-size 32000"'
        )
    if not padded:
        _note_padding(options, found)
    return found


def _assumed(options: MegatronOptions, tokenizer: str, of: str, size: int) -> int:
    options.note(f"the file of {tokenizer} is not here: the {size} tokens of {of} are assumed, unlike --vocab-size N")
    return size


def _model_of_tokenizer(tokenizer: str, named: str) -> Model | None:
    """Return the model of the catalogue that a tokenizer is named after; None: there is none.

    The type alone decides where the name is that of any tokenizer's file, in a folder that is not of another model.
    """
    folder, _, file = named.rpartition("/")
    folder = folder.rpartition("/")[2]
    for name in (file, folder if ITS_FILE.fullmatch(file) else ""):
        if tokenizer in OF_MODELS and name and (like := model_like(name)):
            return catalog.model(like)
    is_any = ITS_FILE.fullmatch(file) and not OF_A_SIZE.search(folder)
    return catalog.model(TOKENIZERS[tokenizer]) if tokenizer in TOKENIZERS and is_any else None


def _note_padding(options: MegatronOptions, vocab: int) -> None:
    """Name the rows of the embedding and the head that Megatron-LM adds, beyond those that split it over ranks."""
    tensor, multiple = (
        options.integer("tensor-model-parallel-size", 1),
        options.integer("make-vocab-size-divisible-by", 128),
    )
    added = -vocab % (multiple * tensor) - -vocab % tensor
    if added:
        options.leave_out(f"{added} rows by which --make-vocab-size-divisible-by {multiple} fills the vocabulary")


def _size_of(file: str, script: Path) -> int | None:
    """Return the number of tokens in a vocab.json of a BPE tokenizer; None if it cannot be read.

    Megatron's GPT2BPETokenizer has no tokens besides those of the file.
    """
    for path in (Path(file), script.parent / file):
        try:
            content = load_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content:
            return len(content)
    return None


def _attention(options: MegatronOptions, *, hidden: int) -> dict[str, Any]:
    heads = options.integer("num-attention-heads", 0)
    is_grouped, groups = options.flag("group-query-attention"), options.integer("num-query-groups", 1)
    normalised, width = options.flag("qk-layernorm"), options.integer("kv-channels", hidden // heads)
    if "num-query-groups" in options and not is_grouped:
        options.note(f"--num-query-groups {groups} has no effect without --group-query-attention")
    if options.flag("multi-latent-attention"):
        rotary = options.integer("qk-pos-emb-head-dim", 64)
        return {  # --qk-layernorm is for latent vectors, which are always normalised; --kv-channels has no effect
            "kind": "mla",
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": options.integer("qk-head-dim", 128) + rotary,
            "value_head_dim": options.integer("v-head-dim", 128),
            "query_lora_rank": options.integer("q-lora-rank", 0),
            "kv_lora_rank": options.integer("kv-lora-rank", 32),
            "rope_head_dim": rotary,
        }
    return {
        "num_heads": heads,
        "num_kv_heads": groups if is_grouped else heads,
        "head_dim": width,
        "qk_norm": normalised,
    }


def _positions(options: MegatronOptions, section: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope` section; put learned positions into `section`."""
    kind = options.text("position-embedding-type", "learned_absolute")
    if options.flag("use-rotary-position-embeddings"):
        kind = "rope"
    table, has_none = options.integer("max-position-embeddings", 0), options.flag("no-position-embedding")
    base, fraction = options.number("rotary-base", 10_000.0), options.number("rotary-percent", 1.0)
    theta = options.number("rope-theta", base)  # of a fork, which does not use the other
    is_scaled, factor = options.flag("use-rope-scaling"), options.number("rope-scaling-factor", 8.0)
    yarn = options.number("rotary-scaling-factor", 1.0)
    temperatures = {"mscale": options.number("mscale", 1.0), "mscale_all_dims": options.number("mscale-all-dim", 0.0)}
    is_latent = section["attention"].get("kind") == "mla"
    rope_type = options.text("rope-type", "yarn" if is_latent else "rope")
    if is_latent:
        scaled = {"scaling": "yarn", "factor": yarn, "original_context": YARN_CONTEXT, **temperatures}
        return {"theta": theta} | (scaled if yarn != 1 and rope_type == "yarn" else {})
    if kind == "learned_absolute" and not has_none:
        section["learned_positions"] = table
        return {}
    if kind != "rope" or rope_type != "rope":
        raise InputError(
            "positions that run files cannot express", got=f"{kind}, {rope_type}", allowed="rope, learned_absolute"
        )
    rope: dict[str, Any] = {"theta": theta} | ({"rotated_share": fraction} if fraction != 1 else {})
    if "rope-factor" in options:
        if absent := [name for name in SCALES.values() if name not in options]:
            raise InputError("the arguments lack values of --rope-factor", got=", ".join(absent))
        return rope | {"scaling": "llama3"} | {key: options.number(name, 0) for key, name in SCALES.items()}
    return rope | ({"scaling": "llama3", "factor": factor, **LLAMA3} if is_scaled else {})


def _experts(options: MegatronOptions, section: dict[str, Any]) -> dict[str, Any]:
    width = options.integer("moe-ffn-hidden-size", section["ffn_hidden"])
    shared = width * options.integer("n-shared-experts", 0)  # of MindSpeed-LLM
    shared = options.integer("moe-shared-expert-intermediate-size", shared)
    router = options.text("moe-router-score-function", "softmax")
    before = options.flag("moe-router-pre-softmax")
    is_biased = options.flag("moe-router-enable-expert-bias")
    if is_biased != (router == "sigmoid"):
        raise InputError(
            "routers that run files cannot express: softmax has no biases, sigmoid has them",
            got=f"--moe-router-score-function {router} {'with' if is_biased else 'without'} biases",
        )
    experts: dict[str, Any] = {
        "num_experts": options.integer("num-experts", 0),
        "top_k": options.integer("moe-router-topk", 2),
        "ffn_hidden": width,
        "num_dense_layers": _dense_layers(options),
        "router": router,
        "num_groups": options.integer("moe-router-num-groups", 0),
        "groups_per_token": options.integer("moe-router-group-topk", 0),
        "normalize_top_k": router == "sigmoid" or options.flag("norm-topk-prob") or not before,
        "routed_scale": options.number("moe-router-topk-scaling-factor", 1.0),
    }
    if shared:
        whole = width > 0 and shared % width == 0
        experts |= {"num_shared": shared // width} if whole else {"num_shared": 1, "shared_ffn_hidden": shared}
    return experts


def _dense_layers(options: MegatronOptions) -> int:
    """Return the number of dense layers before the layers with experts. Raises InputError for any other order."""
    idle, num_layers = idle_layers(options), options.integer("num-layers", 0)
    text = options.text("moe-layer-freq", "1")
    pattern = evaluate(text, what="--moe-layer-freq")
    if isinstance(pattern, int):
        pattern = [int(k % pattern == 0) for k in range(num_layers)] if pattern > 0 else []
    first = options.integer("first-k-dense-replace", 0)  # of MindSpeed-LLM
    pattern = [int(k >= first and bool(one)) for k, one in enumerate(pattern)]
    if len(pattern) != num_layers:
        raise InputError("--moe-layer-freq", got=f"{len(pattern)} layers", allowed=f"the model's {num_layers}")
    pattern = [one for k, one in enumerate(pattern) if k not in idle]
    dense = pattern.count(0)
    if pattern != [0] * dense + [1] * (len(pattern) - dense):
        raise InputError("a model that run files cannot express: dense layers after layers with experts", got=text)
    return dense
