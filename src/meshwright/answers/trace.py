"""A simulated step as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process holds a track for each pipeline rank, a second one the extra tracks of the caller (optimizer,
collectives of a step). The file is a JSON object in the Chrome trace event format: complete events ("X")
with times in microseconds, and metadata events ("M") that name and order the tracks. Equal input gives equal
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cost.pipeline.graph import EventGraph
from meshwright.cost.pipeline.orders import OpKind
from meshwright.cost.pipeline.simulate import Timeline
from meshwright.errors import InputError
from meshwright.files import write_atomically

PIPELINE_PROCESS, EXTRA_PROCESS = 1, 2

_KINDS = {  # short name, category, and its colour by a name that the trace viewer reserves
    OpKind.FORWARD: ("F", "forward", "thread_state_running"),
    OpKind.BACKWARD_INPUT: ("B", "backward input", "thread_state_runnable"),
    OpKind.BACKWARD_WEIGHT: ("W", "backward weight", "thread_state_iowait"),
    OpKind.BACKWARD: ("BW", "backward", "rail_animation"),
}
_COLORS = {category: color for _, category, color in _KINDS.values()} | {"overlapped pair": "rail_response"}


@dataclass(frozen=True, kw_only=True)
class TrackSpan:
    """A named stretch of time on an extra track."""

    name: str
    start_s: float
    end_s: float
    category: str = "other"


@dataclass(frozen=True, kw_only=True)
class Track:
    """An extra track below the pipeline ranks."""

    name: str
    spans: tuple[TrackSpan, ...]


def write_trace(
    timeline: Timeline,
    *,
    path: str | Path,
    tracks: Sequence[Track] = (),
    details: Mapping[str, str | float] | None = None,
) -> None:
    """Write the trace of `timeline`; `details` (plan, model, cluster) are shown with the trace's metadata.

    The file appears whole or not at all. Raises InputError if it cannot be written.
    """
    events = [_dump(event) for event in trace_events(timeline, tracks=tracks)]
    facts: dict[str, Any] = {
        **(details or {}),
        "schedule": timeline.graph.shape.schedule.value,
        "step_ms": round(timeline.step_s * 1e3, 6),
        "bubble_ratio": round(timeline.bubble_ratio, 6),
    }
    text = '{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[\n%s\n]}\n'
    try:
        write_atomically(Path(path), text % (_dump(facts), ",\n".join(events)))
    except OSError as error:
        raise InputError(
            f"the trace cannot be written: {error.strerror}", got=str(path), allowed="a file in a writable folder"
        ) from None


def trace_events(timeline: Timeline, *, tracks: Sequence[Track] = ()) -> Iterator[dict[str, Any]]:
    """The events of the file, track by track and in order of time."""
    ranks = [f"rank {rank}" for rank in range(timeline.graph.shape.num_ranks)]
    yield from _name_tracks(PIPELINE_PROCESS, "pipeline", ranks)
    yield from _operations(timeline)
    if tracks:
        yield from _name_tracks(EXTRA_PROCESS, "step", [track.name for track in tracks])
    for thread, track in enumerate(tracks):
        for span in sorted(track.spans, key=lambda span: (span.start_s, -span.end_s, span.name)):
            yield _complete(EXTRA_PROCESS, thread, span.name, span.category, span.start_s, span.end_s)


def _operations(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A span for each operation, rank by rank; an overlapped pair is one, with the facts of its backward."""
    graph = timeline.graph
    partner = dict(zip(graph.pair_backward.tolist(), graph.pair_forward.tolist(), strict=True))
    hidden = set(partner.values())
    for op in range(graph.num_ops):
        if op in hidden:
            continue
        name, category = _label(graph, op), _KINDS[OpKind(int(graph.kind[op]))][1]
        if op in partner:
            name, category = f"{_label(graph, partner[op])} & {name}", "overlapped pair"
        rank, stage = int(graph.rank[op]), int(graph.stage[op])
        facts = {"micro_batch": int(graph.micro_batch[op]), "stage": stage, "chunk": _chunk(graph, op)}
        start_s, end_s = float(timeline.start_s[op]), float(timeline.end_s[op])
        yield _complete(PIPELINE_PROCESS, rank, name, category, start_s, end_s, facts)


def _label(graph: EventGraph, op: int) -> str:
    label = f"{_KINDS[OpKind(int(graph.kind[op]))][0]} mb{graph.micro_batch[op]}"
    has_chunks = len(graph.shape.stages_of(0)) > 1
    return f"{label} chunk{_chunk(graph, op)}" if has_chunks else label


def _chunk(graph: EventGraph, op: int) -> int:
    return graph.shape.stages_of(int(graph.rank[op])).index(int(graph.stage[op]))


def _name_tracks(process: int, name: str, tracks: Iterable[str]) -> Iterator[dict[str, Any]]:
    yield _metadata(process, 0, "process_name", name=name)
    yield _metadata(process, 0, "process_sort_index", sort_index=process)
    for thread, track in enumerate(tracks):
        yield _metadata(process, thread, "thread_name", name=track)
        yield _metadata(process, thread, "thread_sort_index", sort_index=thread)


def _metadata(process: int, thread: int, kind: str, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": arguments}


def _complete(
    process: int,
    thread: int,
    name: str,
    category: str,
    start_s: float,
    end_s: float,
    arguments: dict[str, int] | None = None,
) -> dict[str, Any]:
    # Rounding both ends to nanoseconds, not start and length, keeps neighbours from overlapping.
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    event: dict[str, Any] = {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": start_us, "dur": round(end_us - start_us, 3),
    }  # fmt: skip
    if color := _COLORS.get(category):
        event["cname"] = color
    if arguments:
        event["args"] = arguments
    return event


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
