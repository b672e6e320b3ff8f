"""One run of a benchmark in a process of its own: `python -m meshwright.mlperf.worker TASK.json`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.engines.base import Measuring, ObservedEngine, TrainingEngine, TrainOptions, find_engine
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import record_of, write_atomically
from meshwright.mlperf.inputs import require_remembered
from meshwright.mlperf.logged_facts import logged_facts
from meshwright.mlperf.page_cache import clear_page_cache
from meshwright.mlperf.run_log import LogWriter, RunLogger
from meshwright.specs.run import Run
from meshwright.training.rendezvous import is_main

PR_SET_PDEATHSIG = 1
LOG, TRAINING, TASK = "mllog.txt", "training", "task.json"


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """Everything that one run needs. Folders and files are absolute."""

    folder: str  # of this run: log, results of the training, this task
    run_file: str
    overrides: tuple[str, ...]
    seed: int
    benchmark: str
    train_samples: int
    submission: dict[str, Any]  # org, platform, division, status
    cache_clear: dict[str, Any] | None  # value and what was done; None: the first process of each host does it
    data_paths: tuple[str, ...]
    warm_up_steps: int
    extra: dict[str, Any] | None = None  # further facts, such as the data's hash

    def write(self) -> Path:
        """Write the task into its folder."""
        path = Path(self.folder) / TASK
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_task(path: Path) -> RunTask:
    """Read a task that `RunTask.write` wrote."""
    return record_of(RunTask, json.loads(path.read_text(encoding="utf-8")))


def run_once(task: RunTask) -> None:
    """Train one run with its log, or be one of its processes. Raises as the engine does."""
    folder = Path(task.folder)
    run = runfile.load(Path(task.run_file), overrides=[*task.overrides, f"train.seed={task.seed}"])
    cleared = _cleared_on_this_host(task, run) if task.cache_clear is None else task.cache_clear
    writer = LogWriter(folder / LOG) if is_main() else None
    if writer is not None:
        writer.event("cache_clear", **cleared)
        writer.start("init_start")
        for key, value in task.submission.items():
            writer.event(f"submission_{key}", value)
        writer.event("submission_benchmark", task.benchmark)
    engine = observed_engine(run)
    options = TrainOptions(
        folder=folder / TRAINING,
        quiet=True,
        measuring=Measuring.NEVER,
        only_steps=True,
        command=("meshwright", "mlperf", "run", task.benchmark),
    )
    start = engine.prepare(run, options=options)
    if writer is not None:
        facts = logged_facts(start.run, start.plan, benchmark=task.benchmark, train_samples=task.train_samples)
        for key, value in (*facts, *(task.extra or {}).items()):
            writer.event(key, value)
        writer.close()  # from here on rank 0 writes
    observer = RunLogger(path=folder / LOG, data_paths=task.data_paths)
    engine.launch_observed(start, observer=observer, warm_up_steps=task.warm_up_steps)


def _cleared_on_this_host(task: RunTask, run: Run) -> dict[str, Any]:
    """Clear the page cache in the first process of each host. Raises InputError where that is not possible."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return {}
    require_remembered(run)  # reads the index, and so comes first
    cleared = clear_page_cache(Path(path) for path in task.data_paths)
    if not cleared["value"] and not is_main():  # the log has what the first host did
        raise InputError(f"the page cache of {socket.gethostname()} cannot be cleared", got=cleared["method"])
    return cleared


class _ObservedTrainingEngine(TrainingEngine, ObservedEngine):
    """An engine with the functions of both."""


def observed_engine(run: Run) -> _ObservedTrainingEngine:
    """The engine of `run`. Raises InputError where it does not report its evaluations."""
    engine = find_engine(run.engine)
    if not isinstance(engine, ObservedEngine):
        reasons = [
            "it does not report when it opens data and what its evaluations are",
            *(str(problem) for problem in engine.check(run)),
        ]
        raise InputError(
            f"a benchmark cannot be run with the engine {run.engine}: {'; '.join(reasons)}", hint="--set engine=native"
        )
    return engine  # pyright: ignore[reportReturnType]


def end_with_parent_process(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `by` to this process when its parent ends, so that the next attempt never meets this one."""
    with suppress(OSError, AttributeError):  # other systems than Linux: the watch of the parent ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def main() -> int:
    """Run the task that the command line names."""
    from meshwright.training.parent_watch import end_with_parent

    end_with_parent_process(signal.SIGKILL)
    end_with_parent(grace_s=1.0)
    try:
        run_once(read_task(Path(sys.argv[1])))
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
