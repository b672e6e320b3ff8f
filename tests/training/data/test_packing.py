"""Samples: the order without a table, boundaries, masks, and what is held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwright.errors import InputError
from meshwright.training.data.megatron import write_indexed
from meshwright.training.data.packing import (
    IGNORED_LABEL,
    PADDING_DOCUMENT,
    Sample,
    pair_samples,
    require_samples,
    stream_samples,
    whole_samples,
)
from meshwright.training.data.shuffle import Permutation
from meshwright.training.data.split import everything, hold_out
from meshwright.training.data.store import TokenStore, open_store

END = 0


def store_of(folder: Path, shards: Sequence[Sequence[int]], *, mask_every: int | None = None) -> TokenStore:
    """Documents of these lengths; tokens count up through the corpus and every document ends with END."""
    prefixes, token = [], 1
    for number, lengths in enumerate(shards):
        documents = []
        for length in lengths:
            documents.append(np.array([*range(token, token + length - 1), END]))
            token += length - 1
        prefixes.append(folder / f"shard-{number}")
        write_indexed(prefixes[-1], documents, dtype=np.uint16)
        if mask_every is not None:
            mask = np.arange(sum(lengths)) % mask_every != 0
            (folder / f"shard-{number}.trained").write_bytes(mask.astype(np.uint8).tobytes())
    return open_store(prefixes)


def check_labels(sample: Sample) -> None:
    """Every label is the next token of the same document, and no document's last token has one."""
    tokens, labels, documents = sample.tokens_T, sample.labels_T, sample.documents_T
    for t in range(len(tokens) - 1):
        follows = documents[t + 1] == documents[t] != PADDING_DOCUMENT
        assert labels[t] in ((tokens[t + 1], IGNORED_LABEL) if follows else (IGNORED_LABEL,))
        if follows:
            assert sample.positions_T[t + 1] == sample.positions_T[t] + 1
    assert all(label == IGNORED_LABEL for label in labels[tokens == END])


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_a_permutation_visits_every_place_once(length: int, seed: int, epoch: int) -> None:
    order = Permutation(length=length, seed=seed, epoch=epoch).at(np.arange(length))
    assert np.array_equal(np.sort(order), np.arange(length))


def test_a_permutation_depends_on_seed_and_epoch_and_looks_random() -> None:
    places = np.arange(10_000)
    orders = [Permutation(length=10_000, seed=s, epoch=e).at(places) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert all(np.mean(order == other) < 0.01 for other in orders[:i])


def test_a_permutation_of_a_trillion_needs_no_table() -> None:
    order = Permutation(length=10**12, seed=3).at([0, 10**12 - 1])
    assert 0 <= order.min() < order.max() < 10**12
    with pytest.raises(IndexError):
        Permutation(length=4, seed=0).at([4])


@pytest.mark.parametrize("length", [1, 7, 8, 64])
def test_a_stream_wastes_nothing_and_crosses_shards(tmp_path: Path, length: int) -> None:
    store = store_of(tmp_path, [[5, 9, 2], [30], [3, 3, 14]])
    samples = stream_samples(store, everything(store), sequence_length=length)
    assert samples.num_samples == (66 - 1) // length
    tokens = [samples.sample(n).tokens_T for n in range(samples.num_samples)]
    assert np.array_equal(np.concatenate(tokens), store.tokens(0, length * samples.num_samples))
    for n in range(samples.num_samples):
        check_labels(samples.sample(n))
    labels = np.concatenate([samples.sample(n).labels_T for n in range(samples.num_samples)])
    assert np.array_equal(labels == IGNORED_LABEL, np.concatenate(tokens) == END)  # also at the sample's end


def test_positions_and_documents_begin_anew_at_a_boundary(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[4, 6]])
    sample = stream_samples(store, everything(store), sequence_length=8).sample(0)
    assert sample.tokens_T.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    assert sample.labels_T.tolist() == [2, 3, 0, IGNORED_LABEL, 5, 6, 7, 8]
    assert sample.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sample.documents_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_tokens_that_are_not_trained_on_have_no_label(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[12]], mask_every=3)
    sample = stream_samples(store, everything(store), sequence_length=8).sample(0)
    expected = [2, 3, IGNORED_LABEL, 5, 6, IGNORED_LABEL, 8, 9]  # the mask is about what is predicted
    assert (sample.tokens_T.tolist(), sample.labels_T.tolist()) == ([1, 2, 3, 4, 5, 6, 7, 8], expected)


