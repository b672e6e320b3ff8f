"""Replicas of an engine's batch interface: one process each, pinned, given their shares of a batch at the same moment.

A batch begins when all replicas have their prompts and have answered the warm-up, and ends with the last replica.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.bench.batch.engines import EngineRequest
from meshwright.bench.serving.offline import LengthPair, OfflinePoint, extrapolation
from meshwright.bench.serving.servers.processor import thread_times, wait_ratio
from meshwright.bench.serving.servers.running import ServerStartError, end_of
from meshwright.json_values import parse_json
from meshwright.records.files import now
from meshwright.records.serving import Load, ServingPoint, token_rates

STOP_S = 5.0


class ReplicaFailedError(Exception):
    """A replica could not answer, with the reason."""


@dataclass(frozen=True, kw_only=True)
class BatchBenchRequest:
    """Request of one `bench offline --engine NAME`. `environments` has one mapping for each replica."""

    engine: str
    load: EngineRequest
    pairs: tuple[LengthPair, ...]
    num_requests: int  # of a batch, over all replicas
    num_warmup: int
    environments: tuple[Mapping[str, str], ...]
    folder: Path  # of the logs
    start_timeout_s: float
    timeout_s: float  # of one batch
    extrapolate_to: int | None = None
    seed: int = 0


@dataclass(kw_only=True)
class EngineReplica:
    """One process. Its answers come through a thread, so that a wait can have a limit."""

    number: int
    process: subprocess.Popen[str]
    log: Path
    answers: queue.Queue[str | None] = field(default_factory=queue.Queue)
    software: Mapping[str, str] = field(default_factory=dict)
    load_s: float = 0.0
    num_asked: int = 0
    reader: threading.Thread | None = None

    def ask(self, **asked: Any) -> None:
        """Send a request. Raises ReplicaFailedError when the process has ended."""
        assert self.process.stdin is not None
        self.num_asked += 1
        try:
            self.process.stdin.write(json.dumps(asked | {"id": self.num_asked}) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise ReplicaFailedError(self._ended()) from None

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Wait for the answer to the last request. Raises ReplicaFailedError with the reason of the failure.

        Answers to earlier requests, which came too late, are dropped.
        """
        found: dict[str, Any] = {"id": None}
        while found["id"] != self.num_asked:
            try:
                line = self.answers.get(timeout=max(deadline_s - time.monotonic(), 0.001))
            except queue.Empty:
                raise ReplicaFailedError(f"replica {self.number} gave no answer in time") from None
            if line is None:
                self.answers.put(None)
                raise ReplicaFailedError(self._ended())
            found = parse_json(line)
        if found["event"] == "failed":
            hint = f" ({found['hint']})" if found.get("hint") else ""
            raise ReplicaFailedError(f"replica {self.number}: {found['reason']}{hint}")
        return found

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_S)
        return f"replica {self.number} ended with exit code {self.process.returncode}: {end_of(self.log)}"


@contextmanager
def started_replicas(request: BatchBenchRequest) -> Iterator[list[EngineReplica]]:
    """Start all replicas, wait until each has loaded the model, and end them afterwards.

    Raises ServerStartError when one cannot load it.
    """
    replicas: list[EngineReplica] = []
    try:
        for number, environment in enumerate(request.environments, start=1):
            replicas.append(_start(request, number, environment))
        deadline_s = time.monotonic() + request.start_timeout_s
        for replica in replicas:
            scratch = request.load.scratch / f"replica-{replica.number}"
            scratch.mkdir(parents=True, exist_ok=True)
            replica.ask(do="load", request=asdict(request.load) | {"scratch": str(scratch)})
        for replica in replicas:
            loaded = replica.answer(deadline_s)
            replica.software, replica.load_s = loaded["software"], loaded["load_s"]
        yield replicas
    except ReplicaFailedError as error:
        raise ServerStartError(
            f"the engine {request.engine} cannot load the model: {error}", hint=f"logs are in {request.folder}"
        ) from None
    finally:
        for replica in replicas:
            _stop(replica)


