"""Time for which the steps of a training waited for its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stalls:
    """Seconds of every wait."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._reported = 0

    @contextmanager
    def during(self) -> Iterator[None]:
        """Count the time of the context, also where it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append(time.perf_counter() - start_s)

    def new_s(self) -> float:
        """Seconds since the last call."""
        new, self._reported = self.seconds[self._reported :], len(self.seconds)
        return sum(new)
