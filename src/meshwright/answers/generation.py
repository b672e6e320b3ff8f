"""Completions of prompts by a trained model, with the settings, the times and where they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.answers.quantities import rate, seconds
from meshwright.json_values import jsonable
from meshwright.result import Result
from meshwright.specs.generation import GenerationEnding


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt and its continuation."""

    prompt: str | Sequence[Mapping[str, Any]]  # a text, or the messages of a conversation
    text: str
    tokens: tuple[int, ...]  # with the end token, where there is one
    num_prompt_tokens: int
    ending: GenerationEnding
    adapter: str | None = None  # the one of several that computed


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Generation(Result):
    """The completions of one call.

    Attributes:
        model: name, weights, step, number format, tokenizer and positions of the model.
        settings: sampling, most tokens, stop strings, batch.
        completions: one for each prompt, in order. Several adapters complete all prompts, one adapter after another.
        time_s: to the first token (of each batch: low, median, high) and of the tokens after it.
        rates: tokens per second after the first ones, of all prompts together.
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    completions: tuple[Completion, ...]
    time_s: Mapping[str, Any]
    rates: Mapping[str, Any]
    device: Mapping[str, Any]
    software: Mapping[str, str]
    command: tuple[str, ...] = ()
    git_commit: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text

    def to_dict(self) -> dict[str, Any]:
        return jsonable(
            {key: getattr(self, key) for key in self.__dataclass_fields__} | {"completions": self.to_rows()}
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each completion."""
        return [asdict(c) | {"num_tokens": len(c.tokens), "ending": c.ending.value} for c in self.completions]

    def summary(self) -> str:
        """Return the times and the rates."""
        first, num_tokens = self.time_s["first_token"], sum(len(c.tokens) for c in self.completions)
        num_prompt_tokens = sum(c.num_prompt_tokens for c in self.completions)
        parts = [f"{num_prompt_tokens:,} prompt tokens", f"first token after {seconds(first['median'])}"]
        speed = self.rates["tokens_per_s"]
        parts.append(f"{num_tokens:,} tokens" + (f", {rate(speed)} tokens/s" if speed else ""))
        return "; ".join(parts)
