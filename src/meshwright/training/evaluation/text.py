"""Loss of a corpus: every document in windows, every token but the first of a document predicted once.

    loss            nats per predicted token, the end tokens of documents included, as in training
    perplexity      exp(loss)
    bits per byte   the loss of the text tokens over ln 2, over the bytes of their text; it compares tokenizers

A document longer than a window continues in the next window, whose first token is the last token of the
window before: tokens see only their own window. Data with prompts counts only tokens that are trained on, and has a
loss of each turn: the first answer of a document, the second one, and so on.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.run import SYNTHETIC, Preference
from meshwright.training.data.corpus import require_pairs
from meshwright.training.data.source import TokenFiles, open_source
from meshwright.training.data.split import Extents, everything, hold_out
from meshwright.training.data.store import TokenStore, open_store
from meshwright.training.data.token_range import require_vocab
from meshwright.training.data.tokenization import tokenise
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.evaluation.losses import MeanLoss, Row, losses_of, turns_of
from meshwright.training.trained_model import TrainedModel

SORTED_BATCHES = 16
"""Batches that are sorted by length together, so that there is little padding."""

DEFAULT_LENGTH = 1024
MAX_TEXT = 2000
"""Characters of an example that a result has."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The tokens to predict."""

    name: str
    store: TokenStore
    extents: Extents
    tokenizer: Tokenizer | None  # None: the source is tokens


@dataclass(frozen=True, kw_only=True)
class _Window:
    row: Row
    place: tuple[int, int]  # of its document in the store
    turns_T: np.ndarray  # the answer of its document that each label is in, from 1
    num_end_tokens: int  # 1 where the last label ends a document
    num_bytes: int  # of a whole document, in its last window


@dataclass(kw_only=True)
class _Tally:
    """Losses of the windows so far."""

    every: MeanLoss = field(default_factory=MeanLoss)
    of_text: MeanLoss = field(default_factory=MeanLoss)  # without end tokens
    turns: dict[int, MeanLoss] = field(default_factory=lambda: defaultdict(MeanLoss))
    documents: dict[tuple[int, int], MeanLoss] | None  # by place; None: not kept
    num_bytes: int = 0

    def add(self, window: _Window, losses_T: np.ndarray) -> None:
        """Count the losses of a window's tokens, 0 where there is no label."""
        is_label_T = np.asarray(window.row.labels) != IGNORED_LABEL
        total, count = float(losses_T.sum()), int(is_label_T.sum())
        self.every.add(total, count)
        end = float(losses_T[-1]) if window.num_end_tokens else 0.0
        self.of_text.add(total - end, count - window.num_end_tokens)
        if self.documents is not None:
            self.documents[window.place].add(total, count)
        self.num_bytes += window.num_bytes
        for turn in np.unique(window.turns_T[is_label_T]):
            is_here_T = is_label_T & (window.turns_T == turn)
            self.turns[int(turn)].add(float(losses_T[is_here_T].sum()), int(is_here_T.sum()))


def open_texts(trained: TrainedModel, source: str | None, *, preference: Preference | None = None) -> list[Text]:
    """Open the tokens of `source`; None: the training's validation data, or the documents held out for validation.

    `preference`: the data is pairs of answers. Raises InputError if there is no such data, or a token is not in the
    model's vocabulary.
    """
    if source is not None:
        return [_open(trained, source, preference)]
    data = trained.data
    if data is None or data.is_synthetic:
        raise InputError(
            "there is nothing to evaluate on", got=trained.name,
            hint="name a source after the model: a file, a folder, python-stdlib, a data set",
        )  # fmt: skip
    if sources := data.validation_sources:
        return [_open(trained, name, preference) for name in sources.values()]
    if trained.holds_out is False:
        raise InputError(
            "the training held no documents out, and has no validation data", got=trained.name,
            hint="name a source after the model; train.evaluate holds documents out of the next training",
        )  # fmt: skip
    return [_open(trained, source.path, preference, is_held_out=True) for source in data.sources.values()]


def _open(trained: TrainedModel, source: str, preference: Preference | None, *, is_held_out: bool = False) -> Text:
    if source == SYNTHETIC:
        raise InputError("random tokens cannot be predicted", got=source, hint="name text or token files")
    cache = default_cache()
    opened = open_source(source, cache=cache)
    if isinstance(opened, TokenFiles):
        store, tokenizer = open_store(list(opened.prefixes)), None
    else:
        tokenizer = trained.require_tokenizer()
        store = tokenise(opened, tokenizer, cache=cache)
        require_pairs(store, name=source, preference=preference, hint="--reference MODEL compares their likelihoods")
    require_vocab(store, vocab=trained.model.vocab, cache=cache)
    if not is_held_out:
        return Text(name=source, store=store, extents=everything(store), tokenizer=tokenizer)
    extents = hold_out(store, whole_documents=store.is_masked, group=1 if preference is None else 2).validation
    return Text(name=f"the validation part of {source}", store=store, extents=extents, tokenizer=tokenizer)


