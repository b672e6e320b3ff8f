"""The fastest route of each operation in a layer of the run, timed on this device before the first training on it.

    candidates   the default, and the routes that are expected to be fast (`architectures.expected_routes`)
    times        of passes of a model one layer deep, of updates for the optimizer; candidates take turns
    choice       a candidate whose median is below the fastest repetition of the default; else the default
    left out     a candidate that fails, and one whose loss or gradient norm is not the default's

Measuring ends after `BUDGET_S`, between two timed functions: operations that are left keep their default. The choice is
kept in the cache folder for the device, its software and the model's shapes. Compiled layers keep their defaults: each
candidate would be compiled.

All processes of a run call `measured_routes` together and get the same result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.engines.base import Measuring
from meshwright.engines.native import machine_measurement
from meshwright.engines.native.fp8 import is_emulated
from meshwright.engines.native.layer_timing import TimedTask, passes_of, random_batch, shallow, timed, update_of
from meshwright.json_values import load_json
from meshwright.kernels.architectures import architecture_of, expected_routes, is_measured
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.operations import OPERATIONS, TRITON
from meshwright.kernels.routes import KernelCall, routes_of
from meshwright.kernels.triton_route import is_interpreted
from meshwright.records.files import now
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.processes import is_several, reduced

BUDGET_S, THOROUGH_S = 10.0, 60.0
FOLDER = "kernel-routes"
ALIKE = 0.05
"""Relative difference of losses and gradient norms: rounding to 8 bits is less."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MeasuredRoutes:
    """The fastest routes by operation, and what a record says about them."""

    routes: Mapping[str, str]
    notes: tuple[str, ...] = ()


def measured_routes(
    run: Run, *, plan: Plan, device: torch.device, measuring: Measuring, routing: KernelRouting
) -> MeasuredRoutes:
    """Return the routes that are kept for `run` on this device, or measure them; none where its defaults suffice."""
    if not _is_wanted(run, device=device):
        return MeasuredRoutes(routes={})
    if run.train.compile:
        return MeasuredRoutes(routes={}, notes=("kernels: not measured, as layers are compiled",))
    key = machine_measurement.key_of(run, plan=plan, device=device)
    path = machine_measurement.kept_at(FOLDER, key)
    kept = None if measuring is Measuring.AGAIN else _read(path)
    if kept is not None:
        return kept
    if measuring is Measuring.NEVER:
        note = "kernels: routes of libraries, as none were measured on this device (--no-measure)"
        return MeasuredRoutes(routes={}, notes=(note,))
    deadline_s = time.perf_counter() + (THOROUGH_S if measuring is Measuring.AGAIN else BUDGET_S)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        found, is_whole = _measure(run, plan=plan, device=device, routing=routing, deadline_s=deadline_s)
    devices.release_memory(device)
    if is_whole and machine_measurement.is_main():
        machine_measurement.keep(path, {"routes": dict(found.routes), "notes": list(found.notes)}, key)
    return found


def _is_wanted(run: Run, *, device: torch.device) -> bool:
    if run.kernels.measure == "off" or run.kernels.tuned is not None or is_emulated(run.precision, device=device):
        return False
    return any(_is_open(op, run, architecture_of(device)) for op in OPERATIONS)


def _is_open(op: str, run: Run, architecture: str) -> bool:
    """True if the run names no route, and no device measured the default, unless the run asks for it all the same."""
    is_asked = run.kernels.measure == "on"
    return op not in run.kernels.routes and (is_asked or not is_measured(op, architecture=architecture))


