"""A trained model that answers requests: prompts to tokens, tokens to text, and the times it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.errors import InputError
from meshwright.specs.generation import Sampling
from meshwright.training.data.tokenizer import TurnEnd, turn_end
from meshwright.training.generation.cache import CachedModel
from meshwright.training.generation.decoding import Completed, OnText, Prompt, Timing, complete
from meshwright.training.generation.requests import Request, room_for, tokens_of
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

    def use_adapter(self, name: str | None) -> None:
        """Compute with another adapter of the model; None: with the base. Raises InputError for an unknown name."""
        if self.trained.adapters is not None:
            self.trained.adapters.use(name)
            self._cached.clear()
        elif name is not None:
            raise InputError("the model was loaded without named adapters", got=name, hint="--adapter NAME=FOLDER")

    def close(self) -> None:
        """Restore the model."""
        self._cached.close()

    def prompts(self, requests: Sequence[Request]) -> list[Prompt]:
        """Return all requests as tokens. Raises InputError that names every request that is too long."""
        found, problems = [], []
        for number, request in enumerate(requests):
            try:
                found.append(self._prompt(request, number))
            except InputError as error:
                problems.append(error)
        if problems:
            more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
            raise InputError("; ".join(p.message for p in problems[:MAX_SHOWN]) + more, hint=problems[0].hint)
        return found

    def _prompt(self, request: Request, number: int) -> Prompt:
        tokens = tokens_of(request, self.tokenizer)
        positions = None if self.is_beyond else self.trained.positions
        room, limit = room_for(tokens, number=number, max_tokens=self.max_tokens, positions=positions)
        turn = TurnEnd() if isinstance(request, str) else self._turn_end
        return Prompt(
            number=number,
            tokens=tokens,
            max_tokens=room,
            limit=limit,
            ends=frozenset(self.trained.ends + turn.tokens),
            stops=self.stops + turn.stops,
        )

    def answer(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int = 1,
        on_text: OnText | None = None,
        on_batch: Callable[[Sequence[Completed]], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[Completed]:
        """Complete the prompts, `batch` at a time; completions are in their order."""
        done = complete(
            self._cached,
            prompts,
            batch=batch,
            on_batch=on_batch,
            sampling=self.sampling,
            tokenizer=self.tokenizer,
            on_text=on_text,
            is_cancelled=is_cancelled,
            timing=self.timing,
        )
        adapters = self.trained.adapters
        return done if adapters is None else [replace(each, adapter=adapters.used) for each in done]
