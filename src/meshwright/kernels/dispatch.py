"""Choice of the route that serves a call, with its reason.

    1. the run file's `kernels:` block      a route that cannot serve the call is an InputError
    2. the tuned table of this device       a route that was measured for exactly this call
    3. measured                             the fastest route of the operation in a layer of the run on this device
    4. the default of the architecture      the first of `data/defaults.toml` that can serve it, Triton's where a device
                                            measured them; in a compiled graph the reference, where that file says that
                                            the compiler makes it faster

Every choice is collected with the routes that were refused and their reasons, so that a record can state them. A choice
is made once for each distinct call: in training that is once a shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels.architectures import architecture_of, compiled_operations, default_routes
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.routes import KernelCall, Refusal, routes_of
from meshwright.kernels.tuned import TunedCall, TunedTable

MOST_CHOICES = 4096
"""Most calls whose choice is held. Shapes that depend on an expert's tokens may make every call a new one."""

RUN_FILE, TUNED, MEASURED, DEFAULT = "run file", "tuned", "measured", "default"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The route of a call, where it comes from (`why`), and the preferred routes that could not serve it."""

    call: KernelCall
    route: str
    why: str
    refused: tuple[tuple[str, Refusal], ...] = ()


@dataclass(frozen=True, kw_only=True)
class KernelRouting:
    """Inputs of choices, and the choices that were made.

    `demanded` are routes by operation, from the run file; `tuned` is the table of this device; `measured` are the
    fastest routes by operation. `choices` holds the latest, `rows` counts all of an operation, route and reason.
    `facts` are numbers by operation that its route chose.
    """

    demanded: Mapping[str, str] = field(default_factory=dict)
    tuned: TunedTable | None = None
    measured: Mapping[str, str] = field(default_factory=dict)
    choices: dict[KernelCall, Choice] = field(default_factory=dict)
    rows: dict[tuple[Any, ...], int] = field(default_factory=dict)
    facts: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op, route in self.demanded.items():
            if op not in OPERATIONS:
                raise UnknownNameError("operation", op, known=OPERATIONS)
            if route not in OPERATIONS[op].routes:
                raise UnknownNameError(f"route of {op}", route, known=OPERATIONS[op].routes)

    def choice(self, call: KernelCall) -> Choice:
        """The choice for `call`, made at its first use."""
        found = self.choices.get(call)
        if found is None:
            if len(self.choices) >= MOST_CHOICES:
                self.choices.clear()
            found = self.choices[call] = _chosen(call, self)
            row = _row(found)
            self.rows[row] = self.rows.get(row, 0) + 1
        return found

    def fresh(self) -> KernelRouting:
        """Return the same inputs without choices, for calls that no record counts."""
        return KernelRouting(demanded=self.demanded, tuned=self.tuned, measured=self.measured)


_active = KernelRouting()


@contextmanager
def using(routing: KernelRouting) -> Iterator[KernelRouting]:
    """Choose by `routing` while the context is open."""
    global _active
    before, _active = _active, routing
    try:
        yield routing
    finally:
        _active = before


def active() -> KernelRouting:
    """The routing in use."""
    return _active


def note_facts(op: str, **facts: int) -> None:
    """Keep numbers that a route of `op` chose by itself, for the record; later ones replace them."""
    _active.facts[op] = facts


def choose(op: str, *tensors: Tensor, flags: frozenset[str] = frozenset()) -> str:
    """Name the route of operation `op` for `tensors`, the first of which has the device. `flags`: see `KernelCall`."""
    device = tensors[0].device
    if torch.compiler.is_compiling():
        # Sizes may be symbols, and a graph serves many: routes are asked without them.
        return _while_tracing(op, device.type, tuple([str(t.dtype) for t in tensors]), flags)
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        flags |= {"subclass"}
    if forward_ad._current_level >= 0:
        flags |= {"forward_mode"}
    shapes = tuple(tuple(t.shape) for t in tensors)
    return _route(op, device, shapes, tuple(_name(t.dtype) for t in tensors), flags)


def _while_tracing(op: str, device: str, dtypes: tuple[str, ...], flags: frozenset[str]) -> str:
    """The name of the route that a traced graph calls."""
    return _route(op, torch.device(device), (), tuple(name.removeprefix("torch.") for name in dtypes), flags)


def _route(
    op: str, device: torch.device, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], flags: frozenset[str]
) -> str:
    if torch.are_deterministic_algorithms_enabled():
        flags |= {"deterministic"}
    call = KernelCall(
        op=op, shapes=shapes, dtypes=dtypes, device=device.type, architecture=architecture_of(device), flags=flags
    )
    return _active.choice(call).route


# `torch.compiler.assume_constant_result` sets this, and imports the compiler, which takes 0.6 s.
_while_tracing._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  # ty: ignore[missing-attribute]


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chosen(call: KernelCall, routing: KernelRouting) -> Choice:
    routes = routes_of(call.op)
    name, tuned = routing.demanded.get(call.op), routing.tuned
    if name is not None:
        refusal = routes[name].serves(call)
        if refusal is not None:
            able = [other for other, route in routes.items() if route.serves(call) is None]
            raise InputError(
                f"kernels.{call.op}: route {name} cannot serve this call: {refusal.reason}",
                got=describe(call), allowed=", ".join(able), hint=f"leave kernels.{call.op} out to have one chosen",
            )  # fmt: skip
        return Choice(call=call, route=name, why=RUN_FILE)
    refused: list[tuple[str, Refusal]] = []
    exact = None if tuned is None else tuned.routes.get(
        TunedCall(op=call.op, shapes=call.shapes, dtypes=call.dtypes)
    )  # fmt: skip
    candidates = [] if exact is None else [(exact, TUNED)]
    if call.op in routing.measured and not call.is_traced:  # no compiled layer was timed
        candidates.append((routing.measured[call.op], MEASURED))
    if call.is_traced and call.op in compiled_operations(call.architecture):
        candidates.append(("reference", DEFAULT))
    candidates += [(n, DEFAULT) for n in default_routes(call.op, architecture=call.architecture)]
    for name, why in candidates:
        refusal = routes[name].serves(call)
        if refusal is None:
            return Choice(call=call, route=name, why=why, refused=tuple(refused))
        refused.append((name, refusal))
    reasons = "; ".join(f"{name}: {refusal.reason}" for name, refusal in refused)
    raise InputError(f"no route serves {describe(call)}", got=reasons)


def describe(call: KernelCall) -> str:
    """The call as `op [shapes] dtypes on architecture, flags`."""
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in call.shapes) or "any shape"
    flags = "".join(f", {flag}" for flag in sorted(call.flags))
    return f"{call.op} [{shapes}] {' '.join(dict.fromkeys(call.dtypes))} on {call.architecture}{flags}"


def _row(choice: Choice) -> tuple[Any, ...]:
    refused = tuple((name, refusal.reason) for name, refusal in choice.refused)
    return choice.call.op, choice.route, choice.why, choice.call.architecture, refused


def summary(routing: KernelRouting) -> tuple[dict[str, Any], ...]:
    """The choices for a record: one row for each operation, route and reason, with the number of calls that differ."""
    return tuple(
        {"op": op, "route": route, "why": why, "architecture": where, "calls": count,
         "refused": [{"route": name, "reason": reason} for name, reason in refused],
         **routing.facts.get(op, {})}
        for (op, route, why, where, refused), count in routing.rows.items()
    )  # fmt: skip
