"""The weights that training starts from: the folder that a run file's `weights` names, and its fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshwright.catalog.family_tensors import SCORES
from meshwright.catalog.huggingface import model_from_path
from meshwright.errors import InputError, MeshwrightError
from meshwright.hub import fetch, is_hub_name
from meshwright.json_values import load_json
from meshwright.specs.model import Model
from meshwright.specs.model_parts import ABSENT, parts_of
from meshwright.training.data.cache import SAMPLE_BYTES, sampled
from meshwright.training.data.tokenizer_files import TOKENIZER_FILES
from meshwright.training.weights.reading import Shapes, check_weights

MODEL_FILES = ("config.json", "generation_config.json", "configuration_*.py", "modeling_*.py")
"""Patterns of the files that describe a model to transformers, without its weights and its tokenizer."""
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", *MODEL_FILES, *TOKENIZER_FILES]
NUMERICS = ("norm_epsilon", "rope", "attention.window", "windowed_layers")
ROUTING = tuple(
    f"experts.{name}"
    for name in ("top_k", "router", "num_groups", "groups_per_token", "normalize_top_k", "routed_scale")
)
"""Settings that shapes do not show: another value makes the same weights compute another function."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The weights that training starts from."""

    name: str  # a folder, its path whole, or OWNER/NAME on the hub
    folder: Path
    fingerprint: str


def find_weights(given: str) -> Origin:
    """Find the weights `given`: a folder, or a name on the Hugging Face hub, downloaded once into its cache.

    Raises InputError when there is no such folder, or the hub cannot give it; MissingDependencyError without
    `huggingface_hub`.
    """
    folder = _find_folder(given, patterns=HUB_FILES)
    name = str(folder) if Path(given).is_dir() else given
    return Origin(name=name, folder=folder, fingerprint=fingerprint(folder))


def find_description(given: str) -> Path:
    """Find the folder with config.json and tokenizer of the weights `given`, without downloading the weights.

    Raises as `find_weights`.
    """
    return _find_folder(given, patterns=[*MODEL_FILES, *TOKENIZER_FILES])


def _find_folder(given: str, *, patterns: list[str]) -> Path:
    folder = Path(given)
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or not is_hub_name(given):
        raise InputError(
            "weights are a folder of safetensors, or OWNER/NAME[@REVISION] on the Hugging Face hub", got=given,
            hint="the folder does not exist" if not folder.exists() else "this is a file: name its folder",
        )  # fmt: skip
    return fetch(given, patterns=patterns, what="the weights")


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the positions of a config.json; None: it has none. Raises InputError unless a whole number from 1."""
    positions = config.get("max_position_embeddings")
    if positions is None or (isinstance(positions, int) and not isinstance(positions, bool) and positions > 0):
        return positions
    raise InputError("config.json: max_position_embeddings", got=repr(positions), allowed="a whole number from 1")


def differences(
    folder: Path,
    model: Model,
    *,
    shapes: Shapes | None = None,
    sequence_length: int | None = None,
    new_rows: str | None = None,
) -> list[str]:
    """Differences between `model` and the config.json in the folder of the weights, as sentences.

    `sequence_length` are the tokens of a sequence that the weights are trained on, which may be more than before.
    `new_rows` as in `GrownFolder`.

    Raises InputError when the weights in `folder` do not fit `model`, or do not have `shapes`.
    """
    with suppress(OSError, ValueError, AttributeError):  # without a readable config the tensors decide
        stored = load_json(folder / "config.json").get("quantization_config")
        if stored:
            raise InputError(
                f"{folder}: these weights are quantized",
                got=stored.get("quant_method", stored),
                allowed="weights in fp32, bf16 or fp16",
                hint="convert them to bf16 with the tool of the model's authors",
            )
    files = check_weights(folder, model, shapes=shapes, new_rows=new_rows)
    try:
        config_model = model_from_path(folder)
    except MeshwrightError:  # no config.json, or one of an unknown architecture: nothing to compare with
        return []
    if config_model.unsupported:
        raise InputError(
            f"{folder}: Meshwright does not compute all that the config of these weights sets",
            got="; ".join(config_model.unsupported),
        )
    names = ("num_mtp_layers", *NUMERICS) if model.experts is None else ("num_mtp_layers", *NUMERICS, *ROUTING)
    pairs = [(name, attrgetter(name)(model), attrgetter(name)(config_model)) for name in names]
    ours, theirs = parts_of(model), parts_of(config_model)
    parts = [name for name in ABSENT if not name.startswith(("rope.", "attention.window_pattern", "num_labels"))]
    pairs += [(name, ours.get(name, ABSENT[name]), theirs.get(name, ABSENT[name])) for name in parts]
    found = [
        f"model.{name} is {ours}; the config.json of the weights says {theirs}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    if model.num_labels and SCORES not in files.files:
        found.append("the head that scores is not among the weights: it begins at random")
    known = positions_of(load_json(folder / "config.json"))
    known = known and max(known, int(model.rope.original_context * model.rope.factor))
    if known and sequence_length is not None and sequence_length > known:
        found.append(f"data.sequence_length is {sequence_length:,}; the weights know {known:,} positions")
    return found


def fingerprint(folder: Path) -> str:
    """A digest of the sizes of all weight files and of samples of them: other weights have another one.

    Samples, because reading all bytes of a large model takes minutes; weights that were trained differ everywhere.
    """
    files = sorted(folder.glob("*.safetensors"))
    return sampled(((p.name, p) for p in files), lambda size: (0, size // 2, max(0, size - SAMPLE_BYTES)))
