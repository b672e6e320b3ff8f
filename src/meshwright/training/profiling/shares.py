"""Time by category from a trace in Chrome's format (`torch.profiler` exports it). Imports no tensor framework.

The window is the profiled steps. Each instant of it counts once, for the first category in the order of `Category`
that is active then, on any stream (or, without a GPU, on any thread); idle is where none is. So

    sum of shares = 1,   communication = exposed time,   1 - exposed / busy = the overlapped part

On a GPU the device's kernels and copies count, whatever the host does. On a CPU operators count, and
operators that a GEMM, attention, the optimizer or a collective calls have its category.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.training.profiling.categories import DECISIVE, WAIT, Category, category, operator_category

STEP = "meshwright step "
"""Name of the annotation around a profiled step; its number follows."""

DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_EVENTS = {"cpu_op"}
MAX_KERNELS = 15


@dataclass(frozen=True, kw_only=True)
class Event:
    """One kernel or operator: microseconds, on one stream or thread."""

    name: str
    start_us: float
    end_us: float
    lane: tuple[Any, ...]
    category: Category
    self_us: float  # without what it calls on the same thread


def summarize(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `profile/summary.json`. Raises ValueError for a trace without a profiled step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    windows = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e["name"].startswith(STEP) and e.get("cat") == "user_annotation"
    )
    if not windows:
        raise ValueError("the trace holds no profiled step")
    steps = sorted({int(e["name"].removeprefix(STEP)) for e in events if e["name"].startswith(STEP)})
    has_gpu = any(e.get("cat") in DEVICE_EVENTS for e in events)
    found = device_events(events) if has_gpu else host_events(events)
    found = [e for e in found if any(e.start_us < end and e.end_us > start for start, end in windows)]
    return summary_of(found, windows=windows, steps=steps, device="gpu" if has_gpu else "cpu")


def summary_of(
    events: Sequence[Event], *, windows: Sequence[tuple[float, float]], steps: list[int], device: str
) -> dict[str, Any]:
    """The content of `profile/summary.json` for events inside `windows`, in microseconds."""
    total_us = sum(end - start for start, end in windows)
    counted_us, busy_us = counted(events, windows=windows)
    return {
        "steps": steps,
        "device": device,
        "window_s": total_us / 1e6,
        "shares": {c.value: counted_us[c] / total_us for c in Category},
        "communication": {
            "busy_s": busy_us[Category.COMMUNICATION] / 1e6,
            "exposed_s": counted_us[Category.COMMUNICATION] / 1e6,
        },
        "kernels": _largest(events),
        "unknown": _largest(events, only=Category.OTHER),
    }


PASS = re.compile(r"PP:(?P<stage>\d+)(?P<kind>[FBIW])(?P<micro>\d+)")
"""Name that PyTorch's pipeline runtime gives a pass: stage, kind and micro-batch. Sends and receives have others."""


def passes(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Passes of the last profiled step on one rank, in order; seconds from the begin of the step.

    Kinds: F forward, B backward, I gradients of inputs, W gradients of weights. `wait_s` is the part of a pass in which
    it waits for its activations or gradients from another rank. On a GPU a pass lasts from its first to its last kernel
    where the trace has that range, which no wait is part of, and otherwise while the host issues it.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith(STEP) and e.get("cat") == "user_annotation"]
    if not steps:
        return []
    last = max(steps, key=lambda e: float(e["ts"]))
    begin, end = float(last["ts"]), float(last["ts"]) + float(last["dur"])
    named = [(e, match) for e in events if (match := PASS.fullmatch(e["name"])) is not None]
    on_device = [pair for pair in named if pair[0].get("cat") == "gpu_user_annotation"]
    waits = [] if on_device else [(float(e["ts"]), float(e["dur"])) for e in events if e["name"] == WAIT]
    return sorted(
        (
            {
                "stage": int(match["stage"]), "kind": match["kind"], "micro_batch": int(match["micro"]),
                "start_s": (float(e["ts"]) - begin) / 1e6, "end_s": (end_us(e) - begin) / 1e6,
                "wait_s": sum(us for start, us in waits if float(e["ts"]) <= start < end_us(e)) / 1e6,
            }
            for e, match in on_device or named
            if begin <= float(e["ts"]) < end
        ),
        key=lambda p: p["start_s"],
    )  # fmt: skip


