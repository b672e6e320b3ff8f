"""Profiled steps of MaxText: settings of its profiler, and the summary of the trace that it writes.

MaxText's profiler (`profiler=xplane`) covers one range of steps and waits for the device at both ends. JAX writes
TENSORBOARD/plugins/profile/TIME/HOST.trace.json.gz. XLA writes the text of the compiled step, from which the
instructions in the trace get their categories. It does so only when it compiles, so JAX's cache of programs is off.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshwright.engines.maxtext.lower import NAME
from meshwright.files import write_atomically
from meshwright.training.profiling.hlo import summarize_executions
from meshwright.training.profiling.steps import FOLDER, SUMMARY, TRACE, ProfileSteps

MODULE = "jit_train_step"  # name of the step in JAX, of MaxText's loop and of Meshwright's
HLO = "hlo"  # folder of the text, in the folder of the measurements
TEXT = f"*.{MODULE}.*_after_optimizations.txt"


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of one process: `steps` count, `done` were taken before it started."""

    steps: ProfileSteps
    done: int
    output: Path  # folder of the measurements, in the folder of the results
    base: Path  # MaxText's `base_output_directory`

    @property
    def traced(self) -> ProfileSteps:
        """The steps in the trace: also the one before the first that counts, in which buffers are allocated."""
        return ProfileSteps(first=max(self.done + 1, self.steps.first - 1), last=self.steps.last)

    def slows(self, step: int) -> bool:
        """Return True if the time of `step` is not usual: MaxText counts the writing of the trace to the next step."""
        return self.traced.first <= step <= self.traced.last + 1

    @property
    def settings(self) -> list[str]:
        """Settings of MaxText. It counts skipped steps from the first one that it takes."""
        traced = self.traced
        return [
            "profiler=xplane",
            f"skip_first_n_steps_for_profiler={traced.first - self.done - 1}",
            f"profiler_steps={traced.last - traced.first + 1}",
            "jax_cache_dir=",
        ]

    @property
    def xla_flags(self) -> str:
        """Flags with which XLA writes the text of the step."""
        folder = (self.output / HLO).absolute()
        return f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={MODULE}"

    def write(self) -> None:
        """Write `profile/` of the results, and remove what MaxText wrote, whose names contain that of the host.

        Raises ValueError if the trace or the text is missing, or does not contain the steps.
        """
        profiles = self.base / NAME / "tensorboard" / "plugins" / "profile"
        traces = sorted(profiles.glob("*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        texts = sorted((self.output / HLO).glob(TEXT), key=lambda path: path.stat().st_mtime)
        if not traces or not texts:
            raise ValueError("MaxText wrote no trace" if texts else "XLA wrote no text of the step")
        with gzip.open(traces[-1], "rt", encoding="utf-8") as stream:
            trace = json.load(stream)
        folder = self.output.parent / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(traces[-1], folder / TRACE)
        hlo = texts[-1].read_text(encoding="utf-8")
        shutil.rmtree(profiles, ignore_errors=True)
        shutil.rmtree(self.output / HLO, ignore_errors=True)
        found = summarize_executions(trace, module=MODULE, hlo=hlo, traced=self.traced, steps=self.steps)
        write_atomically(folder / SUMMARY, json.dumps(found, indent=2) + "\n")
