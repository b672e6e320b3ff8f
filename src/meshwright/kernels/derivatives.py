"""Second derivatives of operations whose backward pass autograd does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.autograd.function import once_differentiable

Backward = TypeVar("Backward", bound=Callable[..., Any])


def only_once(backward: Backward) -> Backward:
    """Make `backward` refuse to be differentiated: its results would be constants."""
    return cast(Backward, once_differentiable(backward))
