"""Labels, cuts and padding of the data of a run, as a record holds them. Data without labels is refused.

D documents   E extents (see `split`)   P samples
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
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


def count_document_labels(store: TokenStore, extents: Extents, *, sequence_length: int) -> DocumentLabels:
    """Count the labels of the documents of `extents`, of which a sample holds `sequence_length` + 1 tokens."""
    starts_E, lengths_E, labels_E = [], [], []
    for first, last in extents.ranges_E2.tolist():
        starts_N = np.unique(np.concatenate([[first], store.starts_between(first, last)]))
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
