"""A trained model that answers requests: prompts to tokens, tokens to text, and the times it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.specs.generation import Sampling
from meshwright.training.generation.cache import CachedModel
from meshwright.training.generation.decoding import Completed, OnText, Prompt, Timing, complete
from meshwright.training.generation.requests import Request, tokens_of, turn_end, with_room
from meshwright.training.trained_model import TrainedModel

MAX_SHOWN = 5


@dataclass(kw_only=True)
class TextGenerator:
    """A model with the settings of generation. It keeps the keys and values of the last conversation."""

    trained: TrainedModel
    sampling: Sampling
    max_tokens: int | None = None  # of each completion; None: `DEFAULT_TOKENS`, or what fits
    stops: tuple[str, ...] = ()
    is_beyond: bool = False  # may generate past the trained positions
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.tokenizer = self.trained.require_tokenizer()
        self._cached = CachedModel(self.trained.module)
        self._turn_end = turn_end(self.tokenizer)

    def prompts(self, requests: Sequence[Request]) -> list[Prompt]:
        """All requests as tokens. Raises InputError that names every one that is too long."""
        found, problems = [], []
        for number, request in enumerate(requests):
            tokens = tokens_of(request, self.tokenizer)
            try:
                prompt = with_room(
                    tokens,
                    number=number,
                    max_tokens=self.max_tokens,
                    positions=self.trained.positions,
                    is_beyond=self.is_beyond,
                )
                found.append(prompt)
            except InputError as error:
                problems.append(error)
        if problems:
            more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
            raise InputError("; ".join(p.message for p in problems[:MAX_SHOWN]) + more, hint=problems[0].hint)
        return found

    def answer(
        self,
        requests: Sequence[Request],
        *,
        batch: int = 1,
        on_text: OnText | None = None,
        on_batch: Callable[[Sequence[Completed]], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> tuple[list[Prompt], list[Completed]]:
        """Complete the requests, `batch` at a time; prompts and completions in their order."""
        prompts = self.prompts(requests)
        is_chat = any(not isinstance(request, str) for request in requests)
        turn = self._turn_end
        done = complete(
            self._cached,
            prompts,
            batch=batch,
            on_batch=on_batch,
            sampling=self.sampling,
            ends=frozenset(self.trained.ends + (turn.tokens if is_chat else ())),
            tokenizer=self.tokenizer,
            stops=self.stops + (turn.stops if is_chat else ()),
            on_text=on_text,
            is_cancelled=is_cancelled,
            timing=self.timing,
        )
        return prompts, done