def _start(request: BatchBenchRequest, number: int, environment: Mapping[str, str]) -> EngineReplica:
    folder = request.folder / f"replica-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.bench.batch.worker", request.engine],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True,
            env=os.environ | dict(environment),
        )  # fmt: skip
    replica = EngineReplica(number=number, process=process, log=log)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            replica.answers.put(line)
        replica.answers.put(None)

    replica.reader = threading.Thread(target=read, daemon=True)
    replica.reader.start()
    return replica


def _stop(replica: EngineReplica) -> None:
    """End a process with all that it started."""
    assert replica.process.stdin is not None
    with suppress(BrokenPipeError, OSError):
        replica.process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        replica.process.wait(timeout=STOP_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(replica.process.pid, signal.SIGKILL)
    replica.process.wait()
    if replica.reader is not None:
        replica.reader.join()
    if replica.process.stdout is not None:
        replica.process.stdout.close()


def measure_batches(
    request: BatchBenchRequest, replicas: Sequence[EngineReplica], *, done: Callable[[OfflinePoint], None]
) -> tuple[OfflinePoint, ...]:
    """Measure all pairs. A pair that cannot be run has the reason as its refusal; the others are still measured."""
    found = []
    for pair in request.pairs:
        started = now()
        try:
            point = _measured(request, replicas, pair, started)
        except ReplicaFailedError as error:
            point = _not_measured(request, len(replicas), pair, started, str(error))
        found.append(point)
        done(point)
    return tuple(found)


def _measured(
    request: BatchBenchRequest, replicas: Sequence[EngineReplica], pair: LengthPair, started: str
) -> OfflinePoint:
    deadline_s = time.monotonic() + request.timeout_s
    sizes = [len(range(i, request.num_requests, len(replicas))) for i in range(len(replicas))]
    for replica, size in zip(replicas, sizes, strict=True):
        replica.ask(
            do="prepare", input_tokens=pair.input_tokens, output_tokens=pair.output_tokens, requests=size,
            warmup=min(request.num_warmup, size), seed=f"{request.seed} {pair.name} {replica.number}",
        )  # fmt: skip
    _all_answers(replicas, deadline_s)
    before = [thread_times(replica.process.pid) for replica in replicas]
    begin_s = time.perf_counter()
    for replica in replicas:
        replica.ask(do="go")
    answers = _all_answers(replicas, deadline_s)
    wall_s = time.perf_counter() - begin_s
    after = [thread_times(replica.process.pid) for replica in replicas]
    waits = [w for b, a in zip(before, after, strict=True) if (w := wait_ratio(b, a)) is not None]
    inputs, outputs, num_ok, num_short = (
        sum(answer[name] for answer in answers) for name in ("input_tokens", "output_tokens", "num_ok", "num_short")
    )
    point = ServingPoint(
        load=Load(concurrency=request.num_requests), repeat=1, started=started, num_requests=request.num_requests,
        num_short=num_short, peak_in_flight=request.num_requests, server_wait_ratio=max(waits, default=None),
        **token_rates(wall_s=wall_s, done=num_ok, num_input=inputs, num_output=outputs),
    )  # fmt: skip
    return OfflinePoint(
        pair=pair,
        num_replicas=len(replicas),
        point=point,
        by_replica=tuple(answer["output_tokens"] / wall_s for answer in answers),
        extrapolated=extrapolation(point, measured=len(replicas), wanted=request.extrapolate_to),
    )


def _all_answers(replicas: Sequence[EngineReplica], deadline_s: float) -> list[dict[str, Any]]:
    """One answer of each replica. Raises the first failure after all have answered, so that none is left behind."""
    found, failures = [], []
    for replica in replicas:
        try:
            found.append(replica.answer(deadline_s))
        except ReplicaFailedError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return found


def _not_measured(
    request: BatchBenchRequest, num_replicas: int, pair: LengthPair, started: str, reason: str
) -> OfflinePoint:
    point = ServingPoint(
        load=Load(concurrency=request.num_requests), repeat=1, started=started, wall_s=0.0,
        num_requests=request.num_requests, num_ok=0, refusal=reason,
    )  # fmt: skip
    return OfflinePoint(pair=pair, num_replicas=num_replicas, point=point, by_replica=())
