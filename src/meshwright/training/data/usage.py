"""Labels, cuts and padding of the data of a run, as a record holds them. Data without labels is refused.

D documents   E extents (see `split`)   P samples
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.specs.run import TRAINING
from meshwright.training.data.split import Extents
from meshwright.training.data.store import TokenStore

_BLOCK_TOKENS = 1 << 22  # of the mask that are read at a time
_MOST_KEYS = 8  # that a line names


@dataclass(frozen=True, kw_only=True)
class DocumentLabels:
    """Labels of every document of some extents, each cut to the length of a sample."""

    starts_D: np.ndarray = field(repr=False)  # position in the store
    lengths_D: np.ndarray = field(repr=False)  # tokens, before the cut
    labels_D: np.ndarray = field(repr=False)  # labels that the loss counts, after the cut

    def of_ranges(self, ranges_P2: np.ndarray) -> np.ndarray:
        """Labels of ranges of positions that begin and end with documents [P]."""
        sums = np.concatenate([[0], np.cumsum(self.labels_D)])
        return (
            sums[np.searchsorted(self.starts_D, ranges_P2[:, 1])]
            - sums[np.searchsorted(self.starts_D, ranges_P2[:, 0])]
        )


PERCENTILES = (1, 10, 50, 90, 99)
_FIRSTS = np.unique([0, *np.ceil(2.0 ** (np.arange(80) / 2)).astype(np.int64)])  # of the bars: two an octave
_MOST_DOCUMENTS = 1_000_000  # of a stream whose lengths are counted, a tenth of a second at each start


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Tokens, or labels, of the examples of a source."""

    total: int
    percentiles: Mapping[int, int]  # the least number that so many percent of the examples do not exceed
    histogram: tuple[tuple[int, int, int], ...]  # least number, largest number, examples


def spread_of(values_X: np.ndarray) -> Spread:
    """
    >>> spread = spread_of(np.array([3, 5, 5, 9]))
    >>> spread.percentiles, spread.histogram
    ({1: 3, 10: 3, 50: 5, 90: 9, 99: 9}, ((3, 3, 1), (4, 5, 2), (6, 7, 0), (8, 11, 1)))
    """
    counts_B = np.bincount(np.searchsorted(_FIRSTS, values_X, side="right") - 1)
    bars = zip(_FIRSTS.tolist(), (_FIRSTS[1:] - 1).tolist(), counts_B.tolist(), strict=False)
    percentiles = np.percentile(values_X, PERCENTILES, method="inverted_cdf").astype(int).tolist()
    return Spread(
        total=int(values_X.sum()),
        percentiles=dict(zip(PERCENTILES, percentiles, strict=True)),
        histogram=tuple(bars)[np.flatnonzero(counts_B)[0] :],
    )


@dataclass(frozen=True, kw_only=True)
class ExampleLengths:
    """Examples of a source: documents, or pairs of answers behind their prompts."""

    num_examples: int
    tokens: Spread  # before the cut
    labels: Spread  # after it
    shortest: int  # number in the source, from 1
    longest: int