def _read(path: Path) -> MeasuredRoutes | None:
    """The routes that the first process keeps, as the others have a cache of their own on another host."""
    found: list[MeasuredRoutes | None] = [None]
    if machine_measurement.is_main():
        try:
            kept = load_json(path)["measured"]
            routes = {op: route for op, route in kept["routes"].items() if route in OPERATIONS[op].routes}
            found = [MeasuredRoutes(routes=routes, notes=tuple(map(str, kept["notes"])))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # measuring again mends it
    if is_several():
        dist.broadcast_object_list(found)
    return found[0]


def _measure(
    run: Run, *, plan: Plan, device: torch.device, routing: KernelRouting, deadline_s: float
) -> tuple[MeasuredRoutes, bool]:
    """The routes, and True if every candidate was timed."""
    layer = _Layer(run, plan=plan, device=device, routing=routing)
    candidates = layer.candidates()
    routes: dict[str, str] = {}
    said: list[str] = []
    left: list[str] = []
    is_whole = True
    for op, (default, *others) in candidates.items():
        exact = layer.trial(op, default)
        able = [default]
        for other in others:
            fault = layer.fault(op, other, exact)
            able += [] if fault else [other]
            left += [f"{op} {other}: {fault}"] if fault else []
        if len(able) == 1:
            continue
        samples = timed({name: layer.task(op, name) for name in able}, device, deadline_s=deadline_s)
        if samples is None:
            is_whole = False
            left.append(f"{op}: no time was left")
            continue
        routes[op] = default
        medians = dict(zip(able, reduced(*(statistics.median(samples.seconds[name]) for name in able)), strict=True))
        best = min(medians, key=lambda name: medians[name])
        if medians[best] < reduced(min(samples.seconds[default]))[0]:
            routes[op] = best
        ratios = ", ".join(f"{name} {medians[name] / medians[default]:.2f}" for name in able if name != default)
        said.append(f"{op} {routes[op]} (times over {default}'s: {ratios})")
    notes = [f"kernels: measured on this device at {now()}, one layer: {'; '.join(said)}"] if said else []
    notes += [f"kernels: not measured: {'; '.join(left)}"] if left else []
    return MeasuredRoutes(routes=routes, notes=tuple(notes)), is_whole


class _Layer:
    """A model one layer deep, whose passes and updates take the routes that are asked for."""

    def __init__(self, run: Run, *, plan: Plan, device: torch.device, routing: KernelRouting) -> None:
        self.run, self.device, self.routing = run, device, routing
        assembly = shallow(run, depth=1, micro_batch=plan.micro_batch, device=device)
        self.passes = passes_of(assembly, random_batch(run, micro_batch=plan.micro_batch, device=device))
        self.update = update_of(assembly)
        self.of_updates: frozenset[str] = frozenset()

    def candidates(self) -> dict[str, list[str]]:
        """The default of each operation that is open, and the other routes that serve all of its calls."""
        with using(self.routing.fresh()) as of_passes:
            self.passes()
        with using(self.routing.fresh()) as of_updates:
            self.update()
        self.of_updates = frozenset(call.op for call in of_updates.choices)
        chosen = [*of_passes.choices.values(), *of_updates.choices.values()]
        calls: dict[str, list[KernelCall]] = {}
        for choice in chosen:
            calls.setdefault(choice.call.op, []).append(choice.call)
        defaults = {choice.call.op: choice.route for choice in chosen}
        found = {
            op: [defaults[op], *(r for r in _expected(op, calls[op]) if r != defaults[op])]
            for op in calls
            if _is_open(op, self.run, architecture_of(self.device))
        }
        return {op: routes for op, routes in found.items() if len(routes) > 1}

    def _by(self, op: str, route: str, function: Callable[[], T]) -> T:
        with using(replace(self.routing.fresh(), demanded={**self.routing.demanded, op: route})):
            return function()

    def trial(self, op: str, route: str) -> tuple[float, float]:
        """Loss and gradient norm of a step through `route`, which compiles it."""
        torch.manual_seed(0)  # of dropout
        loss = self._by(op, route, self.passes)
        norm = self._by(op, route, self.update)
        return loss.item(), norm

    def fault(self, op: str, route: str, exact: Sequence[float]) -> str | None:
        """The reason why no process may take `route`; None if it computes what the default does on all of them."""
        try:
            found = self.trial(op, route)
        except Exception as failure:  # kernels and compilers raise what they like, and the next route is tried
            text = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
        else:
            is_alike = all(abs(a - b) <= ALIKE * abs(b) for a, b in zip(found, exact, strict=True))
            names = "loss and gradient norm {:.6g} and {:.6g}"
            text = "" if is_alike else f"{names.format(*found)} where the default has {names.format(*exact)}"
        texts = [text]
        if is_several():
            texts = [""] * dist.get_world_size()
            dist.all_gather_object(texts, text)
        return next(filter(None, texts), None)

    def task(self, op: str, route: str) -> TimedTask:
        """Passes through `route`, or updates after passes."""
        if op in self.of_updates:
            return TimedTask(partial(self._by, op, route, self.update), before=self.passes)
        return TimedTask(partial(self._by, op, route, self.passes), before=self.update)


def _expected(op: str, calls: Sequence[KernelCall]) -> list[str]:
    """Routes of `op` that serve all of `calls` and need no more memory than the planner counts, as references may."""
    routes = routes_of(op)
    return [
        name
        for name in expected_routes(op, architecture=calls[0].architecture)
        if name != "reference"
        and not (name == TRITON and is_interpreted())
        and all(routes[name].serves(call) is None for call in calls)
    ]
