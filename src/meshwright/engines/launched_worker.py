"""A worker that a launcher started directly: torchrun, Slurm or Kubernetes, by `meshwright launch`.

Workers that `engines.local` starts find the folders locked and compared by `meshwright train`. These do it themselves,
in the first process of the training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.engines.base import TrainOptions
from meshwright.engines.beginning import begin
from meshwright.engines.external_record import OutputLayout
from meshwright.engines.external_workers import refuse_checkpoints, require_indices, save_identity
from meshwright.engines.folders import training_folders
from meshwright.errors import printable
from meshwright.specs.run import Run
from meshwright.training.machine import OWN_WORKER
from meshwright.training.rendezvous import is_main, is_restart
from meshwright.training.run_identity import IDENTITY, identity_in, read_identity


@contextmanager
def worker_folders(folder: Path, run: Run, *, layout: OutputLayout) -> Iterator[None]:
    """Lock the folders of the training whose results are in `folder`, and compare it with its checkpoints.

    Raises InputError if another training holds one of them, or the checkpoints are of another run.
    """
    if OWN_WORKER in os.environ or not is_main():
        yield
        return
    with training_folders(folder, run):
        _compare(folder, run, layout)
        yield


def _compare(folder: Path, run: Run, layout: OutputLayout) -> None:
    assert run.plan is not None
    # A host that comes back counts no restarts: the results of its folder are of the run of the checkpoints.
    saves, there = run.train.checkpoint, read_identity(folder / IDENTITY)
    held = None if saves is None else identity_in(Path(saves.folder))
    is_same = held is not None and there is not None and held.run_id == there.run_id
    options = TrainOptions(folder=folder, resume=is_restart() or is_same)
    refuse_checkpoints(run, options, newest_step=layout.newest_step)
    require_indices(run, layout)
    begun = begin(run, plan=run.plan, options=options, newest_step=layout.newest_step)
    notes = list(begun.notes)
    if begun.run.num_steps != run.num_steps:
        notes.append(f"train.tokens counts all steps as steps of {run.tokens_per_step:,} tokens")
    for line in notes:
        print(printable(f"note: {line}"), file=sys.stderr, flush=True)
    save_identity(run, begun.resumed(), folder=folder)
