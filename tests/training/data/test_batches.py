"""Batches: the same on any number of processes, and resumed at any step."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from meshwright.errors import InputError
from meshwright.training.data import Batches, ReadAhead, measure_workers
from meshwright.training.data.megatron import write_indexed
from meshwright.training.data.packing import Samples, SyntheticSamples, stream_samples
from meshwright.training.data.split import everything
from meshwright.training.data.store import open_store
from meshwright.training.data.workers import prefetch


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """25 samples of 16 tokens."""
    generator = np.random.default_rng(1)
    write_indexed(tmp_path / "a", [generator.integers(1, 500, n) for n in (100, 31, 170, 105)], dtype=np.uint16)
    store = open_store([tmp_path / "a"])
    return stream_samples(store, everything(store), sequence_length=16)


def rows(samples: Samples, step: int, width: int, seed: int = 0) -> torch.Tensor:
    parts = [
        Batches(samples=samples, global_batch=8, seed=seed, data_rank=rank, data_width=width).at(step).tokens_BT
        for rank in range(width)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_global_order_is_the_same_on_any_number_of_ranks(samples: Samples, width: int) -> None:
    for step in (0, 1, 3, 17):  # step 3 crosses an epoch
        assert torch.equal(rows(samples, step, width), rows(samples, step, 1))


def test_every_epoch_sees_every_sample_once_in_another_order(samples: Samples) -> None:
    batches = Batches(samples=samples, global_batch=5)
    assert (samples.num_samples, batches.num_to_the_end) == (25, 5)
    epochs = [[n for step in range(5 * e, 5 * e + 5) for n in batches.sample_numbers(step)] for e in range(3)]
    assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches.progress(5)["training"].num_epochs == 1.0


def test_resuming_at_any_step_equals_never_having_stopped(samples: Samples) -> None:
    whole = [b.tokens_BT for b in Batches(samples=samples, global_batch=4, seed=7).iterate(stop=20)]
    assert len(whole) == 20
    for step in range(20):
        again = Batches(samples=samples, global_batch=4, seed=7).iterate(start=step, stop=20, num_workers=step % 3)
        assert all(torch.equal(a.tokens_BT, b) for a, b in zip(again, whole[step:], strict=True))


def test_resuming_on_another_number_of_ranks_continues_the_same_order(samples: Samples) -> None:
    before = [rows(samples, step, 2) for step in range(7)]
    after = [rows(samples, step, 4) for step in range(7, 14)]
    whole = [rows(samples, step, 1) for step in range(14)]
    assert all(torch.equal(a, b) for a, b in zip([*before, *after], whole, strict=True))


def test_the_seed_changes_the_order_and_nothing_else(samples: Samples) -> None:
    assert torch.equal(rows(samples, 0, 1, seed=1), rows(samples, 0, 1, seed=1))
    assert not torch.equal(rows(samples, 0, 1, seed=1), rows(samples, 0, 1, seed=2))


def test_validation_keeps_the_order_of_the_corpus(samples: Samples) -> None:
    batches = Batches(samples=samples, global_batch=4, is_shuffled=False)
    assert [batches.sample_numbers(step) for step in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_has_one_dtype_and_agrees_with_itself(samples: Samples) -> None:
    batch = Batches(samples=samples, global_batch=6).at(0).to("cpu")
    for tensor in (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT):
        assert (tensor.dtype, tensor.shape) == (torch.int64, (6, 16))
    assert batch.num_trained_tokens == int((batch.labels_BT != -100).sum())
    parts = list(batch.micro_batches(4))
    assert [len(p.tokens_BT) for p in parts] == [4, 2]
    assert torch.equal(torch.cat([p.positions_BT for p in parts]), batch.positions_BT)


def test_synthetic_tokens_are_reproducible_and_never_repeat() -> None:
    batches = Batches(samples=SyntheticSamples(vocab=50, sequence_length=8, seed=-1), global_batch=4, vocab=50)
    assert torch.equal(batches.at(3).tokens_BT, batches.at(3).tokens_BT)
    assert not torch.equal(batches.at(3).tokens_BT, batches.at(4).tokens_BT)
    assert int(batches.at(0).labels_BT.min()) >= 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch": 6, "data_width": 4}, "evenly"),
        ({"global_batch": 0}, "evenly"),
        ({"global_batch": 4, "data_rank": 2, "data_width": 2}, "data rank"),
    ],
)
def test_impossible_shares_are_bad_input(samples: Samples, settings: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Batches(samples=samples, **settings)  # pyright: ignore[reportArgumentType]


def test_a_token_outside_the_vocabulary_is_bad_input(samples: Samples) -> None:
    with pytest.raises(InputError, match="vocabulary"):
        next(Batches(samples=samples, global_batch=8, vocab=100).iterate())


def test_an_error_in_a_worker_is_raised_in_its_place_and_threads_end() -> None:
    def read(number: int) -> int:
        if number == 3:
            raise InputError("broken")
        return number

    reading = prefetch(read, start=0, stop=10, num_workers=2)
    assert [next(reading) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="broken"):
        next(reading)
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_closing_the_iterator_ends_its_threads(samples: Samples) -> None:
    reading = Batches(samples=samples, global_batch=4).iterate(num_workers=2)
    next(reading)
    reading.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_the_number_of_workers_is_the_fewest_that_keep_up() -> None:
    def read(number: int) -> None:
        time.sleep(0.01)

    assert measure_workers(read, step_s=100.0, num_batches=2).num_workers == 0
    assert measure_workers(read, step_s=1.0, num_batches=2).num_workers == 1  # inline would cost 1 % or more
    unknown = measure_workers(read, num_batches=4, candidates=(0, 1, 2))
    assert unknown.num_workers in set(unknown.batch_s) - {0}
    assert all(seconds > 0.002 for seconds in unknown.batch_s.values())


def test_reading_ahead_chooses_its_threads_in_the_first_steps_and_changes_no_batch() -> None:
    reads: list[int] = []

    def read(number: int) -> int:
        reads.append(number)
        time.sleep(0.004)
        return number * number

    ahead = ReadAhead(read, num_steps=3)
    asked = [*range(10), 0, 1, 20, 21]  # in order, from the start again, and on after a gap
    found = []
    for number in asked:
        found.append(ahead.at(number))
        time.sleep(0.02)
    assert found == [number * number for number in asked]
    assert ahead.choice is not None
    assert ahead.choice.num_workers >= 1  # without a thread reading would be a fifth of the step
    assert ahead.choice.step_s is not None
    assert ahead.choice.step_s >= 0.02
    assert set(ahead.choice.batch_s) >= {0, 1}


def test_reading_that_costs_nothing_takes_no_thread() -> None:
    ahead = ReadAhead(lambda number: number, num_steps=2)
    for number in range(5):
        assert ahead.at(number) == number
        time.sleep(0.01)
    assert ahead.choice is not None
    assert ahead.choice.num_workers == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_a_number_of_workers_that_is_given_is_not_measured() -> None:
    ahead = ReadAhead(lambda number: number, num_workers=2)
    assert [ahead.at(number) for number in range(9)] == list(range(9))
    assert ahead.choice is not None
    assert (ahead.choice.num_workers, ahead.choice.batch_s) == (2, {})
    assert len([t for t in threading.enumerate() if t.name.startswith("data")]) == 2
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_pass_reads_nothing_beyond_its_end_and_leaves_no_thread(num_workers: int) -> None:
    reads: list[int] = []
    ahead = ReadAhead(lambda number: reads.append(number) or number, num_workers=num_workers, stop=5)
    for _ in range(2):
        assert [ahead.at(number) for number in range(5)] == list(range(5))
        assert not [t for t in threading.enumerate() if t.name.startswith("data")]
    assert sorted(reads) == sorted([*range(5)] * 2)
