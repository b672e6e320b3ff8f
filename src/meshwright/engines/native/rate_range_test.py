"""Steps of a run under a rising learning rate. Nothing is saved: model and optimizer end with the processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.parallel.mesh import mesh_coordinates
from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.progress import ProgressDisplay, reading
from meshwright.engines.native.reference import score_references
from meshwright.engines.native.warm_up import take_bare_step
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.records.rate_range import RateRange, rate_of
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.gemm_tuning import using
from meshwright.training.processes import run_ranks
from meshwright.training.rendezvous import under_launcher

TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """Inputs of every process."""

    prepared: PreparedRun
    num_steps: int
    low: float
    high: float
    answer: Path


def run_range_test(run: Run, *, num_steps: int, low: float, high: float) -> RateRange:
    """Train at most `num_steps` steps of `run` while the rate rises from `low` to `high`; end where the loss diverges.

    The run's own model, weights, data, batch, plan and optimizer; its schedule is replaced. Raises InputError as a
    training does, and under a launcher.
    """
    if under_launcher():
        raise InputError("the range test starts its own processes", got="a launcher", hint="start it without torchrun")
    train = replace(run.train, steps=num_steps, tokens=None, epochs=None, checkpoint=None, evaluate=None, trackers=())
    with TemporaryDirectory() as scratch:
        options = TrainOptions(folder=Path(scratch))
        prepared = engine.prepare(replace(run, train=train), options=options)
        test = RangeTest(
            prepared=prepared, num_steps=num_steps, low=low, high=high, answer=Path(scratch) / "answer.json"
        )
        run_ranks(
            _test_rank,
            test,
            num_ranks=prepared.plan.num_devices,
            device_type=devices.find_device().type,
            timeout=TIMEOUT,
        )
        found = json.loads(test.answer.read_text(encoding="utf-8"))
    return RateRange(rates=tuple(found["rates"]), losses=tuple(found["losses"]), end=high)


def _test_rank(rank: int, num_ranks: int, test: RangeTest) -> None:
    """Take the steps as process `rank`. The main process writes the losses."""
    prepared, run = test.prepared, test.prepared.run
    local_device = devices.find_device(local_rank=rank)
    coordinates = mesh_coordinates(plan=prepared.plan, device=local_device, rank=rank, num_ranks=num_ranks)
    display = ProgressDisplay(quiet=rank > 0, num_steps=test.num_steps)
    found = RateRange(rates=(), losses=(), end=test.high)
    try:
        with using(prepared.gemm_choices, local_device):
            weights = prepared.weights and prepared.weights.folder
            assembly = assemble(run, coordinates=coordinates, weights=weights)
            loader = open_batch_loader(run, coordinates=coordinates, report=reading(display))
            score_references(loader, assembly.stepper, num_steps=test.num_steps)
            next_batch = 0
            for step in range(test.num_steps):
                rate = rate_of(step, num_steps=test.num_steps, low=test.low, high=test.high)
                batch = loader.batch(next_batch)
                next_batch = batch.counts.last + 1
                loss = take_bare_step(assembly, batch, coordinates=coordinates, step=step, learning_rate=rate)
                found = replace(found, rates=(*found.rates, rate), losses=(*found.losses, loss))
                display.doing(f"step {step + 1}/{test.num_steps}  learning rate {rate:.2e}  loss {loss:.4f}")
                if found.has_diverged:  # every process has the same losses
                    break
    finally:
        display.close()
    if coordinates.is_main:
        write_atomically(test.answer, json.dumps({"rates": found.rates, "losses": found.losses}))
