"""Samples of a fixed length, cut from a corpus, each a pure function of its number.

There are two ways. A *stream*, for pretraining, cuts the corpus every `sequence_length` tokens, through
documents: no position is wasted. *Whole documents*, for fine-tuning, are laid side by side until the next
does not fit, and the rest of the sample is padding: answers keep their prompts.

In both, attention and positions begin anew at every document. The last token of a document has no label: the
next token is unrelated.

    N tokens of a piece   T positions of a sample   P samples   E extents (see `split`)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.data.split import Extents
from meshwright.training.data.store import TokenStore
from meshwright.training.data.usage import (
    DataUsage,
    count_document_labels,
    lengths_of,
    require_labels,
    usage_of_documents,
    usage_of_stream,
)

PADDING_DOCUMENT = -1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a batch. All arrays are int64 of T positions; padding has document -1, token 0 and position 0."""

    tokens_T: np.ndarray
    labels_T: np.ndarray  # the next token, or IGNORED_LABEL where the loss does not count it
    positions_T: np.ndarray  # from the start of the document, or of the part of it in this sample
    documents_T: np.ndarray  # 0, 1, ... within the sample


class Samples(Protocol):
    """A corpus as numbered samples."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        ...

    @property
    def sequence_length(self) -> int:
        """T."""
        ...

    def sample(self, number: int) -> Sample:
        """Sample `number` of an epoch, in corpus order."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamSamples:
    """The corpus cut every `sequence_length` tokens; each sample also reads the token after it, for the last label."""

    store: TokenStore
    sequence_length: int
    ranges_E2: np.ndarray = field(repr=False)
    starts_E: np.ndarray = field(repr=False)  # where each extent begins when extents are laid end to end
    num_samples: int
    num_tokens: int
    usage: DataUsage
    joins_documents: bool = False

    def sample(self, number: int) -> Sample:
        """Tokens number*T to number*T + T of the extents laid end to end."""
        start = number * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.num_tokens)
        tokens, trained, begins = [], [], []
        extent = int(np.searchsorted(self.starts_E, start, side="right")) - 1
        at = start
        while at < stop:
            first, last = self.ranges_E2[extent]
            a = int(first) + at - int(self.starts_E[extent])
            b = min(int(last), a + stop - at)
            tokens.append(self.store.tokens(a, b))
            trained.append(self.store.trained(a, b))
            starts_N = self.store.starts_between(a, b) - a
            begins.append(np.concatenate([[0], starts_N[:0] if self.joins_documents else starts_N]) + at - start)
            at, extent = at + b - a, extent + 1
        return assemble(
            np.concatenate(tokens), np.concatenate(trained), np.concatenate(begins), length=self.sequence_length
        )


