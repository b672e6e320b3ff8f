"""A shuffle without a table: the k-th sample of an epoch is computed, not looked up.

A Feistel network is a bijection of the numbers of 2h bits; numbers that land outside the range go round again until
they land inside (cycle walking), which makes it a bijection of any range. Shuffling 10^12 samples takes no memory,
and every process computes the same order. Source: Black and Rogaway (2002), Ciphers with Arbitrary Finite Domains,
section 4; the round function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

NUM_ROUNDS = 6  # 4 suffice for a pseudo-random permutation (Luby, Rackoff 1988) of a good round function
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """An order of `range(length)` that depends only on `length`, `seed` and `epoch`.

    >>> order = Permutation(length=10, seed=0, epoch=0)
    >>> sorted(order.at(np.arange(10)).tolist()) == list(range(10))
    True
    """

    length: int
    seed: int
    epoch: int = 0

    def at(self, index_N: npt.ArrayLike) -> Numbers:
        """The numbers at these places of the order."""
        place_N = np.atleast_1d(np.asarray(index_N, dtype=np.uint64))
        if place_N.size and int(place_N.max()) >= self.length:
            raise IndexError(f"place {int(place_N.max())} of {self.length}")
        half_bits = max(1, ((self.length - 1).bit_length() + 1) // 2)
        keys = _mix(np.arange(NUM_ROUNDS, dtype=np.uint64) + _mix(_seed_word(self.seed, self.epoch))[:1])
        number_N = _feistel(place_N, keys, half_bits)
        while (is_outside_N := number_N >= np.uint64(self.length)).any():
            number_N[is_outside_N] = _feistel(number_N[is_outside_N], keys, half_bits)
        return number_N.astype(np.int64)


def _feistel(number_N: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_N, right_N = number_N >> shift, number_N & mask
    for key in keys:
        left_N, right_N = right_N, left_N ^ (_mix(right_N + key) & mask)
    return (left_N << shift) | right_N


def _mix(word_N: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; arithmetic is modulo 2^64."""
    word_N = word_N + GOLDEN
    word_N = (word_N ^ (word_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word_N = (word_N ^ (word_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word_N ^ (word_N >> np.uint64(31))


def _seed_word(seed: int, epoch: int) -> np.ndarray:
    """Seed and epoch as one word: the epoch is mixed before it is added, so (0, 1) and (1, 0) differ."""
    word = np.array([seed % 2**64], dtype=np.uint64)
    return word + _mix(_mix(np.array([epoch], dtype=np.uint64)))
