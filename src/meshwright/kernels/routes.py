"""A route of an operation, a call to be served, and a refusal with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from meshwright.errors import UnknownNameError
from meshwright.kernels.operations import OPERATIONS

ANY = "any"
"""A flag: some call of the operation, of shapes that are not known yet. Conditions of shapes are not asked."""


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """The properties of an operation's call that the choice of a route depends on.

    `shapes` is empty while a graph is traced, where sizes may be symbols. `dtypes` are names as PyTorch has
    them ("bfloat16"), `device` its device type, `architecture` a key of `architectures.ARCHITECTURES` or
    "cpu". `flags` are further conditions: "backward" (a gradient is wanted), "deterministic", "subclass" (a
    tensor has a subclass of Tensor), "forward_mode" (derivatives are taken with the values), and the
    operation's conditions.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    device: str
    architecture: str
    flags: frozenset[str] = frozenset()

    @property
    def has_shapes(self) -> bool:
        """Return True if `shapes` are known."""
        return bool(self.shapes) and ANY not in self.flags

    @property
    def is_traced(self) -> bool:
        """Return True if the call is part of a graph that is compiled."""
        return not self.shapes and ANY not in self.flags


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Reason why a route cannot serve a call."""

    reason: str


def always_serves(call: KernelCall) -> Refusal | None:
    """No refusal: for references."""
    return None


@dataclass(frozen=True)
class Route:
    """One implementation of an operation. `function` takes the arguments of the operation's public function.

    The one named `reference` is the specification in plain PyTorch.
    """

    function: Callable[..., Any]
    serves: Callable[[KernelCall], Refusal | None] = always_serves


def routes_of(op: str) -> Mapping[str, Route]:
    """All routes of operation `op` by name, the reference first. Raises UnknownNameError."""
    operation = OPERATIONS.get(op)
    if operation is None:
        raise UnknownNameError("operation", op, known=OPERATIONS)
    return cast(Mapping[str, Route], import_module(operation.module).ROUTES[op])
