"""Lengths of the examples of a run's data, before it trains on them.

An example is a document, or with `train.preference` a pair of answers, each behind its prompt, or a judged answer.

X examples   B bars of a histogram
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.specs.run import Run
from meshwright.training.data.corpus import open_data
from meshwright.training.data.mixture import Mixture
from meshwright.training.data.packing import PairSamples, Samples, StreamSamples, WholeSamples
from meshwright.training.data.usage import DataUsage, count_document_labels

PERCENTILES = (1, 10, 50, 90, 99)
FIRSTS = np.unique([0, *np.ceil(2.0 ** (np.arange(80) / 2)).astype(np.int64)])
"""Smallest number of each bar of a histogram: two bars an octave."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Tokens, or labels, of all examples."""

    total: int
    percentiles: Mapping[int, int]  # the least number that so many percent of the examples do not exceed
    histogram: tuple[tuple[int, int, int], ...]  # least number, largest number, examples


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example by its number in the source, from 1; records without text have none."""

    number: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class DataLengths:
    """The examples of one source. Tokens are counted before the cut, labels after it."""

    kind: str  # documents, conversations, pairs, judged answers
    num_examples: int
    tokens: Spread
    labels: Spread | None  # of an example; None: a stream of text, whose samples cut through documents
    num_labels: int  # in the samples of an epoch
    shortest: Example
    longest: Example
    usage: DataUsage


def data_lengths(run: Run) -> dict[str, dict[str, DataLengths]]:
    """Lengths of the sources of `run` for training and validation, by name; empty: random tokens.

    Tokenises the data, as training does, and keeps its tokens in the cache.
    """
    corpus = open_data(run)
    train = corpus.train
    training = train.sources if isinstance(train, Mixture) else dict.fromkeys(run.data.sources, train)
    return {"training": _lengths_of(training), "validation": _lengths_of(corpus.validations)}


def _lengths_of(sources: Mapping[str, Samples]) -> dict[str, DataLengths]:
    return {
        name: lengths_of(samples)
        for name, samples in sources.items()
        if isinstance(samples, StreamSamples | WholeSamples | PairSamples)
    }


def lengths_of(samples: StreamSamples | WholeSamples | PairSamples) -> DataLengths:
    """Lengths of the examples that `samples` are made of."""
    store, usage = samples.store, samples.usage
    group, length = 1, samples.sequence_length
    if isinstance(samples, PairSamples):
        group, length = 2, length // 2 - 1
    found = count_document_labels(store, samples.extents, sequence_length=length)
    lengths_X, labels_X = (of_D.reshape(-1, group).sum(1) for of_D in (found.lengths_D, found.labels_D))
    counts, kind = store.counts or {}, "documents"
    if isinstance(samples, PairSamples):
        kind = "pairs" if samples.is_chosen_P is None else "judged answers"
        lengths_X = lengths_X if samples.is_chosen_P is None else lengths_X // 2  # the document is there twice
    elif counts.get("num_conversations") == store.num_documents:
        kind = "conversations"

    def example(place: np.intp) -> Example:
        number = store.document_at(int(found.starts_D[int(place) * group])) // group + 1
        return Example(number=number, num_tokens=int(lengths_X[place]))

    return DataLengths(
        kind=kind,
        num_examples=len(lengths_X),
        tokens=spread_of(lengths_X),
        labels=None if isinstance(samples, StreamSamples) else spread_of(labels_X),
        num_labels=round(usage.label_ratio * usage.num_samples * samples.sequence_length),
        shortest=example(lengths_X.argmin()),
        longest=example(lengths_X.argmax()),
        usage=usage,
    )


def spread_of(values_X: np.ndarray) -> Spread:
    """
    >>> spread = spread_of(np.array([3, 5, 5, 9]))
    >>> spread.percentiles, spread.histogram
    ({1: 3, 10: 3, 50: 5, 90: 9, 99: 9}, ((3, 3, 1), (4, 5, 2), (6, 7, 0), (8, 11, 1)))
    """
    counts_B = np.bincount(np.searchsorted(FIRSTS, values_X, side="right") - 1)
    bars = zip(FIRSTS.tolist(), (FIRSTS[1:] - 1).tolist(), counts_B.tolist(), strict=False)
    return Spread(
        total=int(values_X.sum()),
        percentiles={p: int(np.percentile(values_X, p, method="inverted_cdf")) for p in PERCENTILES},
        histogram=tuple(bars)[np.flatnonzero(counts_B)[0] :],
    )
