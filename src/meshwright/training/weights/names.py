"""Names of our tensors in the files of each family. The tables are in `catalog.families`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.catalog.families import ModelFamily, family_that_fits, trained_families
from meshwright.catalog.family_tensors import OUTSIDE_LAYERS, PREDICTION_COPIES, PREDICTIONS, SCORES
from meshwright.errors import InputError
from meshwright.specs.model import Model


def family_of(model: Model) -> ModelFamily:
    """Return the family whose files hold `model`: the family it names, or the first that can express its shapes.

    Raises InputError when there is none.
    """
    if (family := family_that_fits(model)) is not None:
        return family
    fitting = [f.architecture for f in trained_families() if family_that_fits(replace(model, family=f.architecture))]
    raise InputError(
        f"{model.name}: no architecture of Hugging Face transformers has these shapes"
        + (f" under the name {model.family}" if model.family else ""),
        allowed=", ".join(fitting) or None,
        hint="such a model trains here; its weights stay in Meshwright's own checkpoints",
    )


def file_names(model: Model, name: str, *, family: ModelFamily) -> tuple[str, ...]:
    """Return the names in files of our tensor `name`: one, or one for each expert of a stack.

    >>> from meshwright.catalog.lookup import model
    >>> mixtral = model("mixtral-8x7b")
    >>> file_names(mixtral, "layers.3.ffn.experts.up", family=family_of(mixtral))[:2]
    ('model.layers.3.block_sparse_moe.experts.0.w3.weight', 'model.layers.3.block_sparse_moe.experts.1.w3.weight')
    """
    if name == "head.weight" and model.tied_embeddings:  # of the last stage, which has its own
        name = "embedding.weight"
    if name == "head.weight" and model.num_labels:
        return (SCORES,)
    if name in OUTSIDE_LAYERS:
        return (OUTSIDE_LAYERS[name],)
    kind, index, place = name.split(".", 2)
    if kind == "predictions" and place in PREDICTIONS:
        return (f"model.layers.{index}.{PREDICTIONS[place]}",)
    place = place.removeprefix("block.") if kind == "predictions" else place
    pattern = f"model.layers.{index}.{family.tensors[place]}"
    if "{expert}" not in pattern:
        return (pattern,)
    assert model.experts is not None
    return tuple(pattern.format(expert=e) for e in range(model.experts.num_experts))


_NOT_READ = (
    re.compile(r"\.rotary_emb\.inv_freq$"),  # old Llama files: follows from the config
    re.compile(r"\.self_attn\.rotary_emb\."),
)


def without_ignored(names: Iterator[str] | set[str], *, model: Model) -> set[str]:
    """Return the `names` of a file that `model` reads.

    It ignores old buffers, the copy of a tied head, the head for the vocabulary beside one that scores, prediction
    modules that it lacks, and the copies of embedding and head in prediction modules that it has.
    """
    kept = {n for n in names if not any(pattern.search(n) for pattern in _NOT_READ)}
    end = model.num_layers + model.num_mtp_layers  # DeepSeek-V3: multi-token prediction is layer L
    kept = {n for n in kept if _layer(n) < end} - prediction_copies(model).keys()
    return kept - {OUTSIDE_LAYERS["head.weight"]} if model.tied_embeddings or model.num_labels else kept


def prediction_copies(model: Model) -> dict[str, str]:
    """Names in files of the copies that prediction modules have of the embedding and the head -> our names."""
    layers = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    return {f"model.layers.{i}.{name}": ours for i in layers for name, ours in PREDICTION_COPIES.items()}


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else -1
