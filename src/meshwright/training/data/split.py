"""Validation text held out of a corpus that has none of its own.

Documents are taken in a fixed random order until they make up `HELD_OUT_RATIO` of the tokens: at least
`LEAST_HELD_OUT_TOKENS`, unless that were more than `MOST_HELD_OUT_RATIO`, and at most `MOST_HELD_OUT_TOKENS`. Seed,
sequence length, batch and number of processes play no part, so every run on the same tokens is validated on the same
text and never trains on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.training.data.shuffle import Permutation
from meshwright.training.data.store import TokenStore

HELD_OUT_RATIO, MOST_HELD_OUT_RATIO = 0.02, 0.1
LEAST_HELD_OUT_TOKENS, MOST_HELD_OUT_TOKENS = 1 << 16, 1 << 24
_ORDER_SEED = 0x5EED


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Ranges of positions in a store, ascending and apart: row e holds start and stop."""

    ranges_E2: np.ndarray = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranges."""
        return int((self.ranges_E2[:, 1] - self.ranges_E2[:, 0]).sum())


@dataclass(frozen=True, kw_only=True)
class Split:
    """A corpus in two parts that share no token."""

    train: Extents
    validation: Extents


def everything(store: TokenStore) -> Extents:
    """The whole corpus."""
    return Extents(ranges_E2=np.array([[0, store.num_tokens]], dtype=np.int64))


def num_held_out(num_tokens: int) -> int:
    """Number of tokens of a corpus that are held out for validation.

    >>> [num_held_out(n) for n in (1_000, 1_000_000, 10_000_000, 10**12)]
    [100, 65536, 200000, 16777216]
    """
    least = min(LEAST_HELD_OUT_TOKENS, int(num_tokens * MOST_HELD_OUT_RATIO))
    return min(max(1, least, int(num_tokens * HELD_OUT_RATIO)), MOST_HELD_OUT_TOKENS)


def hold_out(store: TokenStore, *, whole_documents: bool, group: int = 1) -> Split:
    """Split a corpus into training and validation parts.

    If a document has more tokens than are still to be held out, its end is held out. `whole_documents` holds
    it out whole; a corpus of one document then has no validation part. `group` documents at a time stay together.
    """
    wanted = num_held_out(store.num_tokens)
    order = Permutation(length=store.num_documents // group, seed=_ORDER_SEED)
    ranges: list[tuple[int, int]] = []
    most = store.num_documents // group - (1 if whole_documents else 0)
    for place in range(most):
        document = int(order.at(place)[0]) * group
        start, stop = store.start_of(document), store.start_of(document + group)
        start = start if whole_documents else max(start, stop - wanted)
        ranges.append((start, stop))
        wanted -= stop - start
        if wanted <= 0:
            break
    held = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2)
    return Split(train=Extents(ranges_E2=_gaps(held, store.num_tokens)), validation=Extents(ranges_E2=held))


def _gaps(ranges_E2: np.ndarray, num_tokens: int) -> np.ndarray:
    """The positions that are not in `ranges_E2`."""
    starts = np.concatenate([[0], ranges_E2[:, 1]])
    stops = np.concatenate([ranges_E2[:, 0], [num_tokens]])
    return np.stack([starts, stops], axis=1)[stops > starts].astype(np.int64)
