"""Names of our tensors in the files of each family.

Our name of a tensor is its path in the model (`layers.3.attention.query.weight`). The tables of families.toml give the
part after the number of the layer; these are of all families.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FusedTensor:
    """A tensor of a file that holds several of ours, or one in another memory layout. Experts are stacked as ours."""

    parts: tuple[str, ...]  # ours, which follow one another along their outputs
    alternates: bool = False  # their outputs alternate instead: first of each part, second of each ...
    is_transposed: bool = False  # [inputs, outputs]


OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SCORES = "score.weight"
"""The head of a reward model."""
MODULES_TO_SAVE = {"embed_tokens": "embedding", "lm_head": "head"}
"""Modules that PEFT trains whole beside adapters -> names in a run file."""

PREDICTIONS = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
"""Tensors of a multi-token prediction module besides its block, within its layer."""

PREDICTION_COPIES = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
"""Copies of the model's own tensors that files have in every prediction module, with our names."""