def window_of(trained: TrainedModel, length: int | None, *, answers: int = 1) -> int:
    """The sequence length, which holds so many answers. Raises InputError beyond the positions."""
    positions = trained.positions
    length = length or trained.sequence_length or answers * min(positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if positions is not None and length > answers * positions:
        raise InputError(
            "the sequence length exceeds the positions that the model is trained for", got=length,
            allowed=f"<= {answers * positions}",
        )  # fmt: skip
    return length


def evaluate_text(
    trained: TrainedModel, text: Text, *, length: int | None, batch: int, max_tokens: int | None, examples: int = 0
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of `text` with their standard errors, and the loss of each turn.

    `length` is the window in tokens (None: the sequence length of the training, or 1,024). The evaluation
    ends after `max_tokens` tokens. `examples`: so many documents of the highest loss, and so many of the longest.
    Raises InputError if no token can be predicted, or `length` exceeds the positions.
    """
    length = window_of(trained, length)
    tally = _Tally(documents=defaultdict(MeanLoss) if examples else None)
    every = _windows(text, length)
    windows = _limited(every, max_tokens)
    while some := list(islice(windows, batch * SORTED_BATCHES)):
        some.sort(key=lambda window: len(window.row.tokens))
        for start in range(0, len(some), batch):
            part = some[start : start + batch]
            for window, (losses_T, _) in zip(part, losses_of(trained.module, [w.row for w in part]), strict=True):
                tally.add(window, losses_T.double().numpy())
    mean, of_text, num_bytes = tally.every, tally.of_text, tally.num_bytes
    if not mean.num_tokens:
        raise InputError("no token of the data can be predicted", got=text.name, allowed="documents of two tokens")
    error = mean.standard_error
    perplexity = math.exp(min(mean.mean, 700.0))
    has_bytes = text.tokenizer is not None and not text.store.is_masked and max_tokens is None and num_bytes
    return {
        "source": text.name,
        "loss": mean.mean,
        "loss_standard_error": error,
        "perplexity": perplexity,
        "perplexity_standard_error": None if error is None else perplexity * error,
        "bits_per_byte": of_text.total / math.log(2) / num_bytes if has_bytes else None,
        "num_tokens": mean.num_tokens,
        "num_bytes": num_bytes if has_bytes else None,
        "num_windows": mean.num_rows,
        "sequence_length": length,
        "is_whole": next(every, None) is None,
        "turns": [_turn(number, of) for number, of in sorted(tally.turns.items())] if len(tally.turns) > 1 else [],
        **_examples(text, tally, examples),
    }


def _turn(number: int, mean: MeanLoss) -> dict[str, Any]:
    return {
        "turn": number,
        "loss": mean.mean,
        "loss_standard_error": mean.standard_error,
        "num_tokens": mean.num_tokens,
    }


def _examples(text: Text, tally: _Tally, num: int) -> dict[str, Any]:
    """The documents of the highest loss, highest first, and the longest ones, longest first."""
    known = [(place, mean) for place, mean in (tally.documents or {}).items() if mean.num_tokens]
    worst = heapq.nlargest(num, known, key=lambda each: each[1].mean)
    longest = heapq.nlargest(num, known, key=lambda each: each[0][1] - each[0][0])

    def shown(place: tuple[int, int], mean: MeanLoss) -> dict[str, Any]:
        ids = text.store.tokens(*place).tolist()
        return {
            "document": text.store.document_at(place[0]) + 1,
            "loss": mean.mean,
            "num_tokens": mean.num_tokens,
            "length": len(ids),
            "text": None if text.tokenizer is None else text.tokenizer.decode(ids)[:MAX_TEXT],
        }

    return {"worst": [shown(*each) for each in worst], "longest": [shown(*each) for each in longest]}


def _windows(text: Text, length: int) -> Iterator[_Window]:
    for first, last in text.extents.ranges_E2.tolist():
        starts = [first, *text.store.starts_between(first, last).tolist(), last]
        for start, stop in pairwise(starts):
            tokens_N, trained_N = text.store.tokens(start, stop), text.store.trained(start, stop)
            labels_N = np.where(trained_N[1:], tokens_N[1:], IGNORED_LABEL)
            is_ended = text.tokenizer is not None and int(tokens_N[-1]) == text.tokenizer.end
            num_bytes = _num_bytes(tokens_N, text.tokenizer, is_ended=is_ended)
            turns_N = turns_of(trained_N)[1:]
            for at in range(0, len(labels_N), length):
                labels = labels_N[at : at + length].tolist()
                is_last = at + length >= len(labels_N)
                yield _Window(
                    row=Row(tokens=tokens_N[at : at + len(labels)].tolist(), labels=labels),
                    place=(start, stop),
                    turns_T=turns_N[at : at + len(labels)],
                    num_end_tokens=int(is_last and is_ended and labels[-1] != IGNORED_LABEL),
                    num_bytes=num_bytes if is_last else 0,
                )


def _num_bytes(tokens_N: np.ndarray, tokenizer: Tokenizer | None, *, is_ended: bool) -> int:
    """Bytes of the text that the tokens after the first one write."""
    if tokenizer is None:
        return 0
    ids = (tokens_N[:-1] if is_ended else tokens_N).tolist()
    first = tokenizer.decode(ids[:1])
    return len(tokenizer.decode(ids).encode()) - len(first.replace("\ufffd", "?").encode())


def _limited(windows: Iterator[_Window], max_tokens: int | None) -> Iterator[_Window]:
    """Windows until `max_tokens` labels are there, the last one whole."""
    left = math.inf if max_tokens is None else max_tokens
    for window in windows:
        yield window
        left -= sum(label != IGNORED_LABEL for label in window.row.labels)
        if left <= 0:
            return
