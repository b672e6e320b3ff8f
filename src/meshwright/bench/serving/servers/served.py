"""Shapes and formats of a served model. A record needs them to calibrate `meshwright inference`.

They come from a Hugging Face config.json, or from the metadata of a GGUF file (github:ggml-org/ggml docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import toml_table
from meshwright.json_values import load_json
from meshwright.programs import install_command

NAMES = toml_table(Path(__file__).with_name("formats.toml"))
PRECISIONS: dict[str, str] = NAMES["precisions"]
LLAMACPP_CACHE = "fp16"
"""llama.cpp's default format of the KV cache."""

GGUF_ARCHITECTURES: dict[str, str] = NAMES["families"]


def folder_config(path: Path) -> dict[str, Any] | None:
    """The config.json of a model's folder; None where there is none, as of a name on a hub."""
    try:
        found = load_json(path / "config.json")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def stored_precision(config: Mapping[str, Any] | None) -> str | None:
    """Format of the weights that a config.json names; None where it names none, or quantised ones."""
    if config is None or config.get("quantization_config"):
        return None
    return PRECISIONS.get(str(config.get("dtype") or config.get("torch_dtype")))


def gguf_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """(keys of a config.json, format of the matrices) of a GGUF file; the format is None where it is quantised.

    Architectures that `GGUF_ARCHITECTURES` lacks have only `max_position_embeddings` and `vocab_size`. Raises
    InputError for a damaged file.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "reading a GGUF file needs the package gguf", hint=install_command("llamacpp")
        ) from None
    try:
        reader: Any = gguf.GGUFReader(path)
        fields = reader.fields
        name = str(fields["general.architecture"].contents())
        found = {
            theirs: fields[f"{name}.{key}"].contents()
            for theirs, key in NAMES["keys"].items()
            if f"{name}.{key}" in fields
        }
        found["max_position_embeddings"] = int(found["max_position_embeddings"])
        found.setdefault("vocab_size", len(fields["tokenizer.ggml.tokens"].data))
        tensors = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise InputError("not a GGUF file, or one without context length", got=str(path)) from None
    if name not in GGUF_ARCHITECTURES:
        return {key: found[key] for key in ("max_position_embeddings", "vocab_size")}, None
    found |= {
        "architectures": [GGUF_ARCHITECTURES[name]],
        "rope_theta": float(fields[f"{name}.rope.freq_base"].contents())
        if f"{name}.rope.freq_base" in fields
        else 10000.0,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return found, PRECISIONS.get(tensors.get("blk.0.attn_q.weight", ""))


def served_document(
    config: Mapping[str, Any] | None,
    *,
    precision: str | None,
    kv_precision: str | None,
    slots: int | None = None,
    tensor: int = 1,
) -> dict[str, Any]:
    """Shapes, formats, largest batch and tensor degree of a server, for `serving.json`. None: not known."""
    return {
        "config": dict(config) if config and config.get("architectures") else None,
        "precision": precision,
        "kv_precision": kv_precision,
        "slots": slots,
        "tensor": tensor,
    }