@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=40), cut=st.integers(0, 39), length=st.integers(4, 24))
def test_whole_documents_are_never_cut_unless_too_long(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, length: int
) -> None:
    shards = [part for part in (lengths[:cut], lengths[cut:]) if part]
    store = store_of(tmp_path_factory.mktemp("s"), shards)
    samples = whole_samples(store, everything(store), sequence_length=length)
    seen = []
    for number in range(samples.num_samples):
        sample = samples.sample(number)
        check_labels(sample)
        is_text = sample.documents_T != PADDING_DOCUMENT
        assert (sample.positions_T[is_text][np.diff(sample.documents_T[is_text], prepend=-1) == 1] == 0).all()
        assert (np.diff(is_text.astype(int)) <= 0).all()  # padding only at the end
        seen.append(sample.tokens_T[is_text])
    whole = [store.tokens(store.start_of(d), store.start_of(d + 1))[:length] for d in range(store.num_documents)]
    assert np.array_equal(np.concatenate(seen), np.concatenate(whole))
    starts = {int(document[0]) for document in whole}
    assert all(int(tokens[0]) in starts for tokens in seen)


def test_a_document_that_is_too_long_still_has_its_last_label(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[20, 3]])
    samples = whole_samples(store, everything(store), sequence_length=8)
    assert samples.sample(0).labels_T.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert samples.sample(1).tokens_T.tolist()[:3] == [20, 21, 0]


def test_a_pair_is_one_sample_and_each_answer_has_half_of_it(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[3, 4], [20, 3], [1, 5]])  # the shards part no pair
    samples = pair_samples(store, everything(store), sequence_length=12)
    assert samples.num_samples == 2  # a document of one token has no label
    first, cut = samples.sample(0), samples.sample(1)
    check_labels(first)
    assert first.documents_T.tolist() == [0] * 3 + [1] * 4 + [PADDING_DOCUMENT] * 5
    assert (cut.documents_T == 0).sum() == 6
    assert cut.tokens_T[6:9].tolist() == store.tokens(store.start_of(3), store.start_of(4)).tolist()
    assert cut.positions_T.tolist() == [*range(6), *range(3), 0, 0, 0]
    usage = samples.usage
    assert (usage.num_documents, usage.num_cut, usage.num_samples_without_labels) == (6, 1, 1)
    assert usage.label_ratio == (2 + 3 + 5 + 2) / 24  # without those of the skipped pair
    assert usage.padding_ratio == (5 + 3) / 24


def test_pairs_that_are_all_cut_are_refused_with_the_length_that_holds_them(tmp_path: Path) -> None:
    store_of(tmp_path, [[20, 30] * 3])
    mask_N = np.zeros(150, np.uint8)
    mask_N[np.cumsum([20, 30] * 3) - 1] = 1  # the last token of each document
    (tmp_path / "shard-0.trained").write_bytes(mask_N.tobytes())
    store = open_store([tmp_path / "shard-0"])
    samples = pair_samples(store, everything(store), sequence_length=50)
    with pytest.raises(InputError, match="nothing to train on") as caught:
        require_samples(samples, name="x", needed=1)
    assert caught.value.hint == "raise data.sequence_length: 60 holds every record"


def test_pairs_are_held_out_whole(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[4, 6] * 20])
    split = hold_out(store, whole_documents=True, group=2)
    for extents in (split.train, split.validation):
        assert (extents.ranges_E2 % 10 == 0).all()  # a pair has ten tokens
    assert 0 < split.validation.num_tokens < store.num_tokens


@pytest.mark.parametrize("whole_documents", [False, True])
def test_the_validation_part_shares_no_token_with_training(tmp_path: Path, whole_documents: bool) -> None:
    generator = np.random.default_rng(0)
    store = store_of(tmp_path, [generator.integers(2, 60, 100).tolist(), generator.integers(2, 60, 100).tolist()])
    split = hold_out(store, whole_documents=whole_documents)
    ranges = np.concatenate([split.train.ranges_E2, split.validation.ranges_E2])
    ranges = ranges[np.argsort(ranges[:, 0])]
    assert ranges[0, 0] == 0
    assert ranges[-1, 1] == store.num_tokens
    assert (ranges[1:, 0] == ranges[:-1, 1]).all()  # no gap, no overlap
    assert split.validation.num_tokens >= int(0.1 * store.num_tokens)
    pack = whole_samples if whole_documents else stream_samples
    parts = [pack(store, extents, sequence_length=8) for extents in (split.train, split.validation)]
    train, validation = (
        {int(t) for n in range(p.num_samples) for t in p.sample(n).tokens_T if t != END} for p in parts
    )
    assert validation
    assert not train & validation
    for samples in parts:
        for number in range(samples.num_samples):
            check_labels(samples.sample(number))


def test_one_document_gives_its_end_or_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1000]])
    assert hold_out(store, whole_documents=False).validation.ranges_E2.tolist() == [[900, 1000]]
    assert hold_out(store, whole_documents=True).validation.num_tokens == 0