def lengths_of(
    store: TokenStore, documents: DocumentLabels, *, each: int = 1, num_copies: int = 1
) -> ExampleLengths | None:
    """Lengths of examples of `each` documents, of which so many are the same. None without an example."""
    lengths_X, labels_X = (of_D.reshape(-1, each).sum(1) for of_D in (documents.lengths_D, documents.labels_D))
    if not len(lengths_X):
        return None
    ends = (int(documents.starts_D[place * each]) for place in (lengths_X.argmin(), lengths_X.argmax()))
    shortest, longest = (store.document_at(start) // each + 1 for start in ends)
    return ExampleLengths(
        num_examples=len(lengths_X), tokens=spread_of(lengths_X // num_copies),
        labels=spread_of(labels_X), shortest=shortest, longest=longest,
    )  # fmt: skip


def count_document_labels(store: TokenStore, extents: Extents, *, sequence_length: int) -> DocumentLabels:
    """Count the labels of the documents of `extents`, of which a sample holds `sequence_length` + 1 tokens."""
    starts_E, lengths_E, labels_E = [], [], []
    for first, last in extents.ranges_E2.tolist():
        starts_N = np.concatenate([[first], store.starts_between(first, last)])
        starts_N = starts_N[np.diff(starts_N, prepend=first - 1) > 0]  # they rise: `np.unique` would sort them again
        ends_N = np.append(starts_N[1:], last)
        kept_N = np.minimum(ends_N, starts_N + sequence_length + 1)
        starts_E.append(starts_N)
        lengths_E.append(ends_N - starts_N)
        labels_E.append(_labels_between(store, starts_N, kept_N))
    return DocumentLabels(
        starts_D=np.concatenate(starts_E) if starts_E else np.empty(0, np.int64),
        lengths_D=np.concatenate(lengths_E) if lengths_E else np.empty(0, np.int64),
        labels_D=np.concatenate(labels_E) if labels_E else np.empty(0, np.int64),
    )


def _labels_between(store: TokenStore, starts_N: np.ndarray, stops_N: np.ndarray) -> np.ndarray:
    """Count trained tokens of each range, without its first token, which has no prediction."""
    if not store.is_masked:
        return stops_N - starts_N - 1
    labels_N = np.zeros(len(starts_N), dtype=np.int64)
    row = 0
    while row < len(starts_N):
        base = int(starts_N[row])
        end = max(row + 1, int(np.searchsorted(starts_N, base + _BLOCK_TOKENS)))
        sums = np.concatenate([[0], np.cumsum(store.trained(base, int(stops_N[end - 1])))])
        labels_N[row:end] = sums[stops_N[row:end] - base] - sums[starts_N[row:end] + 1 - base]
        row = end
    return labels_N


def describe_records(name: str, counts: Mapping[str, Any] | None) -> Iterator[str]:
    """Lines about the records that the data `name` was made from: formats, keys without a use, empty ones."""
    if counts is None:
        return
    formats, unused = counts["formats"], counts["unused_keys"]
    if set(formats) - {"text"}:
        yield f"{name}: " + ", ".join(f"{number:,} records of the format {kind}" for kind, number in formats.items())
    if unused:
        named = ", ".join(f"{key} ({number:,})" for key, number in list(unused.items())[:_MOST_KEYS])
        more = f" and {len(unused) - _MOST_KEYS:,} more" if len(unused) > _MOST_KEYS else ""
        yield f"{name}: keys without a use: {named}{more}"
    if counts["num_empty"]:
        yield f"{name}: {counts['num_empty']:,} records without text are skipped"


@dataclass(frozen=True, kw_only=True)
class DataUsage:
    """Counts of one epoch. A document is a record or a text file."""

    num_documents: int
    num_cut: int  # documents that end behind their sample, in data with prompts
    num_without_labels: int  # documents in which the loss counts no token, in data with prompts
    longest_tokens: int | None  # of one document; None: a stream
    num_samples: int
    num_samples_without_labels: int  # not trained on, and not in `num_samples`
    num_padded: int  # samples that end with padding
    label_ratio: float  # labels that the loss counts over the positions of all samples
    padding_ratio: float  # padding over the positions of all samples
    lengths: ExampleLengths | None  # None: a stream of more than a million documents

    def describe(self, name: str) -> str | None:
        """Describe the data `name` in a line; None: all tokens are trained on, and no record is padded or cut."""
        if not (self.num_cut or self.num_without_labels or self.num_padded):
            return None
        skipped = self.num_samples_without_labels
        return (
            f"{name}: {self.num_documents:,} records, {self.num_cut:,} cut by data.sequence_length, "
            f"{self.num_without_labels:,} without a label; {self.num_samples:,} samples, {self.num_padded:,} padded"
            + (f", {skipped:,} more without a label are skipped" if skipped else "")
            + f"; labels {100 * self.label_ratio:.1f} %, padding {100 * self.padding_ratio:.1f} %"
        )


def usage_of_documents(
    documents: DocumentLabels,
    ranges_P2: np.ndarray,
    *,
    sequence_length: int,
    num_skipped: int,
    lengths: ExampleLengths | None,
    kept_tokens: int | None = None,
) -> DataUsage:
    """Counts of whole documents, packed into the samples of `ranges_P2`.

    `kept_tokens`: of a document; None: all that a sample and its last label hold.
    """
    num_positions = max(1, len(ranges_P2) * sequence_length)
    padding_P = np.maximum(0, sequence_length - (ranges_P2[:, 1] - ranges_P2[:, 0]))
    return DataUsage(
        num_documents=len(documents.starts_D),
        num_cut=int((documents.lengths_D > (kept_tokens or sequence_length + 1)).sum()),
        num_without_labels=int((documents.labels_D == 0).sum()),
        longest_tokens=int(documents.lengths_D.max(initial=0)),
        num_samples=len(ranges_P2),
        num_samples_without_labels=num_skipped,
        num_padded=int((padding_P > 0).sum()),
        label_ratio=float(documents.labels_D.sum()) / num_positions,
        padding_ratio=float(padding_P.sum()) / num_positions,
        lengths=lengths,
    )


def usage_of_stream(
    store: TokenStore, extents: Extents, *, sequence_length: int, num_samples: int, joins_documents: bool = False
) -> DataUsage:
    """Counts of a stream, in which every token is a label but the first of each document, unless they are joined."""
    num_positions = num_samples * sequence_length
    left, num_begins = num_positions + 1, 0
    for first, last in extents.ranges_E2.tolist():
        stop = min(last, first + left)
        if stop <= first:
            break
        num_begins += 1 + len(store.starts_between(first, stop))
        left -= stop - first
    num_padding = max(0, num_positions - extents.num_tokens)  # of data that is shorter than a sample
    unlabelled = 0 if joins_documents else max(0, num_begins - 1)
    num_labels = min(num_positions, max(0, extents.num_tokens - 1)) - unlabelled
    is_few = store.num_documents <= _MOST_DOCUMENTS
    documents = count_document_labels(store, extents, sequence_length=store.num_tokens) if is_few else None
    if documents is not None and joins_documents:  # only the first token has no prediction
        is_later_D = ~np.isin(documents.starts_D, extents.ranges_E2[:, 0])
        documents = replace(documents, labels_D=documents.labels_D + is_later_D)
    return DataUsage(
        num_documents=num_begins,
        num_cut=0,
        num_without_labels=0,
        longest_tokens=None,
        num_samples=num_samples,
        num_samples_without_labels=0,
        num_padded=1 if num_padding else 0,
        label_ratio=num_labels / max(1, num_positions),
        padding_ratio=num_padding / max(1, num_positions),
        lengths=None if documents is None else lengths_of(store, documents),
    )


def require_labels(usage: DataUsage, *, name: str, sequence_length: int, documents: int | None = None) -> None:
    """Raise InputError if no document has a label. `documents`: that share a sample evenly; None: one may have it."""
    if usage.label_ratio > 0 or not usage.num_documents:
        return
    hint = "its answers are empty, or nothing in it is marked to be trained on"
    most = sequence_length // (documents or 1)
    if usage.num_cut and usage.longest_tokens:
        needed = documents * usage.longest_tokens if documents else usage.longest_tokens - 1
        hint = f"raise data.sequence_length: {needed} holds every record"
    raise InputError(
        f"{name} has nothing to train on: no record has an answer within data.sequence_length",
        got=f"{usage.num_documents} records, {usage.num_cut} of them longer than {most} tokens",
        allowed="at least one trained token", hint=hint,
    )  # fmt: skip


def usages_as_json(training: Mapping[str, DataUsage], validation: Mapping[str, DataUsage]) -> dict[str, Any]:
    """`statistics.data_usage` of a record; null: random tokens, or a mixture, whose sources are named."""
    by_name = {name: asdict(usage) for name, usage in training.items()}
    return {
        "training": by_name.get(TRAINING),
        "sources": {} if TRAINING in by_name else by_name,
        "validation": {name: asdict(usage) for name, usage in validation.items()},
    }
