"""GGUF file from a Hugging Face folder, for llama.cpp: Llama, Mistral, Qwen2 and Qwen3 with byte-level BPE tokenizers.

Names and metadata follow the GGUF specification (github:ggml-org/ggml docs/gguf.md). llama.cpp's `llama`
architecture rotates neighbouring elements (2i, 2i + 1) of a head, Hugging Face halves (i, i + d/2), so the rows of
the query and key projections are permuted. Its Qwen architectures rotate halves as Hugging Face does.

Configurations that llama.cpp would run differently are refused. Imports NumPy and `gguf`, no tensor framework.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bench.serving.servers.served import NAMES
from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import sync
from meshwright.json_values import load_json
from meshwright.programs import install_command

ARCHITECTURES: dict[str, str] = NAMES["architectures"]
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
FORMATS = ("f32", "f16", "bf16")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of the specification
UNKNOWN_PRE = "gpt-2"


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A written file. `notes` name differences that do not change the model."""

    path: Path
    architecture: str
    num_parameters: int
    context_length: int
    notes: tuple[str, ...] = field(default=())


def write_gguf(folder: Path, path: Path, *, dtype: str | None = None) -> GgufFile:
    """Write the model and tokenizer of `folder` to `path`.

    `dtype` is the matrices' format, f32, f16 or bf16; None: as in the folder. Vectors stay in 32 bits. Raises
    InputError for models that llama.cpp would run differently, MissingDependencyError without `gguf`.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "writing a GGUF file needs the package gguf", hint=install_command("llamacpp")
        ) from None
    config = _read_json(folder / "config.json")
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise InputError("models of this family are not converted to GGUF", got=name, allowed=", ".join(ARCHITECTURES))
    for key, allowed in (
        ("mlp_bias", (False, None)),
        ("hidden_act", ("silu",)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        if config.get(key) not in allowed:
            raise InputError(f"llama.cpp's {ARCHITECTURES[name]} has no such {key}", got=config.get(key))
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise InputError("models with a sliding window are not converted to GGUF", got=config["sliding_window"])
    _rope_factors(config)
    architecture = ARCHITECTURES[name]
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(str(partial), architecture)
    try:
        notes = _write_tokenizer(writer, folder, config)
        _write_shapes(writer, config, folder.name)
        factors = _rope_factors(config)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        count = _write_tensors(writer, folder, config, architecture, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return GgufFile(
        path=path, architecture=architecture, num_parameters=count, notes=notes,
        context_length=int(config["max_position_embeddings"]),
    )  # fmt: skip


def gguf_of(model: str, scratch: Path, *, dtype: str | None, option: str) -> tuple[Path, GgufFile | None]:
    """The GGUF file of `model`: itself, or one that is written to `scratch` from a Hugging Face folder.

    Raises InputError for another model, and for a `dtype`, the value of `option`, that is none.
    """
    path = Path(model)
    if dtype not in (None, *FORMATS):
        raise InputError(option, got=dtype, allowed=", ".join(FORMATS))
    if (path / "config.json").is_file():
        made = write_gguf(path, scratch / "model.gguf", dtype=dtype)
        return made.path, made
    if path.suffix == ".gguf" and path.is_file():
        return path, None
    allowed = "FILE.gguf, a Hugging Face folder, RUN.yaml or a checkpoint"
    raise InputError("llama.cpp cannot load this model", got=model, allowed=allowed)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = load_json(path)
    except OSError as error:
        raise InputError(f"the model's folder lacks {path.name} ({error.strerror})", got=str(path)) from None
    except ValueError:
        raise InputError(f"{path} is not JSON") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a mapping")
    return found


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(found)


def _rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """Divisors of the rotation frequencies in Llama 3.1's scaling; None for none."""
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError("this scaling of positions is not converted to GGUF", got=kind, allowed="default, llama3")
    dim = _head_dim(config)
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    old = float(rope["original_max_position_embeddings"])
    frequencies = 1.0 / _theta(config) ** (np.arange(0, dim, 2) / dim)
    lengths = 2 * math.pi / frequencies
    smooth = (old / lengths - low) / (high - low)
    between = 1.0 / ((1 - smooth) / factor + smooth)
    found = np.where(lengths < old / high, 1.0, np.where(lengths > old / low, factor, between))
    return found.astype(np.float32)


def _theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or _rope(config).get("rope_theta") or 10000.0)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_shapes(writer: Any, config: Mapping[str, Any], name: str) -> None:
    heads = int(config["num_attention_heads"])
    dim = _head_dim(config)
    writer.add_name(name)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(_theta(config))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))


