"""Events of a training, for a program that keeps a clock or a log of its own. Imports no tensor framework.

A subclass overrides the events that it wants. Every process has a copy, which was pickled to it, and calls the events
in the order of this file; a program that writes files does so in the process of rank 0. Samples are sequences: those
that the training has consumed, counted by the training loop alone.
"""

from __future__ import annotations

import os
import pickle
from base64 import b64decode, b64encode
from functools import cache

from meshwright.records.training import Ending

VARIABLE = "MESHWRIGHT_OBSERVER"


class TrainingObserver:
    """Receives the events of one process of a training. Ignores all of them."""

    def initializing(self, *, rank: int) -> None:
        """Process `rank` begins: nothing is built yet."""

    def opening_data(self) -> None:
        """All processes have built the model and taken their warm-up steps; no data has been opened."""

    def training(self, *, num_samples: int) -> None:
        """Training steps follow, after `num_samples`: at the start, and after an evaluation that does not end it."""

    def evaluating(self, *, num_samples: int) -> None:
        """An evaluation begins."""

    def evaluated(self, *, num_samples: int, loss: float) -> None:
        """An evaluation has ended; `loss` is the validation loss that decides."""

    def ended(self, *, num_samples: int, ending: Ending) -> None:
        """The last step is behind the training. Not called where it raises an error."""


def observer_variable(observer: TrainingObserver) -> dict[str, str]:
    """Return the variable by which a process of another program gets its copy of `observer`."""
    return {VARIABLE: b64encode(pickle.dumps(observer)).decode("ascii")}


@cache
def observer_of_environment() -> TrainingObserver:
    """Return the observer of this process, which is one that ignores all events if its parent gave it none."""
    given = os.environ.get(VARIABLE)
    return TrainingObserver() if given is None else pickle.loads(b64decode(given))
