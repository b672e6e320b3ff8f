"""The processes that save and read together. An error in one is raised in all, so that none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Peers:
    """All processes of the run. `group`: their process group; None: the default group, where there is one."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among them."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def count(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    def share(self, names: list[str]) -> list[str]:
        """This process's part of `names`."""
        return sorted(names)[self.rank :: self.count]

    def gathered(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` in every process and return all results. Raises in all the first OSError that one met."""
        result, failure = None, None
        try:
            result = action()
        except OSError as error:
            failure = (error.errno, error.strerror or str(error))
        outcomes = self.gathered((result, failure))
        for _, failed in outcomes:
            if failed is not None:
                raise OSError(*failed)
        return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` in the first process; the others wait for it. Raises in all the OSError that it met."""
        self.together(action if self.rank == 0 else lambda: None)