# --- weights ---


def _write_tensors(writer: Any, folder: Path, config: Mapping[str, Any], architecture: str, dtype: str | None) -> int:
    """Write all tensors; return the number of parameters."""
    import gguf

    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    is_tied, count = bool(config.get("tie_word_embeddings")), 0
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], int(config["num_hidden_layers"]))
    for theirs, stored, values in read_safetensors(folder):
        if theirs == "lm_head.weight" and is_tied:
            continue
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise InputError("this tensor has no name in GGUF", got=theirs)
        if architecture == "llama" and ".attn_q." in ours:
            values = permuted(values, heads)
        if architecture == "llama" and ".attn_k." in ours:
            values = permuted(values, kv_heads)
        count += values.size
        kind = (dtype or stored).upper() if values.ndim > 1 else "F32"
        wanted = gguf.GGMLQuantizationType[kind]
        if kind == "BF16":
            writer.add_tensor(ours, gguf.quants.quantize(values.astype(np.float32), wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(ours, values.astype(DTYPES[kind]))
    if count == 0:
        raise InputError("the model's folder has no safetensors weights", got=str(folder))
    return count


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (i, i + d/2) to neighbours (2i, 2i + 1)."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def read_safetensors(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield name, stored format and fp32 or fp16 values of each tensor. Raises InputError for a damaged file."""
    from gguf.utility import SafetensorsLocal

    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = SafetensorsLocal(path).tensors
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError):
            raise InputError("not a safetensors file", got=str(path)) from None
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise InputError(f"{path.name}: {name} is {tensor.dtype}", allowed=", ".join(DTYPES))
            values = tensor.mmap_bytes().view(DTYPES[tensor.dtype]).reshape(tensor.shape)
            if tensor.dtype == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            yield name, tensor.dtype, values


# --- tokenizer ---


def _write_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Write the tokenizer of `tokenizer.json`; return notes."""
    found, settings = _read_json(folder / "tokenizer.json"), {}
    if (folder / "tokenizer_config.json").exists():
        settings = _read_json(folder / "tokenizer_config.json")
    model = found.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise InputError(
            "only byte-level BPE tokenizers are converted to GGUF",
            got=f"{model.get('type')}{' with byte fallback' if model.get('byte_fallback') else ''}",
        )
    added = {int(t["id"]): t for t in found.get("added_tokens") or ()}
    names = {int(i): text for text, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    size = int(config["vocab_size"])
    tokens, types = [], []
    for i in range(size):
        tokens.append(names.get(i, f"[unused {i}]"))
        is_special = i in added and added[i].get("special")
        types.append(UNUSED if i not in names else CONTROL if is_special else USER_DEFINED if i in added else NORMAL)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
    name, notes = _pre_tokenizer(found, has_merges=bool(merges))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or ["\u0100 \u0101"])  # the format has no empty list; this pair makes no token
    end, start = _token_id(config, "eos_token_id"), _token_id(config, "bos_token_id")
    if end is not None:
        writer.add_eos_token_id(end)
    first = end if start is None else start  # llama.cpp assumes GPT-2's where there is none
    if first is not None:
        writer.add_bos_token_id(first)
    writer.add_add_bos_token(start is not None and _adds_start(found, settings))
    template = settings.get("chat_template")
    if not isinstance(template, str) and (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        writer.add_chat_template(template)
    return notes


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    """The id of a special token, the first of several."""
    found = config.get(key)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) else None


def _adds_start(found: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return True if the tokenizer puts a start token in front of a text."""
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    processor = json.dumps(found.get("post_processor") or {})
    return '"SpecialToken"' in processor


def _pre_tokenizer(found: Mapping[str, Any], *, has_merges: bool) -> tuple[str, tuple[str, ...]]:
    """llama.cpp's name of the rule that splits a text before the merges, and notes."""
    text = json.dumps(found.get("pre_tokenizer") or {})
    unescaped = text.replace("\\\\", "\\")
    for part, name in NAMES["pre_tokenizers"].items():
        if part in unescaped:
            return name, ()
    if not has_merges or ('"ByteLevel"' in text and '"use_regex": true' in text and '"Split"' not in text):
        return UNKNOWN_PRE, ()
    note = "llama.cpp has no rule like this tokenizer's for splitting texts: some texts may become other tokens"
    return UNKNOWN_PRE, (note,)
