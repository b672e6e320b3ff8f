"""The validation losses of a run so far: the best one, and evaluations without improvement.

`best` is the lowest loss; its checkpoint is kept by `train.checkpoint.keep_best`. Patience has a bar of its own: an
evaluation improves if its loss is below the bar by more than `min_delta`, and its loss is then the bar. Small steps
below it that never add up to `min_delta` do not count. A loss that is not a number improves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.specs.run import Evaluate


@dataclass(kw_only=True)
class ValidationHistory:
    """The same on all processes, and part of every checkpoint's manifest."""

    best_loss: float | None = None
    best_step: int | None = None  # steps taken
    bar: float | None = None
    num_worse: int = 0  # evaluations since the last improvement on `bar`

    def note(self, loss: float, *, num_steps: int, min_delta: float) -> bool:
        """Add an evaluation; True if its loss is the lowest so far.

        >>> history = ValidationHistory()
        >>> [history.note(loss, num_steps=i, min_delta=0.1) for i, loss in enumerate([2.0, 1.95, 1.8, 1.9])]
        [True, True, True, False]
        >>> history.best_step, history.num_worse
        (2, 1)
        """
        improves = not math.isnan(loss) and (self.bar is None or loss < self.bar - min_delta)
        self.bar, self.num_worse = (loss, 0) if improves else (self.bar, self.num_worse + 1)
        is_best = not math.isnan(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = loss, num_steps
        return is_best

    def is_exhausted(self, evaluate: Evaluate | None) -> bool:
        """True if as many evaluations as the patience allows did not improve."""
        patience = None if evaluate is None else evaluate.patience
        return patience is not None and self.num_worse >= patience

    def state(self) -> dict[str, Any]:
        """Values for a manifest."""
        return asdict(self)

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the values of a manifest; an old one has none."""
        fresh = ValidationHistory(**(state or {}))
        self.best_loss, self.best_step, self.bar, self.num_worse = (
            fresh.best_loss, fresh.best_step, fresh.bar, fresh.num_worse,
        )  # fmt: skip
