"""The model of Megatron-LM's options, as a run file's `model`."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.catalog.models import model_like
from meshwright.engines.megatron.megatron_lm.arithmetic import evaluate
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions, Option
from meshwright.errors import InputError
from meshwright.json_values import load_json
from meshwright.runfile.inline import catalogue_name
from meshwright.specs.model import BlockKind, Model

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt.py
GPT2_VOCABULARY = 50_257
TOKENIZERS = {"Llama2Tokenizer": "llama2-7b"}
"""Models by the type of their tokenizer."""
ENTRY_POINTS = "the options of pretrain_gpt.py"
OF_MODELS = ("GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama3Tokenizer", *TOKENIZERS)
"""Types of tokenizers that `--tokenizer-model ORGANISATION/MODEL`, or a file in the folder of a model, names."""
ITS_FILE = re.compile(r"tokenizer\.(model|json)|\$\{?\w+\}?|<.*>|")
MAY_BE_GPT2 = re.compile(r"gpt-?2|[$<]|^[^/]*$", re.IGNORECASE)  # files of vocabularies; others are of own tokenizers
OF_A_SIZE = re.compile(r"\d+b\b", re.IGNORECASE)
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
UNSUPPORTED: dict[str, list[str]] = _TABLES["unsupported"]
"""Options of models that no run file can express, with the values that are read or have no effect."""
YARN_CONTEXT = {"original_context": 4096}  # MLATransformerConfig.original_max_position_embeddings
NOT_TRUNCATED = "no-yarn-correction-range-round-to-int"
PAPERS = {"mscale": 1.0, "mscale_all_dims": 0.0}
"""Temperatures of the paper, which run files have without a key."""
PATTERNS = ("hybrid-layer-pattern", "hybrid-override-pattern")


def _given(options: MegatronOptions, table: str) -> dict[str, Any]:
    """Return the values of a table's options by their keys of run files; defaults say what kind of value each takes."""
    found: dict[str, Any] = {}
    for key, (name, usual) in _TABLES[table].items():
        if isinstance(usual, bool):
            found[key] = options.flag(name)
        else:
            found[key] = options.number(name, usual) if isinstance(usual, float) else options.integer(name, usual)
    return found


def model_section(options: MegatronOptions, *, name: str) -> dict[str, Any] | str:
    """Return the catalogue's name of an equal model, else the shapes.

    Raises InputError for what a run file cannot express. Defaults are those of megatron/training/arguments.py and of
    TransformerConfig at core_v0.16.1.
    """
    for option, no_effect in UNSUPPORTED.items():
        got = " ".join(options.values(option)) or None
        if option in options and got not in no_effect:
            raise InputError(f"a model that run files cannot express: --{option}", got=got)
    section = {"name": name, **_shapes(options)} | _blocks(options)
    section["unsupported"] = [part for option, part in _TABLES["planned_only"].items() if options.flag(option)]
    rope = _positions(options, section)
    section |= {"rope": rope} if rope else {}
    if "num-experts" in options:
        section["experts"] = _experts(options, section)
        if not section["experts"]["num_dense_layers"] and BlockKind.FEED_FORWARD not in section["layer_pattern"]:
            section["ffn_hidden"], section["ffn_bias"] = 0, False
    return catalogue_name(section) or {key: value for key, value in section.items() if value not in ("", None, [])}


