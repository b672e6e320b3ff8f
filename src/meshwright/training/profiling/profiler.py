"""A trace of some steps of the main process: `profile/trace-rank0.json.gz` (Chrome's format, for Perfetto) and
`profile/summary.json` (see `shares.summarize`). Under a pipeline one process of every pipeline rank is profiled and
writes its passes, `profile/passes-N.json` (see `shares.passes`).

The step before the first profiled one runs under the profiler too, but does not count: the profiler allocates its
buffers then. Each profiled step ends when the device has done its work, so that all of it lies inside.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.files import write_atomically
from meshwright.training import device as devices
from meshwright.training.profiling.shares import STEP, passes, summarize
from meshwright.training.profiling.steps import FOLDER, SUMMARY, TRACE, ProfileSteps, steps_of_environment

QUIET = "99"
"""Above every level of the profiling library's own log, which would mix with the lines of progress."""


def profiler_of_environment(folder: Path, *, device: torch.device, is_main: bool) -> StepProfiler | None:
    """Return a profiler for a process that another program runs, of the steps in its environment; None: no steps."""
    steps = steps_of_environment()
    return None if steps is None else StepProfiler(steps, folder=folder, device=device, is_main=is_main)


class StepProfiler:
    """Profiles `steps`. Every process has one, so that all agree on which steps count.

    The main process records. One process of each `pipeline_rank` records its passes.
    """

    def __init__(
        self,
        steps: ProfileSteps,
        *,
        folder: Path,
        device: torch.device,
        is_main: bool,
        pipeline_rank: int | None = None,
    ) -> None:
        self.steps = steps
        self.folder = folder / FOLDER
        self.device = device
        self.is_main = is_main
        self.pipeline_rank = pipeline_rank
        self.summary: dict[str, Any] | None = None
        self.is_over = False  # steps that are taken again after a roll-back are not profiled again
        self._profile: profile | None = None

    def covers(self, step: int) -> bool:
        """True if `step` (1 is the first) runs under the profiler, and so is not in the statistics."""
        return not self.is_over and self.steps.covers(step)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile `step` if it is to be profiled; write trace and summary after the last one."""
        if not self.covers(step):
            yield
            return
        self.is_over = step == self.steps.last
        if self._records and self._profile is None:
            self._start()
        with record_function(f"{STEP}{step}") if step >= self.steps.first else nullcontext():
            yield
            devices.synchronize(self.device)
        if self.is_over:
            self.close()

    @property
    def _records(self) -> bool:
        return self.is_main or self.pipeline_rank is not None

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # also AMD's GPUs
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._profile = profile(activities=activities)
        self._profile.start()

    def close(self) -> None:
        """Write trace and summary: after the last profiled step, or when the run ends before it."""
        if self._profile is not None:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        raw = self.folder / f"trace-{os.getpid()}.json"
        self._profile.export_chrome_trace(str(raw))
        self._profile = None
        trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        raw.unlink()
        if self.pipeline_rank is not None:
            document = {"pipeline_rank": self.pipeline_rank, "passes": passes(trace)}
            write_atomically(self.folder / f"passes-{self.pipeline_rank}.json", json.dumps(document) + "\n")
        if not self.is_main:
            return
        for private in ("host_name", "traceName"):  # a trace that is shared should not name the machine
            trace.pop(private, None)
        with gzip.open(self.folder / TRACE, "wt", encoding="utf-8") as stream:
            json.dump(trace, stream)
        try:
            self.summary = summarize(trace)
        except ValueError:  # stopped in the step before the first profiled one
            return
        write_atomically(self.folder / SUMMARY, json.dumps(self.summary, indent=2) + "\n")
