"""The profiler of one process of a training."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.engines.base import TrainOptions
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.training.profiling.profiler import StepProfiler
from meshwright.training.profiling.steps import steps_to_profile


def open_profiler(
    options: TrainOptions, *, done: int, num_steps: int, coordinates: MeshCoordinates, say: Callable[[str], None]
) -> StepProfiler | None:
    """The profiler that `options` ask for, of a run that has `done` steps behind it; None where nothing is profiled."""
    if not options.is_profiled:
        return None
    steps = steps_to_profile(options.profile_steps, done=done, num_steps=num_steps)
    if steps is None:
        say("the steps to profile were taken before: nothing is profiled")
        return None
    is_first = not (coordinates.data_rank or coordinates.context_rank or coordinates.tensor_rank)
    return StepProfiler(
        steps, folder=options.folder, device=coordinates.device, is_main=coordinates.is_main,
        pipeline_rank=coordinates.pipeline_rank if is_first and coordinates.plan.pipeline > 1 else None,
    )  # fmt: skip
