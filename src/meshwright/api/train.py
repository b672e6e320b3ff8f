"""`meshwright.train`: train the model of a run on this machine. Imports the engine's framework when it is called."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api.question import Amount, AnyPath, Count, Flag, answered_by_body, question
from meshwright.api.runs import OVERRIDES, RUN, Overrides, RunSource, load_run
from meshwright.errors import InputError, printable
from meshwright.specs.run import Run
from meshwright.targets import load
from meshwright.training.cpu_libraries import require_torch

if TYPE_CHECKING:
    from meshwright.answers.training_run import TrainingRun
    from meshwright.engines.base import Start, TrainingEngine, TrainOptions
    from meshwright.records.training import Record

MAX_RESTARTS = 1000


@question("meshwright.api.train:training")
def train(
    run: Annotated[RunSource, RUN],
    *,
    out: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "Folder of the results.",
            unset="runs/NAME, or the next free runs/NAME-2, ...; resumed: its own",
            is_file=False,
        ),
    ] = None,
    overrides: Annotated[Overrides, OVERRIDES] = (),
    resume: Annotated[bool, Flag("Continue this run from its newest checkpoint.")] = False,
    resume_or_begin: Annotated[
        bool, Flag("Continue this run from its newest checkpoint, or begin it where there is none.")
    ] = False,
    branch: Annotated[
        bool, Flag("Start a new run, with folders of its own, from the weights of the newest checkpoint.")
    ] = False,
    force: Annotated[bool, Flag("Overwrite the results of another training in --out.")] = False,
    max_restarts: Annotated[int, Count("Number of restarts after a process was lost.", low=0, high=MAX_RESTARTS)] = 0,
    timeout_s: Annotated[
        float,
        Amount(
            "Time after which a step counts as hung: all processes write their stacks and end.",
            flag="--timeout",
            metavar="SECONDS",
        ),
    ] = 600.0,
    measure: Annotated[
        bool | None,
        Flag(
            "Measure this machine for the prediction: again and for longer than 2 s, or not at all.",
            unset="once for a machine and a model, then reused",
            off="--no-measure",
        ),
    ] = None,
    quiet: Annotated[bool, Flag("Write no progress to stderr.")] = False,
) -> TrainingRun:
    """Train the model of a run on this machine's accelerators, or on its CPU where there are none.

    A plan of several processes starts them here. Interrupting saves a checkpoint and stops; `resume` goes on.

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
    return answered_by_body()


def training(*, run: RunSource, overrides: Sequence[str], branch: bool, force: bool, **asked: Any) -> TrainingRun:
    """The answer to `train`."""
    from meshwright.answers.training_run import read_training
    from meshwright.report.html import write_page
    from meshwright.report.training_page import training_page

    started_s, resolved = time.time(), load_run(run, overrides=overrides)
    options = train_options(resolved, started_s=started_s, branch=branch, **asked)
    take_training(
        resolved,
        options,
        branch=branch,
        force=force,
        prepare=lambda engine, begun: engine.prepare(begun, options=options),
    )
    done = read_training(options.folder)
    write_page(training_page(done), path=options.folder / "report.html")
    return done


def train_options(
    run: Run, *, out: Path | None, resume: bool, resume_or_begin: bool, branch: bool, measure: bool | None, **more: Any
) -> TrainOptions:
    """The options of a training, from arguments of `train` and `more` fields of `TrainOptions`.

    Raises InputError for more than one of `resume`, `resume_or_begin` and `branch`, and MissingDependencyError without
    PyTorch.
    """
    from meshwright.api.folders import holds_checkpoints, own_folder
    from meshwright.engines.base import TrainOptions, measuring_of

    require_torch("training")
    if branch and (resume or resume_or_begin):
        raise InputError("a branch is a new run: --resume (resume=) continues one", hint="give --branch or --resume")
    if resume and resume_or_begin:
        raise InputError("--resume needs a checkpoint, --resume-or-begin does not", hint="leave one of them out")
    if resume_or_begin:
        if run.train.checkpoint is None:
            raise InputError("there is nothing to resume: the run saves no checkpoints", hint="set train.checkpoint")
        resume = holds_checkpoints(Path(run.train.checkpoint.folder).expanduser())
    folder = out or own_folder(run, resume=resume)
    return TrainOptions(folder=folder, resume=resume, measuring=measuring_of(measure), **more)


def take_training(
    run: Run,
    options: TrainOptions,
    *,
    branch: bool,
    force: bool,
    prepare: Callable[[TrainingEngine, Run], Start | None],
    is_dry: bool = False,
    is_first: bool = True,
) -> Record | None:
    """Train, and return the record; None where `prepare`, which has the engine prepare a run, returns None.

    `is_dry`: write nothing. `is_first`: this is the only process, or the first one of a launcher.
    """
    from meshwright.api.folders import require_writable
    from meshwright.engines.base import find_engine
    from meshwright.engines.epochs import with_counted_epochs
    from meshwright.engines.folders import refuse_finished, training_folders

    engine = find_engine(run.engine)
    if is_first and not is_dry:
        require_writable(options.folder, run)
    if not (options.resume or is_dry):
        refuse_finished(options.folder, is_forced=force)
    run, line = with_counted_epochs(run)
    if line is not None and is_first and not options.quiet:
        print(printable(f"note: {line}"), file=sys.stderr, flush=True)
    branched = "meshwright.engines.branching:branched"  # its module imports torch
    with load(branched)(run, results=options.folder) if branch else nullcontext(run) as begun:
        if (start := prepare(engine, begun)) is None:
            return None
        with training_folders(options.folder, start.run):
            engine.launch(start)
    return engine.read(options.folder)
