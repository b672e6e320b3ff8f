"""The loop over tokens for a batch of prompts.

A sequence that has ended leaves the batch at once. The tokens of a prompt do not depend on the others of its batch,
but for rounding: a GEMM of more rows may sum in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.specs.generation import GenerationEnding, Sampling
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.generation.cache import CachedModel
from meshwright.training.generation.sampling import Sampler
from meshwright.training.generation.text import TextStream

OnText = Callable[[int, str], None]
"""Called with the number of a prompt and the next part of its text."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens to continue, and at most `max_tokens` after them."""

    number: int
    tokens: Sequence[int]
    max_tokens: int
    limit: GenerationEnding = GenerationEnding.MAX_TOKENS  # what sets `max_tokens`
    ends: Collection[int] = ()  # tokens after which the text ends
    stops: tuple[str, ...] = ()  # texts before which it ends


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Continuation of one prompt. The end token is in `tokens`, a stop string not in `text`."""

    number: int
    tokens: tuple[int, ...]
    text: str
    ending: GenerationEnding
    adapter: str | None = None  # of several, the one that computed


@dataclass(kw_only=True)
class Timing:
    """Times of batches."""

    first_s: list[float] = field(default_factory=list)  # of each batch: from its start to its first tokens
    decode_s: float = 0.0  # all later tokens
    later_tokens: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first ones per second, of all sequences together; None where there are none."""
        return self.later_tokens / self.decode_s if self.later_tokens and self.decode_s else None


class _Row:
    """One sequence of a batch."""

    def __init__(self, prompt: Prompt, *, tokenizer: Tokenizer | None) -> None:
        self.prompt = prompt
        self.stream = None if tokenizer is None else TextStream(tokenizer, stops=prompt.stops)
        self.tokens: list[int] = []
        self.ending: GenerationEnding | None = None

    def take(self, token: int) -> str:
        """Append a token; the new text. Sets `ending` where this is the last one."""
        self.tokens.append(token)
        if token in self.prompt.ends:
            self.ending = GenerationEnding.END_TOKEN
            return "" if self.stream is None else self.stream.finish()
        text = "" if self.stream is None else self.stream.push(token)
        if self.stream is not None and self.stream.is_stopped:
            self.ending = GenerationEnding.STOP
        elif len(self.tokens) == self.prompt.max_tokens:
            self.ending = self.prompt.limit
            if self.stream is not None:
                text += self.stream.finish()
                self.ending = GenerationEnding.STOP if self.stream.is_stopped else self.ending
        return text

    def completed(self) -> Completed:
        """The sequence as it is now; interrupted where it has not ended."""
        return Completed(
            number=self.prompt.number,
            tokens=tuple(self.tokens),
            text="" if self.stream is None else self.stream.text,
            ending=self.ending or GenerationEnding.INTERRUPTED,
        )


def complete_batch(
    cached: CachedModel,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    tokenizer: Tokenizer | None,
    on_text: OnText | None = None,
    is_cancelled: Callable[[], bool] | None = None,
    timing: Timing | None = None,
) -> list[Completed]:
    """Continue all prompts at once; completions in their order.

    Without a tokenizer there is no text, and no stop string.
    `is_cancelled` is asked after every token; then sequences that have not ended are interrupted.
    """
    timing = Timing() if timing is None else timing
    rows = [_Row(prompt, tokenizer=tokenizer) for prompt in prompts]
    begin_s = time.perf_counter()
    logits_BV = cached.start([prompt.tokens for prompt in prompts])
    sampler = Sampler(
        sampling,
        tokens=[prompt.tokens for prompt in prompts],
        numbers=[prompt.number for prompt in prompts],
        vocab=logits_BV.shape[1],
    )
    tokens = sampler.choose(logits_BV)
    first_s = time.perf_counter()
    timing.first_s.append(first_s - begin_s)
    live = rows
    while True:
        for row, token in zip(live, tokens, strict=True):
            text = row.take(token)
            if text and on_text is not None:
                on_text(row.prompt.number, text)
        going = [i for i, row in enumerate(live) if row.ending is None]
        if not going or (is_cancelled is not None and is_cancelled()):
            break
        if len(going) < len(live):
            cached.keep(going)
            sampler.keep(going)
        live, tokens = [live[i] for i in going], [tokens[i] for i in going]
        tokens = sampler.choose(cached.append(tokens))
        timing.later_tokens += len(tokens)
    timing.decode_s += time.perf_counter() - first_s
    return [row.completed() for row in rows]


def complete(
    cached: CachedModel,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    on_batch: Callable[[Sequence[Completed]], None] | None = None,
    **settings: Any,
) -> list[Completed]:
    """Continue prompts, `batch` at a time, the longest first: prompts of like length need little padding.

    Completions are in the order of `prompts`. `on_batch` gets each batch's completions; `settings` as in
    `complete_batch`.
    """
    batch = 1 if cached.rotates_by_length else batch
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens))
    completed: dict[int, Completed] = {}
    for start in range(0, len(order), batch):
        places = sorted(order[start : start + batch])
        done = complete_batch(cached, [prompts[i] for i in places], **settings)
        completed |= dict(zip(places, done, strict=True))
        if on_batch is not None:
            on_batch(done)
    return [completed[i] for i in range(len(prompts))]
