"""Counts of workers are measured and chosen; data that goes away is said, and no thread stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

from meshwright.bench.dataloader import (
    LEAST_ROUNDS,
    NUM_STEPS,
    WORK_SIZE,
    Demand,
    LoaderCandidate,
    _enough,
    _shortest,
    keeps_up,
    tune_training,
    tune_validation,
)
from meshwright.errors import InputError
from meshwright.records.measurement import Measurement
from meshwright.training.data import Batch

GPU_STEP = Demand(step_s=0.05, source="a test", on_host=False)


def batch() -> Batch:
    zeros = torch.zeros(2, 8, dtype=torch.int64)
    return Batch(tokens_BT=zeros, labels_BT=zeros, positions_BT=zeros, documents_BT=zeros)


@dataclass(frozen=True)
class Reader:
    """Stands for `Batches`: what reading one does."""

    read: Callable[[int], object]

    def at(self, number: int) -> Batch:
        self.read(number)
        return batch()


def measurement(*seconds: float) -> Measurement:
    return Measurement(seconds=seconds, calls=1, target_ratio=0.03)


def candidate(num_workers: int, *, batch_s: float, waits_s: tuple[float, ...]) -> LoaderCandidate:
    return LoaderCandidate(
        num_workers=num_workers, first_s=measurement(batch_s), batch_s=measurement(batch_s),
        wait_s=measurement(*waits_s), tokens_per_batch=100, held_bytes=0,
    )  # fmt: skip


def chosen(candidates: list[LoaderCandidate], step_s: float | None) -> int:
    demand = Demand(step_s=step_s, source="a test", on_host=True)
    return _enough(tuple(candidates), demand, num_batches=4).num_workers


def test_training_takes_the_fewest_with_which_no_step_waits():
    slow = [
        candidate(0, batch_s=1.0, waits_s=(1.0,) * 3),
        candidate(1, batch_s=0.99, waits_s=(0.4,) * 3),
        candidate(2, batch_s=0.5, waits_s=(0.001,) * 3),
        candidate(4, batch_s=0.3, waits_s=(0.001,) * 3),
    ]
    assert chosen(slow, 200.0) == 0  # 1 s of 200 is no more than a hundredth
    assert chosen(slow, 50.0) == 1
    assert chosen(slow, 1.0) == 2  # one worker reads no faster than the steps: its queue only runs dry later
    assert chosen(slow, 0.4) == 4
    assert not keeps_up(slow[1], 1.0)


def test_where_no_count_keeps_up_the_fewest_that_wait_as_little_as_any_are_taken():
    waits = {0: (0.9, 1.0, 1.1), 1: (0.5, 0.51, 0.6), 2: (0.4, 0.5, 0.7), 4: (0.49, 0.5, 0.52)}
    assert chosen([candidate(n, batch_s=1.0, waits_s=w) for n, w in waits.items()], 0.1) == 1


def test_without_a_step_the_fewest_that_are_nearly_as_fast_as_any_are_taken():
    times = {0: 1.0, 1: 1.0, 2: 0.52, 4: 0.5}
    assert chosen([candidate(n, batch_s=s, waits_s=(s,)) for n, s in times.items()], None) == 2


def test_a_pass_is_short_with_few_workers_where_starting_them_costs_more():
    passes = {0: (0.10, 0.11, 0.12), 1: (0.11, 0.12, 0.13), 8: (0.5, 0.6, 0.7)}
    candidates = tuple(candidate(n, batch_s=0.01, waits_s=w) for n, w in passes.items())
    assert _shortest(candidates, 0.01, num_batches=2, pass_batches=2).num_workers == 0
    passes = {0: (1.0, 1.1, 1.2), 1: (0.11, 0.12, 0.13), 8: (0.10, 0.12, 0.14)}
    candidates = tuple(candidate(n, batch_s=0.01, waits_s=w) for n, w in passes.items())
    assert _shortest(candidates, 0.01, num_batches=2, pass_batches=2).num_workers == 1
    # Beside 100 s of work a second of waiting is no more than a hundredth.
    assert _shortest(candidates, 50.0, num_batches=2, pass_batches=2).num_workers == 0


@pytest.mark.when_touched  # the choice among measured numbers is checked above
def test_a_reader_that_takes_a_third_of_the_step_needs_one_worker_with_a_gpu():
    found = tune_training(Reader(lambda number: time.sleep(0.015)), (0, 1), GPU_STEP, budget_s=0.1)
    inline, one = found.candidates
    assert inline.wait_s.median >= 0.015
    assert one.wait_s.median < inline.wait_s.median / 5
    assert found.num_workers == 1
    assert one.held_bytes == 2 * batch().num_bytes
    assert inline.first_s.n == inline.batch_s.n == inline.wait_s.n >= 3


def test_every_visit_reads_batches_of_its_own_and_validation_the_same_in_each_pass():
    reads: list[int] = []
    reader = Reader(reads.append)
    tune_training(reader, (0, 1), GPU_STEP, budget_s=0.01)
    trained = [number for number in reads if number > 0]
    assert len(trained) == len(set(trained))
    reads.clear()
    found = tune_validation(reader, (0, 2), GPU_STEP, pass_batches=3, budget_s=1.0)
    assert set(reads) == {0, 1, 2}
    assert (found.num_batches, found.pass_batches) == (3, 3)


def test_a_long_pass_is_measured_by_its_first_batches():
    found = tune_validation(Reader(lambda number: time.sleep(0.01)), (0, 1), GPU_STEP, pass_batches=1000, budget_s=0.5)
    assert 2 <= found.num_batches < 1000
    assert found.candidates[0].wait_s.median >= 9.0  # 1000 x 0.01 s, carried forward


@pytest.mark.parametrize("on_host", [True, False])
def test_a_busy_host_is_acted_out_by_work_and_an_idle_one_by_waiting(monkeypatch, on_host):
    slept_s: list[float] = []
    monkeypatch.setattr("meshwright.bench.dataloader.time.sleep", slept_s.append)
    demand = Demand(step_s=0.05, source="a test", on_host=on_host)
    with FlopCounterMode(display=False) as counter:
        tune_training(Reader(lambda number: None), (0,), demand, budget_s=0.01)
    num_steps = (1 + LEAST_ROUNDS) * NUM_STEPS
    assert len(slept_s) >= (0 if on_host else num_steps)
    assert bool(slept_s) is not on_host
    num_gemms, rest = divmod(counter.get_total_flops(), 2 * WORK_SIZE**3)
    assert rest == 0
    assert num_gemms >= num_steps if on_host else num_gemms == 0


@pytest.mark.parametrize("tune", ["training", "validation"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_that_goes_away_is_bad_input_and_no_thread_stays(tune, num_workers):
    reads = 0

    def read(number: int) -> None:
        nonlocal reads
        reads += 1
        if reads > 9:
            raise FileNotFoundError(2, "No such file or directory", "/data/tokens.bin")

    def measure() -> object:
        if tune == "training":
            return tune_training(Reader(read), (num_workers,), GPU_STEP, budget_s=0.01)
        return tune_validation(Reader(read), (num_workers,), GPU_STEP, pass_batches=4, budget_s=0.01)

    with pytest.raises(InputError, match=r"no longer be read.*tokens\.bin"):
        measure()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_an_interrupt_ends_the_measuring_and_its_threads():
    def read(number: int) -> None:
        if number > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_training(Reader(read), (2,), GPU_STEP, budget_s=0.01)
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]
