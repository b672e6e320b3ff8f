"""The length of a run that gives `train.epochs`: its data is tokenised and counted before the engine plans.

Imports torch only for such a run.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.specs.run import Run, with_warmup_steps
from meshwright.training.cpu_libraries import require_torch


def with_epochs_of_engine(run: Run) -> tuple[Run, str | None]:
    """As `with_counted_epochs`, where the engine takes steps alone and the data is on this machine; else unchanged.

    Raises MissingDependencyError where PyTorch, which reads the data, is absent.
    """
    takes_steps = run.train.epochs is not None and any(p.key == "train.epochs" for p in check_export(run))
    if not takes_steps or run.data.is_synthetic:
        return run, None
    require_torch("counting the samples of train.epochs")
    from meshwright.training.data.source import is_from_hub

    if any(is_from_hub(source.path) for source in run.data.sources.values()):
        return run, None
    run, line = with_counted_epochs(run)
    return run, f"{line}, as {run.engine} takes steps; count again where the data changes"


def with_counted_epochs(run: Run) -> tuple[Run, str | None]:
    """Return `run` with `train.tokens` in place of `train.epochs`, and a note with what was counted.

    The tokens stay in the cache, where the engine's processes find them. Raises InputError for data that cannot be
    trained on.
    """
    epochs = run.train.epochs
    if epochs is None:
        return run, None
    if run.data.is_synthetic:
        raise InputError(
            "train.epochs: random tokens have no end", hint="data.source names the data; or give train.steps"
        )
    from meshwright.training.data import open_data

    num_samples = open_data(run).train.num_samples
    tokens = max(1, math.ceil(epochs * num_samples)) * run.sequence_length
    counted = replace(
        run,
        train=replace(run.train, epochs=None, tokens=tokens),
        overrides=(*run.overrides, "train.epochs=null", f"train.tokens={tokens}"),
    )
    return with_warmup_steps(counted), (
        f"an epoch has {num_samples:,} samples of {run.sequence_length:,} tokens: "
        f"{epochs:g} epochs are {counted.num_steps:,} steps"
    )
