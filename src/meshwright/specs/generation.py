"""Settings of text generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token. The filters work in the order of the fields, as in transformers."""

    repetition_penalty: float = 1.0  # logits of tokens that are there already: divided by it, or multiplied below 0
    temperature: float = 0.0  # 0: the token with the largest logit
    top_k: int | None = None  # only the most probable tokens, so many
    top_p: float | None = None  # only the most probable tokens that together reach this probability
    min_p: float | None = None  # only tokens with at least this share of the probability of the most probable one
    seed: int = 0  # prompt number i draws from a random stream of its own


class GenerationEnding(StrEnum):
    """Reason why a completion ends."""

    END_TOKEN = "end_token"  # the model has ended its text
    STOP = "stop"  # a stop string
    MAX_TOKENS = "max_tokens"
    POSITIONS = "positions"  # the last position that the model is trained for
    INTERRUPTED = "interrupted"  # by the user