def stream_samples(
    store: TokenStore,
    extents: Extents,
    *,
    sequence_length: int,
    pads_short: bool = False,
    joins_documents: bool = False,
) -> StreamSamples:
    """Cut these extents. The tokens after the last whole sample are not used.

    `pads_short`: extents shorter than a sample are one sample with padding, if they have two tokens.
    `joins_documents`: attention, positions and labels run on where a document ends.
    """
    ranges_E2 = extents.ranges_E2
    num_samples = max(0, (extents.num_tokens - 1) // sequence_length)
    if pads_short and extents.num_tokens > 1:
        num_samples = max(1, num_samples)
    return StreamSamples(
        store=store,
        sequence_length=sequence_length,
        ranges_E2=ranges_E2,
        starts_E=np.cumsum(np.concatenate([[0], ranges_E2[:, 1] - ranges_E2[:, 0]]))[:-1],
        num_samples=num_samples,
        num_tokens=extents.num_tokens,
        usage=usage_of_stream(
            store, extents, sequence_length=sequence_length, num_samples=num_samples, joins_documents=joins_documents
        ),
        joins_documents=joins_documents,
    )


@dataclass(frozen=True, kw_only=True)
class WholeSamples:
    """Whole documents side by side; row p of `ranges_P2` is the range of sample p."""

    store: TokenStore
    sequence_length: int
    ranges_P2: np.ndarray = field(repr=False)
    usage: DataUsage

    @property
    def num_samples(self) -> int:
        """P."""
        return len(self.ranges_P2)

    def sample(self, number: int) -> Sample:
        """Return the sample's documents. A document that is too long is cut, and its next token is the last label."""
        start, stop = map(int, self.ranges_P2[number])
        stop = min(stop, start + self.sequence_length + 1)
        begins = np.concatenate([[0], self.store.starts_between(start, stop) - start])
        return assemble(
            self.store.tokens(start, stop), self.store.trained(start, stop), begins, length=self.sequence_length
        )


def whole_samples(
    store: TokenStore, extents: Extents, *, sequence_length: int, most_prompt: int | None = None
) -> WholeSamples:
    """Fill samples with the documents of these extents, in order. Extents begin and end with documents.

    A sample without a label is skipped, so that every batch has a loss. `most_prompt`: each document has a sample of
    its own, and is skipped unless its prompt has so many tokens at most and its answer ends in the sample.
    """
    if most_prompt is not None:
        return _single_samples(store, extents, sequence_length=sequence_length, most_prompt=most_prompt)
    ranges = []
    for start, end in extents.ranges_E2:
        while start < end:
            last = store.document_at(min(int(start) + sequence_length, int(end) - 1))
            stop = end if int(end) - int(start) <= sequence_length else store.start_of(last)
            if stop <= start:  # not even one document fits
                stop = store.start_of(store.document_at(int(start)) + 1)
            ranges.append((int(start), int(stop)))
            start = stop
    all_P2 = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    documents = count_document_labels(store, extents, sequence_length=sequence_length)
    ranges_P2 = all_P2[documents.of_ranges(all_P2) > 0]
    usage = usage_of_documents(
        documents, ranges_P2, sequence_length=sequence_length, num_skipped=len(all_P2) - len(ranges_P2),
        lengths=lengths_of(store, documents),
    )  # fmt: skip
    return WholeSamples(store=store, sequence_length=sequence_length, ranges_P2=ranges_P2, usage=usage)


def answer_at(trained_N: np.ndarray) -> int:
    """Place at which the last answer begins, the last run of trained tokens.

    >>> answer_at(np.array([False, True, False, False, True, True, False]))
    4
    """
    stop = len(trained_N) - int(trained_N[::-1].argmax())
    return stop - int((~trained_N[:stop][::-1]).argmax()) if not trained_N[:stop].all() else 0


def _single_samples(store: TokenStore, extents: Extents, *, sequence_length: int, most_prompt: int) -> WholeSamples:
    documents = count_document_labels(store, extents, sequence_length=sequence_length)
    ranges_D2 = np.stack([documents.starts_D, documents.starts_D + documents.lengths_D], axis=1)
    prompts_D = np.array([answer_at(store.trained(*ends)) for ends in ranges_D2.tolist()], np.int64)
    kept_D = (documents.labels_D > 0) & (documents.lengths_D <= sequence_length + 1) & (prompts_D <= most_prompt)
    documents = replace(documents, labels_D=documents.labels_D * kept_D)
    usage = usage_of_documents(
        documents, ranges_D2[kept_D], sequence_length=sequence_length, num_skipped=int((~kept_D).sum()),
        lengths=lengths_of(store, documents),
    )  # fmt: skip
    return WholeSamples(store=store, sequence_length=sequence_length, ranges_P2=ranges_D2[kept_D], usage=usage)


@dataclass(frozen=True, kw_only=True)
class PairSamples:
    """Pairs of answers to one prompt, one pair a sample: document 0 is the chosen one, 1 the rejected one.

    Of judged answers document 0 or 1 comes first, a desirable one or not, and behind it as the other one its prompt
    with the answer of the record before. Each has up to half of the positions.
    """

    store: TokenStore
    sequence_length: int
    ranges_P22: np.ndarray = field(repr=False)  # of both documents, after the cut; of judged ones the own one is first
    usage: DataUsage
    is_chosen_P: np.ndarray | None = field(default=None, repr=False)  # of judged answers: desirable

    @property
    def num_samples(self) -> int:
        """P."""
        return len(self.ranges_P22)

    def sample(self, number: int) -> Sample:
        """Return the pair."""
        own, other = (self._read(*ends) for ends in self.ranges_P22[number].tolist())
        if self.is_chosen_P is not None:
            prompt = own[:, : own[1].argmax()]
            other = np.concatenate([prompt, other[:, other[1].argmax() :]], axis=1)[:, : self.sequence_length // 2]
        tokens_N, trained_N = np.concatenate([own, other], axis=1)
        begins = np.array([0, own.shape[1]])
        found = assemble(tokens_N, trained_N.astype(bool), begins, length=self.sequence_length)
        if self.is_chosen_P is None or self.is_chosen_P[number]:
            return found
        documents_T = np.where(found.documents_T < 0, found.documents_T, 1 - found.documents_T)
        return replace(found, documents_T=documents_T)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Tokens, and whether they are trained on [2, N]."""
        return np.stack([self.store.tokens(start, stop).astype(np.int64), self.store.trained(start, stop)])


def pair_samples(store: TokenStore, extents: Extents, *, sequence_length: int, is_judged: bool = False) -> PairSamples:
    """The pairs of these extents, in order. A pair is skipped if an answer has no label within half of the sample."""
    half, is_chosen_P = sequence_length // 2, None
    documents = count_document_labels(store, extents, sequence_length=half - 1)
    lengths = lengths_of(store, documents, each=2, num_copies=1 + is_judged)
    if is_judged:  # the document with the label, of both
        is_chosen_P = documents.labels_D[::2] > 0
        places_P = np.arange(len(is_chosen_P)) * 2 + ~is_chosen_P
        documents = replace(documents, **{name: of_D[places_P] for name, of_D in vars(documents).items()})
    stops_D = documents.starts_D + np.minimum(documents.lengths_D, half)
    ends_D2, has_label_D = np.stack([documents.starts_D, stops_D], axis=1), documents.labels_D > 0
    if is_chosen_P is None:
        kept_P = has_label_D.reshape(-1, 2).all(axis=1)
        ranges_P22 = ends_D2.reshape(-1, 2, 2)[kept_P]
        documents = replace(documents, labels_D=documents.labels_D * kept_P.repeat(2))
    else:
        kept_P, is_chosen_P = has_label_D, is_chosen_P[has_label_D]
        ranges_P22 = np.stack([ends_D2[kept_P], np.roll(ends_D2[kept_P], 1, axis=0)], axis=1)
    # Both documents as one range that is as long, for the counts; of judged ones about as long.
    joined_P2 = np.stack([ranges_P22[:, 0, 0], ranges_P22[:, 0, 1] + np.diff(ranges_P22[:, 1])[:, 0]], axis=1)
    usage = usage_of_documents(
        documents, joined_P2, sequence_length=sequence_length, num_skipped=int((~kept_P).sum()), kept_tokens=half,
        lengths=lengths,
    )  # fmt: skip
    return PairSamples(
        store=store, sequence_length=sequence_length, ranges_P22=ranges_P22, usage=usage, is_chosen_P=is_chosen_P
    )


@dataclass(frozen=True, kw_only=True)
class SyntheticSamples:
    """Random tokens: the load of training without data. No two samples are alike."""

    vocab: int
    sequence_length: int
    seed: int = 0
    num_samples: int = 1 << 40
    num_documents: int = 1  # of a sample, equally long; two are a pair of answers

    def sample(self, number: int) -> Sample:
        """Uniform tokens from a generator of this number's own."""
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed % 2**64, number], dtype=np.uint64)))
        tokens_N = generator.integers(0, self.vocab, size=self.sequence_length + 1, dtype=np.int64)
        begins = np.arange(self.num_documents) * self.sequence_length // self.num_documents
        return assemble(tokens_N, np.ones(len(tokens_N), bool), begins, length=self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class FirstSamples:
    """The first `num_samples` of a corpus."""

    samples: Samples
    num_samples: int

    @property
    def sequence_length(self) -> int:
        """T."""
        return self.samples.sequence_length

    def sample(self, number: int) -> Sample:
        """Sample `number` of the corpus."""
        return self.samples.sample(number)


def first_samples(samples: Samples, most: int | None) -> Samples:
    """The first `most` samples; all of them where there are fewer, or `most` is None."""
    if most is None or most >= samples.num_samples:
        return samples
    return FirstSamples(samples=samples, num_samples=most)


def padding_sample(length: int) -> Sample:
    """A sample of padding only: it has no label."""
    empty_N = np.empty(0, np.int64)
    return assemble(empty_N, empty_N.astype(bool), empty_N, length=length)


def assemble(tokens_N: np.ndarray, trained_N: np.ndarray, begins: np.ndarray, *, length: int) -> Sample:
    """A sample from up to `length` + 1 tokens; `begins` are the places at which documents begin, the first is 0.

    >>> s = assemble(np.array([5, 6, 9, 7, 8]), np.ones(5, bool), np.array([0, 3]), length=6)
    >>> for row in (s.tokens_T, s.labels_T, s.positions_T, s.documents_T): print(row.tolist())
    [5, 6, 9, 7, 8, 0]
    [6, 9, -100, 8, -100, -100]
    [0, 1, 2, 0, 1, 0]
    [0, 0, 0, 1, 1, -1]
    """
    num_tokens = len(tokens_N)
    is_begin_N = np.zeros(num_tokens, dtype=bool)
    is_begin_N[begins] = True
    documents_N = np.cumsum(is_begin_N) - 1
    positions_N = np.arange(num_tokens) - np.flatnonzero(is_begin_N)[documents_N]
    counted_N = trained_N[1:] & ~is_begin_N[1:]
    labels_N = np.where(counted_N, tokens_N[1:], IGNORED_LABEL)
    return Sample(
        tokens_T=_fit(tokens_N, length, 0),
        labels_T=_fit(labels_N, length, IGNORED_LABEL),
        positions_T=_fit(positions_N, length, 0),
        documents_T=_fit(documents_N, length, PADDING_DOCUMENT),
    )


def _fit(values_N: np.ndarray, length: int, padding: int) -> np.ndarray:
    """The first `length` values, padded where there are fewer."""
    if len(values_N) >= length:
        return values_N[:length]
    return np.concatenate([values_N, np.full(length - len(values_N), padding, values_N.dtype)])


TextSamples = StreamSamples | WholeSamples | PairSamples


def require_samples(samples: TextSamples, *, name: str, needed: int) -> None:
    """Raise InputError when a corpus has no label, or fewer samples than one global batch."""
    if not isinstance(samples, StreamSamples) or samples.num_samples:
        together = 2 if isinstance(samples, PairSamples) else None
        require_labels(samples.usage, name=name, sequence_length=samples.sequence_length, documents=together)
    if samples.num_samples < needed:
        what = f"one global batch needs {needed} samples of {samples.sequence_length} tokens"
        if needed == 1:
            what = f"it has not one sample of {samples.sequence_length} tokens"
        raise InputError(
            f"{name} is too small: {what}", got=samples.num_samples,
            hint="use more text, a smaller global batch, or a shorter sequence",
        )  # fmt: skip