def _blocks(options: MegatronOptions) -> dict[str, Any]:
    """Return layers of linear attention, and the layers of a hybrid, which hold one block each."""
    written = next((text for name in PATTERNS if (text := options.text(name))), "")
    main, *modules = written.split("/")
    if module := options.text("mtp-hybrid-override-pattern"):
        modules += [module] * options.integer("mtp-num-layers", 0)
    parts = main.split("|")  # pipeline stages
    if len({len(part) for part in parts}) > 1 or len(set(modules)) > 1:
        what = "a pattern of layers with unequal pipeline stages or modules of prediction"
        raise InputError(f"{what} has no place in run files", got=written)
    options.flag("is-hybrid-model")
    found: dict[str, Any] = {"layer_pattern": "".join(parts)}
    if found["layer_pattern"]:
        states = _given(options, "state_space")
        heads = options.integer("mamba-num-heads", 2 * options.integer("hidden-size", 0) // states["head_dim"])
        found["num_mtp_layers"] = len(modules)
        found |= {"mtp_pattern": modules[0]} if modules else {}
        found |= {"state_space": states | {"num_heads": heads}} if BlockKind.STATE_SPACE in main else {}
    if options.text("experimental-attention-variant"):
        pattern = _pattern(options, "linear-attention-freq")
        found["linear_attention"] = _given(options, "linear_attention") | {"pattern": pattern}
    return found


def _pattern(options: MegatronOptions, name: str) -> list[bool]:
    """Return which layers have a part, as the shortest pattern: of N, all but every N-th one."""
    found, layers = evaluate(options.text(name), what=f"--{name}"), options.integer("num-layers", 0)
    if isinstance(found, int):
        found = [int((k + 1) % found > 0) for k in range(layers)] if found > 0 else []
    if len(found) != layers:
        raise InputError(f"--{name}", got=f"{len(found)} layers", allowed=f"the model's {layers}")
    lengths = range(1, len(found) + 1)
    length = next(n for n in lengths if all(one == found[k % n] for k, one in enumerate(found)))
    return [bool(one) for one in found[:length]]


def _window(options: MegatronOptions) -> dict[str, Any]:
    """Return sliding windows. Megatron's left side leaves out the token itself, which run files count."""
    numbers = [part.strip(" ()[]") for part in ",".join(options.values("window-size")).split(",")]
    pattern = _pattern(options, "window-attn-skip-freq") if "window-attn-skip-freq" in options else [True]
    if numbers in ([""], ["None"]) or numbers[0] == "-1":
        return {}
    if len(numbers) != 2 or not numbers[0].isdecimal() or numbers[1] not in ("0", "-1"):
        raise InputError("--window-size is not the tokens before and after", got=",".join(numbers), allowed="127,0")
    return {"window": int(numbers[0]) + 1, "window_pattern": pattern}


def count_layers(options: MegatronOptions) -> None:
    """Set --num-layers to the layers of a hybrid's pattern, as Megatron-LM does."""
    if "num-layers" not in options and (found := "".join(map(options.text, PATTERNS))):
        count = len(found.partition("/")[0].replace("|", ""))
        options.unread["num-layers"] = Option(values=(str(count),), line=0)


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
    is_clamped = options.flag("quick-geglu")
    hidden, is_gated = options.integer("hidden-size", 0), options.flag("swiglu") or is_clamped
    width = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    multiplier = options.number("hidden-dim-multiplier", 1.0)
    if is_gated and (multiple := options.integer("multiple-of", 0)):  # of FlagScale
        width = math.ceil(int(int(4 * hidden * 2 / 3) * multiplier) / multiple) * multiple
    norm = options.text("normalization", "LayerNorm")
    has_biases, has_qkv_biases = not options.flag("disable-bias-linear"), options.flag("add-qkv-bias")
    for option, number in _TABLES["quick-geglu"].items():
        if (got := options.number(option, 0.0)) != number * is_clamped:
            raise InputError(f"a model that run files cannot express: --{option}", got=got, allowed=number * is_clamped)
    if options.flag("squared-relu") and not any(name in options for name in PATTERNS):
        options.note("--squared-relu is not carried over: blocks without a gate have GELU in run files")
    for dropout in ("hidden-dropout", "attention-dropout"):
        if rate := options.number(dropout, 0.1):
            key = dropout.replace("hidden", "residual").replace("-", "_")
            options.note(f"--{dropout} {rate:g} is not carried over: the native engine has train.{key}")
    return {
        "hidden": hidden,
        "num_layers": options.integer("num-layers", 0) - len(idle_layers(options)),
        "vocab": _vocab(options),
        "attention": _attention(options, hidden=hidden) | _biases(has_biases, of_inputs=has_qkv_biases),
        "ffn_hidden": options.integer("ffn-hidden-size", width),
        "gated_ffn": is_gated,
        "ffn_bias": has_biases,
        "activation": "clamped_swiglu" if is_clamped else "silu",
        "tied_embeddings": not options.flag("untie-embeddings-and-output-weights"),
        "norm_bias": norm == "LayerNorm",
        **_given(options, "model"),
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
    name, sizes = "".join(named), _TABLES["vocabularies"]
    if not found and (of := next((key for key in (name, name.rpartition("/")[2]) if key in sizes), "")):
        found = _assumed(options, f"{tokenizer} {name}", of, sizes[of])
    if not found and (known := _model_of_tokenizer(tokenizer, name)):
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
    own, width = _given(options, "attention"), options.integer("kv-channels", hidden // heads)
    if "num-query-groups" in options and not is_grouped:
        options.note(f"--num-query-groups {groups} has no effect without --group-query-attention")
    if options.flag("multi-latent-attention"):
        latent = {"kind": "mla", "num_heads": heads, "num_kv_heads": heads, **_given(options, "latent_attention")}
        # --qk-layernorm is for latent vectors, which are always normalised; --kv-channels has no effect
        return latent | {"head_dim": options.integer("qk-head-dim", 128) + latent["rope_head_dim"]}
    sinks, num_groups = options.text("softmax-type") == "learnable", groups if is_grouped else heads
    return own | {"num_heads": heads, "num_kv_heads": num_groups, "head_dim": width, "sinks": sinks, **_window(options)}


def _positions(options: MegatronOptions, section: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope` section; put learned positions into `section`."""
    kind = options.text("position-embedding-type", "learned_absolute")
    if options.flag("use-rotary-position-embeddings"):
        kind = "rope"
    table, has_none = options.integer("max-position-embeddings", 0), options.flag("no-position-embedding")
    base, fraction = options.number("rotary-base", 10_000.0), options.number("rotary-percent", 1.0)
    theta = options.number("rope-theta", base)  # of a fork, which does not use the other
    is_scaled, factor = options.flag("use-rope-scaling"), options.number("rope-scaling-factor", 8.0)
    temperatures, latent_yarn = _given(options, "temperatures"), {"scaling": "yarn", **_given(options, "latent_yarn")}
    is_latent = section["attention"].get("kind") == "mla"
    rope_type = options.text("rope-type", "yarn" if is_latent else "rope")
    if is_latent:
        is_scaled = latent_yarn["factor"] != 1 and rope_type == "yarn"
        return {"theta": theta} | (latent_yarn | YARN_CONTEXT | temperatures if is_scaled else {})
    if kind == "learned_absolute" and not has_none:
        section["learned_positions"] = table
        return {}
    if kind in (planned := _TABLES["planned_positions"]):
        if kind != "none" or not section["layer_pattern"]:  # no engine rotates what hybrids attend to
            section["unsupported"].append(planned[kind])
        return {}
    if kind == "yarn":
        own = {"truncate": not options.flag(NOT_TRUNCATED)} | ({} if temperatures == PAPERS else temperatures)
        return {"theta": theta} | latent_yarn | _given(options, "yarn") | own
    if kind != "rope" or rope_type != "rope":
        allowed = "rope, yarn, learned_absolute, alibi, none"
        raise InputError("positions that run files cannot express", got=f"{kind}, {rope_type}", allowed=allowed)
    rope: dict[str, Any] = {"theta": theta} | ({"rotated_share": fraction} if fraction != 1 else {})
    if "rope-factor" in options:
        if absent := [name for name, _ in _TABLES["scales"].values() if name not in options]:  # of a fork
            raise InputError("the arguments lack values of --rope-factor", got=", ".join(absent))
        return rope | {"scaling": "llama3"} | _given(options, "scales")
    return rope | ({"scaling": "llama3", "factor": factor, **_TABLES["llama3"]} if is_scaled else {})


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
        **_given(options, "experts"),
        "ffn_hidden": width,
        "num_dense_layers": _dense_layers(options),
        "router": router,
        "normalize_top_k": router == "sigmoid" or options.flag("norm-topk-prob") or not before,
        "bias": section["ffn_bias"],
    }
    if shared:
        whole = width > 0 and shared % width == 0
        experts |= {"num_shared": shared // width} if whole else {"num_shared": 1, "shared_ffn_hidden": shared}
    return experts


def _dense_layers(options: MegatronOptions) -> int:
    """Return the number of dense layers before the layers with experts. Raises InputError for any other order."""
    idle, num_layers = idle_layers(options), options.integer("num-layers", 0)
    if any(name in options for name in PATTERNS):  # which names its dense layers
        return 0
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
