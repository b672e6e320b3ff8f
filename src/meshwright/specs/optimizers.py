"""Optimizers by name: their own settings, and the bytes of their states.

    adamw        two states; Loshchilov and Hutter 2019, arXiv 1711.05101
    adamw8bit    two states of a byte each, rounded in blocks; Dettmers et al. 2021, arXiv 2110.02861
    lion         one state, and an update of signs; Chen et al. 2023, arXiv 2302.06675
    muon         one state and an orthogonalized update for the matrices of hidden layers, AdamW for embedding, head
                 and vectors; Jordan 2024 (kellerjordan.github.io/posts/muon), Liu et al. 2025, arXiv 2502.16982

An update reads and writes master and states, reads the fp32 gradient twice (norm and update), and writes the weight in
16 bits: 18 bytes a parameter, plus twice the bytes of the states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshwright.specs.precision import STATE_BLOCK

UPDATE_BYTES = 18.0
"""Moved by an update for each parameter, states not counted."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """One optimizer: the keys of a run file that not every optimizer has, and bytes per parameter."""

    keys: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)  # of `keys`, where they differ from AdamW's
    state_bytes: float = 8.0
    adamw_bytes: float = 0.0  # more for each parameter of embedding, head and vectors
    package: str | None = None  # that it needs beside PyTorch

    @property
    def update_bytes(self) -> float:
        """Bytes that an update of fp32 masters reads and writes per parameter."""
        return UPDATE_BYTES + 2 * self.state_bytes


OPTIMIZERS = {
    "adamw": OptimizerTraits(keys=("betas", "epsilon", "states")),
    "adamw8bit": OptimizerTraits(
        keys=("betas", "epsilon"), state_bytes=2 * (1 + 4 / STATE_BLOCK), package="torchao"
    ),
    "lion": OptimizerTraits(
        keys=("betas",), defaults={"betas": (0.9, 0.99)}, state_bytes=4.0, package="lion_pytorch"
    ),
    "muon": OptimizerTraits(
        keys=(
            "betas", "epsilon", "momentum", "nesterov", "newton_schulz_steps", "adjust_learning_rate",
            "adamw_learning_rate",
        ),
        state_bytes=4.0,
        adamw_bytes=4.0,
    ),
}  # fmt: skip

OWN_KEYS = tuple(dict.fromkeys(key for traits in OPTIMIZERS.values() for key in traits.keys))
"""Keys that at least one optimizer does not have."""
