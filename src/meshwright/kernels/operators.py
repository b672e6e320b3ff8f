"""Functions as PyTorch's operators, which a traced graph holds as one call, and backward passes without derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

Backward = TypeVar("Backward", bound=Callable[..., Any])


def operator(
    name: str,
    *,
    fake: Callable[..., Any] | None = None,
    saves: Callable[..., None] | None = None,
    gradients: Callable[..., Any] | None = None,
    overwrites: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function the operator `meshwright::NAME`.

    `fake` takes the same arguments without values and returns empty results; a function without results needs none.
    `saves` and `gradients` are autograd's: the context of a call, and the gradients of its inputs. `overwrites` names
    the arguments that the function changes.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        made = torch.library.custom_op(f"meshwright::{name}", function, mutates_args=overwrites)
        if fake is not None:
            made.register_fake(fake)
        if gradients is not None:
            made.register_autograd(gradients, setup_context=saves)
        return made

    return declare


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the inputs of an operator, which are all tensors, for its backward pass: a `saves`."""
    ctx.save_for_backward(*inputs)


def only_once(backward: Backward) -> Backward:
    """Make `backward` refuse to be differentiated: its results would be constants, as autograd does not see it."""
    return cast(Backward, once_differentiable(backward))
