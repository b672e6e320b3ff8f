"""Several sources in one endless order of samples, each by its weight.

    share of a source = its weight over the sum of weights

Sources are leaves of a binary tree, in the order of their names. Place p of the order belongs to the left half of a
node, whose share of the node is s, where floor((p + 1) s) > floor(p s); it is then place floor(p s) of that half, else
place p - floor(p s) of the other one. So the source of any place, and how many of its samples come before, follow from
p alone, and after any number of places each source is within the depth of the tree (log2 of the number of sources)
samples of its share. The n-th sample of a source is the n-th of its own shuffled epochs.

A weight is a share of samples, which all have `sequence_length` positions: for text it is a share of the tokens, for
data with prompts of the tokens with their padding.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

import numpy as np

from meshwright.training.data.packing import Sample, Samples
from meshwright.training.data.shuffle import Permutation


@dataclass(frozen=True, kw_only=True)
class SourceProgress:
    """Samples and epochs that were read of a source."""

    share: float  # of the samples, by weight
    num_samples: int
    num_epochs: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Samples of several sources. Their numbers follow each other, in the order of the sources' names."""

    sources: Mapping[str, Samples]
    weights: Mapping[str, float]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, sorted: the order of a run file plays no part."""
        return tuple(sorted(self.sources))

    @property
    def num_samples(self) -> int:
        """Samples of all sources together, each once."""
        return self._firsts[-1]

    @property
    def sequence_length(self) -> int:
        """T."""
        return self.sources[self.names[0]].sequence_length

    def sample(self, number: int) -> Sample:
        """Sample `number` of all sources laid end to end."""
        source = bisect_right(self._firsts, number) - 1
        return self.sources[self.names[source]].sample(number - self._firsts[source])

    def numbers(self, places: Iterable[int], *, seed: int) -> list[int]:
        """Numbers of the samples at these places of the endless order."""
        found = []
        for place in places:
            source, place_of_source = self._source_at(place)
            name = self.names[source]
            epoch, of_epoch = divmod(place_of_source, self.sources[name].num_samples)
            order = Permutation(length=self.sources[name].num_samples, seed=_seed_of(name, seed), epoch=epoch)
            found.append(self._firsts[source] + int(order.at(np.array([of_epoch]))[0]))
        return found

    def progress(self, place: int) -> dict[str, SourceProgress]:
        """Samples and epochs of each source before `place`."""
        found: dict[str, SourceProgress] = {}
        for source, count in self._counts(place, 0, len(self.names)):
            name = self.names[source]
            found[name] = SourceProgress(
                share=float(self._share(source, source + 1, of=(0, len(self.names)))),
                num_samples=count,
                num_epochs=count / self.sources[name].num_samples,
            )
        return found

    @cached_property
    def _firsts(self) -> list[int]:
        """Number of the first sample of each source, and of all samples."""
        return [0, *accumulate(self.sources[name].num_samples for name in self.names)]

    @cached_property
    def _sums(self) -> list[Fraction]:
        """Weights of the sources before each one, exactly."""
        return [Fraction(0), *accumulate(Fraction(self.weights[name]) for name in self.names)]

    def _share(self, first: int, last: int, *, of: tuple[int, int]) -> Fraction:
        return (self._sums[last] - self._sums[first]) / (self._sums[of[1]] - self._sums[of[0]])

    def _source_at(self, place: int) -> tuple[int, int]:
        """The source of a place, and how many of its samples come before."""
        first, last = 0, len(self.names)
        while last - first > 1:
            middle = (first + last) // 2
            share = self._share(first, middle, of=(first, last))
            before = place * share.numerator // share.denominator
            if (place + 1) * share.numerator // share.denominator > before:
                last, place = middle, before
            else:
                first, place = middle, place - before
        return first, place

    def _counts(self, place: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Samples of the sources `first` to `last` before a place of their order."""
        if last - first == 1:
            yield first, place
            return
        middle = (first + last) // 2
        share = self._share(first, middle, of=(first, last))
        left = place * share.numerator // share.denominator
        yield from self._counts(left, first, middle)
        yield from self._counts(place - left, middle, last)


def _seed_of(name: str, seed: int) -> int:
    """A seed of the source's own: two sources of one length have different orders."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
