"""`meshwright.train`: train the model of a run on this machine. Imports the engine's framework when it is called."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import arguments
from meshwright.api.folders import own_folder, require_writable
from meshwright.api.runs import Overrides, RunSource, load_run
from meshwright.errors import InputError, MissingDependencyError
from meshwright.specs.run import Run
from meshwright.training.cpu_libraries import configure_libraries

if TYPE_CHECKING:
    from meshwright.answers.training_run import TrainingRun

MAX_RESTARTS = 1000


def train(
    run: RunSource,
    *,
    out: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    branch: bool = False,
    force: bool = False,
    max_restarts: int = 0,
    timeout_s: float = 600.0,
    measure: bool | None = None,
    quiet: bool = False,
) -> TrainingRun:
    """Train the model of a run on this machine's accelerators, or on its CPU where there are none.

    A plan of several processes starts them here. Interrupting saves a checkpoint and stops; `resume` goes on.

    Args:
        run: a `Run`, the path or shipped name of a run file, or its content.
        out: folder of the results: steps, resolved run, record, page. Default: runs/NAME, or the next free
            runs/NAME-2, ...; of a resumed run its own folder.
        overrides: keys of the run file with new values, as {"train.steps": 20}.
        resume: go on from the newest checkpoint in the run's checkpoint folder. It must be of the same run.
        branch: start a new run, with folders of its own, from the weights of that checkpoint.
        force: overwrite the results of another training in `out`.
        max_restarts: how often to start again after a process was lost.
        timeout_s: after so many seconds without progress a step counts as hung.
        measure: measure this machine for the prediction, again and for longer than 2 s (True), or not at all (False).
            By default it is measured once for a machine and a model, and that is reused.
        quiet: write no progress to stderr.

    Returns:
        The record and the steps. `record["ending"]` says whether all steps were taken, or why not.

    Raises:
        InputError: the run file is wrong, the engine cannot do it, the checkpoint or `out` is of another run,
            or another training writes to `out` or saves to its checkpoint folder.
        InfeasibleError: no plan fits this machine.
        MissingDependencyError: PyTorch, the engine's package or a device is absent.

    Example:
        >>> import meshwright as mw
        >>> done = mw.train(
        ...     "examples/runs/tiny-llama-cpu.yaml", out="runs/first", overrides={"train.steps": 20}
        ... )  # doctest: +SKIP
        >>> done.statistics["last_loss"]  # doctest: +SKIP
        5.9
    """
    from meshwright.answers.training_run import read_training
    from meshwright.engines.base import TrainOptions, find_engine, measuring_of
    from meshwright.engines.folders import refuse_finished, training_folders
    from meshwright.report.html import write_page
    from meshwright.report.training_page import training_page

    resolved = load_run(run, overrides=overrides)
    is_resumed, is_branch = arguments.flag("resume", resume), arguments.flag("branch", branch)
    is_forced = arguments.flag("force", force)
    refuse_both(resume=is_resumed, branch=is_branch)
    configure_libraries()
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "training needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )
    folder = own_folder(resolved, resume=is_resumed) if out is None else arguments.path("out", out)
    options = TrainOptions(
        folder=folder,
        resume=is_resumed,
        quiet=arguments.flag("quiet", quiet),
        max_restarts=arguments.count("max_restarts", max_restarts, least=0, most=MAX_RESTARTS),
        timeout_s=arguments.number("timeout_s", timeout_s),
        measuring=measuring_of(None if measure is None else arguments.flag("measure", measure)),
        started_s=time.time(),
    )
    require_writable(folder, resolved)
    if not is_resumed:
        refuse_finished(folder, is_forced=is_forced)
    engine = find_engine(resolved.engine)
    with starting_run(resolved, results=folder, branch=is_branch) as begun:
        start = engine.prepare(begun, options=options)
        with training_folders(folder, start.run):
            engine.launch(start)
    engine.read(folder)
    done = read_training(folder)
    write_page(training_page(done), path=folder / "report.html")
    return done


def refuse_both(*, resume: bool, branch: bool) -> None:
    """Raise InputError for `resume` with `branch`."""
    if resume and branch:
        raise InputError("a branch is a new run: --resume (resume=) continues one", hint="give --branch or --resume")


@contextmanager
def starting_run(run: Run, *, results: Path, branch: bool) -> Iterator[Run]:
    """Yield the run to train: `run`, or with `branch` the one that starts from the weights of its checkpoint."""
    if not branch:
        yield run
        return
    from meshwright.engines.branching import branched  # imports torch

    with branched(run, results=results) as begun:
        yield begun