def device_events(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Kernels and copies of a GPU."""
    return [
        Event(
            name=e["name"],
            start_us=float(e["ts"]),
            end_us=float(e["ts"]) + float(e["dur"]),
            lane=(e.get("pid"), e.get("tid")),
            category=category(e["name"]),
            self_us=float(e["dur"]),
        )
        for e in events
        if e.get("cat") in DEVICE_EVENTS
    ]


def host_events(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Operators of the host. One called by another on its thread is nested in it and may inherit its category.

    A send or receive of Gloo lasts from its call to the wait for it, with whatever its thread computes meanwhile: a
    receive has a lane of its own, and a send, for which nothing waits, does not count.
    """
    lanes: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for e in events:
        is_annotation = e.get("cat") == "user_annotation" and operator_category(e["name"]) in DECISIVE
        if (e.get("cat") in HOST_EVENTS or is_annotation) and e["name"] != "gloo:send":
            lanes[e.get("pid"), e.get("tid"), e["name"] == "gloo:recv"].append(e)
    return [event for lane, inside in lanes.items() for event in nested_events(inside, lane)]


def nested_events(
    events: list[Mapping[str, Any]],
    lane: tuple[Any, ...],
    *,
    category_of: Callable[[str], Category] = operator_category,
) -> list[Event]:
    """Events of one thread with categories inherited from the calls around them, and their own time."""
    ordered = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    kinds, inner_us = [Category.OTHER] * len(ordered), [0.0] * len(ordered)
    around: list[int] = []
    for i, e in enumerate(ordered):
        while around and end_us(ordered[around[-1]]) <= float(e["ts"]):
            around.pop()
        kinds[i] = category_of(e["name"])
        if around:
            caller = kinds[around[-1]]
            kinds[i] = caller if caller in DECISIVE else kinds[i]
            inner_us[around[-1]] += float(e["dur"])
        around.append(i)
    return [
        Event(
            name=e["name"], start_us=float(e["ts"]), end_us=end_us(e), lane=lane, category=kind,
            self_us=max(0.0, float(e["dur"]) - inside),
        )
        for e, kind, inside in zip(ordered, kinds, inner_us, strict=True)
    ]  # fmt: skip


def end_us(event: Mapping[str, Any]) -> float:
    """End of an event of a trace."""
    return float(event["ts"]) + float(event["dur"])


def counted(
    events: Sequence[Event], *, windows: Sequence[tuple[float, float]]
) -> tuple[dict[Category, float], dict[Category, float]]:
    """Microseconds of `windows` by category: counted once, and busy (whatever else is active then).

    Events that overlap in time within a category count once in both.
    """
    once, busy = dict.fromkeys(Category, 0.0), dict.fromkeys(Category, 0.0)
    order = list(Category)
    edges = np.array(sorted({t for w in windows for t in w} | {t for e in events for t in (e.start_us, e.end_us)}))
    width_us = np.diff(edges)
    inside = np.zeros(len(width_us), dtype=bool)
    for start, end in windows:
        inside |= (edges[:-1] >= start) & (edges[1:] <= end)
    active = np.zeros((len(order), len(width_us)), dtype=bool)
    for i, kind in enumerate(order):
        mine = [e for e in events if e.category is kind]
        change = np.zeros(len(edges))
        np.add.at(change, np.searchsorted(edges, [e.start_us for e in mine]), 1)
        np.add.at(change, np.searchsorted(edges, [e.end_us for e in mine]), -1)
        active[i] = np.cumsum(change)[:-1] > 0
        busy[kind] = float(width_us[active[i] & inside].sum())
    active[order.index(Category.IDLE)] = True  # what nothing else takes
    first = active.argmax(axis=0)
    for i, kind in enumerate(order):
        once[kind] = float(width_us[(first == i) & inside].sum())
    busy[Category.IDLE] = once[Category.IDLE]
    return once, busy


def _largest(events: Iterable[Event], *, only: Category | None = None) -> list[dict[str, Any]]:
    """Names with most time of their own: calls and seconds over all profiled steps."""
    calls: dict[tuple[str, Category], int] = defaultdict(int)
    self_us: dict[tuple[str, Category], float] = defaultdict(float)
    for event in events:
        if event.category is not Category.IDLE and only in (None, event.category):
            calls[event.name, event.category] += 1
            self_us[event.name, event.category] += event.self_us
    largest = sorted(self_us.items(), key=lambda item: -item[1])[:MAX_KERNELS]
    return [
        {"name": name, "category": kind.value, "calls": calls[name, kind], "seconds": us / 1e6}
        for (name, kind), us in largest
    ]
