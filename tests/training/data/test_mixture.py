"""Mixtures of sources: proportions, epochs, and an order that only `train.seed` and the place decide."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwright.training.data.batches import Batches
from meshwright.training.data.mixture import Mixture
from meshwright.training.data.packing import Sample, SyntheticSamples

SOURCES = st.dictionaries(
    st.sampled_from(["web", "code", "books", "wiki", "maths"]),
    st.tuples(st.integers(1, 40), st.floats(0.01, 100)),
    min_size=1,
)


class Numbered(SyntheticSamples):
    """Samples whose tokens are all their number."""

    def sample(self, number: int) -> Sample:
        of_number = super().sample(number)
        tokens_T = np.full_like(of_number.tokens_T, number)
        return Sample(
            tokens_T=tokens_T,
            labels_T=of_number.labels_T,
            positions_T=of_number.positions_T,
            documents_T=of_number.documents_T,
        )


def mixture_of(sources):
    return Mixture(
        sources={name: Numbered(vocab=9, sequence_length=2, num_samples=n) for name, (n, _) in sources.items()},
        weights={name: weight for name, (_, weight) in sources.items()},
    )


def places_in(mixture, numbers):
    """(source, number within it) of each number of the mixture."""
    every = [(name, i) for name in mixture.names for i in range(mixture.sources[name].num_samples)]
    return [every[number] for number in numbers]


@settings(max_examples=30, deadline=None)
@given(SOURCES, st.integers(0, 2**62), st.integers(0, 2**63))
def test_every_stretch_has_the_proportions_of_the_weights(sources, first, seed):
    mixture = mixture_of(sources)
    found = Counter(name for name, _ in places_in(mixture, mixture.numbers(range(first, first + 100), seed=seed)))
    total = sum(weight for _, weight in sources.values())
    for name, (_, weight) in sources.items():
        assert abs(found[name] - 100 * weight / total) <= 2 * ceil(log2(len(sources))) + 1e-6
        before, after = mixture.progress(first)[name], mixture.progress(first + 100)[name]
        assert after.num_samples - before.num_samples == found[name]
        assert after.share == pytest.approx(weight / total)
        assert after.num_epochs == after.num_samples / mixture.sources[name].num_samples


@settings(max_examples=30, deadline=None)
@given(SOURCES, st.integers(0, 2**63))
def test_no_sample_comes_twice_within_an_epoch_of_its_source(sources, seed):
    mixture = mixture_of(sources)
    read = places_in(mixture, mixture.numbers(range(120), seed=seed))
    for name, source in mixture.sources.items():
        of_source = iter([number for other, number in read if other == name])
        while epoch := list(islice(of_source, source.num_samples)):
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(source.num_samples))


@settings(max_examples=40, deadline=None)
@given(SOURCES, st.integers(0, 2**40), st.integers(1, 4), st.integers(1, 4))
def test_the_order_depends_neither_on_ranks_nor_on_batches_nor_on_the_order_of_names(sources, step, width, per_rank):
    mixture, reverse = mixture_of(sources), mixture_of(dict(reversed(sources.items())))
    batch = width * per_rank
    whole = mixture.numbers(range(step * batch, (step + 1) * batch), seed=7)
    parts = [
        Batches(samples=reverse, global_batch=batch, seed=7, data_rank=rank, data_width=width) for rank in range(width)
    ]
    assert [n for part in parts for n in part.sample_numbers(step)] == whole
    ones = Batches(samples=mixture, global_batch=1, seed=7, offset=step * batch)
    assert [n for i in range(batch) for n in ones.sample_numbers(i)] == whole
    assert parts[0].progress(step) == mixture.progress(step * batch)


def test_another_seed_is_another_order_and_equal_sources_do_not_walk_together():
    mixture = mixture_of({"a": (1000, 1), "b": (1000, 1)})
    numbers = mixture.numbers(range(400), seed=1)
    assert numbers != mixture.numbers(range(400), seed=2)
    read = places_in(mixture, numbers)
    assert [n for name, n in read if name == "a"] != [n for name, n in read if name == "b"]


def test_a_sample_of_the_mixture_is_that_of_its_source():
    mixture = mixture_of({"a": (3, 1), "b": (5, 2)})
    assert [int(mixture.sample(n).tokens_T[0]) for n in range(8)] == [0, 1, 2, 0, 1, 2, 3, 4]
