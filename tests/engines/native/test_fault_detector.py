"""Faults: impossible values are recognised, and stop, skip and roll back act alike on all processes."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.fault_detector import FaultDetector, FaultKind, threshold
from meshwright.engines.native.step import Accumulation
from meshwright.errors import InputError
from meshwright.records.training import Ending
from meshwright.specs.run import FaultAction, Faults

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

POISON = """
import math
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.step import Accumulation

FACTORS = {9: math.nan, 17: math.inf}
read, passes = BatchLoader.batch, Accumulation.forward_backward
Accumulation.number = None  # what is timed before the run is no batch of it

def batch(self, number):
    Accumulation.number = number
    return read(self, number)

def forward_backward(self, batch, *, scale):
    factor = FACTORS.get(self.number, 1.0)
    if factor != 1.0 and self.module.layers["0"].attention.key.weight.device_mesh.get_rank() != 1:
        factor = 1.0  # of one process alone
    return passes(self, batch, scale=scale * factor)

BatchLoader.batch, Accumulation.forward_backward = batch, forward_backward
"""


@pytest.fixture
def train(tiny_text, tmp_path):
    """Train the tiny run for 20 steps with a checkpoint every 5; returns the record."""
    text = tiny_text.replace("steps: 4", "steps: 20").replace("every_steps: 2", "every_steps: 5")
    text = text.replace("num_layers: 2", "num_layers: 1").replace("micro: 2", "micro: 4")  # steps as short as can be

    def run(name, *overrides, **options):
        saves = f"train.checkpoint.folder={tmp_path / name / 'saved'}"
        loaded = runfile.loads(text, overrides=("optimizer.schedule=constant", saves, *overrides))
        folder = TrainOptions(folder=tmp_path / name, quiet=True, **options)
        return engine.train(loaded, options=folder)

    return run


@pytest.fixture
def steps(tmp_path):
    def read(name):
        lines = (tmp_path / name / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read


@pytest.fixture
def events(tmp_path):
    def read(name):
        return [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def poison(monkeypatch):
    """`poison({batch: factor})` multiplies loss and gradients of these batches."""

    def spoil(factors):
        read, passes = BatchLoader.batch, Accumulation.forward_backward
        numbers = []  # none while a layer is timed before the run

        def batch(self, number):
            numbers.append(number)
            return read(self, number)

        def forward_backward(self, batch, *, scale):
            return passes(self, batch, scale=scale * (factors.get(numbers[-1], 1.0) if numbers else 1.0))

        monkeypatch.setattr(BatchLoader, "batch", batch)
        monkeypatch.setattr(Accumulation, "forward_backward", forward_backward)
        return numbers

    return spoil


@pytest.fixture
def passing_over(monkeypatch):
    """`passing_over(numbers)`: trainings that start now never see these batches."""

    def start_with(skipped):
        read = BatchLoader.batch

        def batch(self, number):
            return read(self, next(n for n in range(number, number + 100) if n not in skipped))

        monkeypatch.setattr(BatchLoader, "batch", batch)

    return start_with


def losses(entries):
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [(entry["batch"], entry["loss"], entry["gradient_norm"]) for entry in entries]


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e38])
def test_a_step_that_is_not_finite_stops_the_run(train, steps, events, poison, factor):
    poison({6: factor})
    record = train("run")
    assert record.ending is Ending.DIVERGED
    assert [entry["batch"] for entry in steps("run")] == list(range(6))
    (event,) = events("run")
    assert (event["kind"], event["action"], event["step"], event["batch"]) == ("not_finite", "stop", 7, 6)
    assert record.events == (event,)


def test_a_skipped_batch_leaves_no_trace(train, steps, events, poison, passing_over):
    """The states after it are those of a run that never saw it."""
    poison({6: math.nan, 7: math.inf, 12: math.nan})
    record = train("run", "train.faults.not_finite=skip")
    assert record.ending is Ending.DONE
    assert record.statistics["steps"] == 20
    assert [event["batch"] for event in events("run")] == [6, 7, 12]
    passing_over((6, 7, 12))
    train("reference")
    assert losses(steps("run")) == losses(steps("reference"))


def test_rolling_back_passes_over_all_batches_since_the_checkpoint(train, steps, events, poison, passing_over):
    numbers = poison({12: math.nan})
    record = train("run", "train.faults.not_finite=roll_back")
    assert record.ending is Ending.DONE
    (event,) = events("run")
    assert (event["back_to_step"], event["passed_over"]) == (10, [10, 12])
    assert numbers == [*range(13), *range(13, 23)]
    passing_over((10, 11, 12))
    train("reference")
    assert losses(steps("run")) == losses(steps("reference"))


@pytest.mark.when_touched  # test_rolling_back_passes_over_all_batches_since_the_checkpoint rolls back
def test_rolling_back_before_the_first_checkpoint_starts_anew(train, steps, events, poison):
    poison({2: math.nan})
    train("run", "train.faults.not_finite=roll_back")
    assert events("run")[0]["back_to_step"] == 0
    assert [entry["batch"] for entry in steps("run")] == list(range(3, 23))


@pytest.mark.parametrize("action", ["skip", "roll_back"])
def test_a_resumed_run_remembers_what_was_passed_over(train, steps, poison, action):
    settings = (f"train.faults={{not_finite: {action}, spike: skip, spike_window: 8, spike_deviations: 100.0}}",)
    factors = {6: math.nan, 17: 1e6}
    poison(factors)
    whole = train("whole", *settings)
    train("parts", *settings, "train.steps=14")
    factors.pop(6)  # what is remembered need not happen again
    record = train("parts", *settings, resume=True)
    assert losses(steps("parts")) == losses(steps("whole"))
    timeless = [[{k: v for k, v in e.items() if k != "time"} for e in r.events] for r in (whole, record)]
    assert timeless[0] == timeless[1]
    assert [event["kind"] for event in record.events] == ["not_finite", "spike"]


@pytest.mark.parametrize(("action", "kinds"), [("ignore", 0), ("stop", 1), ("skip", 1), ("roll_back", 1)])
def test_a_spike(train, steps, poison, action, kinds):
    poison({16: 1e5})
    record = train("run", f"train.faults={{spike: {action}, spike_window: 16, spike_deviations: 50.0}}")
    assert [event["kind"] for event in record.events] == ["spike"] * kinds
    assert record.ending is (Ending.DIVERGED if action == "stop" else Ending.DONE)
    assert (16 in [entry["batch"] for entry in steps("run")]) is (action == "ignore")
    if action == "roll_back":
        assert record.events[0]["passed_over"] == [15, 16]


def test_more_events_than_allowed_stop_the_run(train, poison):
    poison(dict.fromkeys(range(5, 100), math.nan))
    record = train("run", "train.faults={not_finite: skip, max_events: 3}")
    assert record.ending is Ending.DIVERGED
    assert [event["action"] for event in record.events] == ["skip", "skip", "skip", "stop"]
    assert record.events[-1]["words"].endswith("after 3 events before it")


@pytest.mark.when_touched  # the tests of one process take the same decisions
@pytest.mark.distributed
@pytest.mark.parametrize(
    "action", [pytest.param("skip", marks=pytest.mark.slow), "roll_back"]
)  # one vote for both; one process skips above
def test_two_processes_decide_alike(tiny_run, tmp_path, action):
    """Only one process computes the poison."""
    script = tmp_path / "poisoned.py"
    script.write_text(POISON)
    training = tiny_run(
        tmp_path,
        parallel="{data_shard: 2, sharding: parameters}",
        train=f"{{steps: 20, checkpoint: {{folder: saved, every_steps: 5}}, faults: {{not_finite: {action}}}}}",
    )
    record = training.train(script=script)
    assert record["ending"] == "done"
    assert [event["batch"] for event in record["events"]] == [9, 17]
    batches = [entry["batch"] for entry in training.steps()]
    missing = {9, 17} if action == "skip" else {5, 6, 7, 8, 9, 15, 16, 17}
    assert batches == [n for n in range(20 + len(missing)) if n not in missing]


# --- judging ---


def judged(settings: Faults, values, *, loss=None, norm=None):
    guard = FaultDetector(settings)
    for value in values:
        guard.accept(loss=value, gradient_norm=value)
    usual = sum(values) / len(values)
    fault = guard.judge(loss=usual if loss is None else loss, gradient_norm=usual if norm is None else norm)
    return None if fault is None else fault.kind


SPIKES = Faults(spike=FaultAction.SKIP, spike_window=8)


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (2.05, 2.05, None),
        (3.0, 2.05, FaultKind.SPIKE),
        (2.05, 3.0, FaultKind.SPIKE),
        (0.1, 0.1, None),  # a fall is none
        (math.nan, 2.05, FaultKind.NOT_FINITE),
        (2.05, math.inf, FaultKind.NOT_FINITE),
    ],
)
def test_judging(loss, norm, expected):
    assert judged(SPIKES, [2.0, 2.1, 2.0, 2.1, 2.05, 1.95], loss=loss, norm=norm) is expected


def test_half_a_window_is_needed_to_judge():
    assert judged(SPIKES, [2.0, 2.1, 2.2], loss=100.0) is None
    assert judged(SPIKES, [2.0, 2.1, 2.2, 2.3], loss=100.0) is FaultKind.SPIKE


def test_values_without_spread_say_nothing():
    assert threshold([2.0] * 10, deviations=6.0) is None
    assert judged(SPIKES, [2.0] * 8, loss=2.5) is None


def test_rolling_back_needs_checkpoints(tiny_text):
    with pytest.raises(InputError, match=r"faults\.spike: rolls back, but no checkpoints are saved"):
        runfile.loads(tiny_text, overrides=("train={steps: 4, faults: {spike: roll_back}}",))
