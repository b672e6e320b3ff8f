"""Simulation of continuous batching: when each request gets its first and its last token on one replica.

Requests take a place in the order in which they come, at most `places` at once. A step gives each request that decodes
a token, and computes parts of the prompts of those before them in line. Prompts that wait are cut into as many equal
parts as the steps that hold them, so a prompt by itself takes the steps that the estimate gives it. A prompt runs on
one attention group, which computes no more of it in a step than its share of the tokens. Where a scheduler works ahead,
a prompt begins after the steps that were scheduled when it came. Seconds of a step:

    decoding n        step_s[n]
    with prompts      step_s[n] + prompts_s(part, together, n), what they add to the step

Time jumps over steps in which nothing changes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from meshwright.arrays import FloatArray

ROUNDING = 1e-9
"""Of a prompt, or of the time of a step: less is nothing."""


@dataclass(frozen=True, kw_only=True)
class BatchingReplica:
    """Times of the steps of one replica, in seconds."""

    places: int  # requests that it serves at once
    step_s: Sequence[float]  # of a decode step by the requests that decode: 0 for none, up to `places`
    prompt_steps: float  # steps that a prompt fills, as their tokens are bounded; 0: its cache comes from elsewhere
    prompts_s: Callable[[float, float, int], float]
    """That prompts add to a step: by their sum, the sum over the part of the fullest group, and those that decode."""
    groups: int = 1  # attention groups, each of which computes prompts of its own
    stages: int = 1  # pipeline stages: a step with prompts ends after one of them, its prompts after the others, too
    waited_steps: float = 0.0  # that are scheduled already when a request comes, a mean
    recomputed: float = 0.0  # prompts that a request computes again, where more wait than have a place


def serve(
    replica: BatchingReplica, ready_s: Sequence[float], steps: Sequence[float], sizes: Sequence[float]
) -> tuple[FloatArray, FloatArray, float]:
    """Serve requests that ask for a place at `ready_s`, in ascending order, until the last has ended.

    steps: decode steps of each, a mean; 0: it has all its tokens when its prompt is computed. sizes: of their prompts,
    over the mean.

    Returns seconds: of the first token of each request (where its prompt is computed elsewhere, of its place), of its
    last token, and those in which a request waited for a place or for the prompts before it.
    """
    run = _Run(replica, ready_s, steps, sizes)
    while run.num_ended < len(ready_s):
        if run.coming or (run.next_s <= run.now and run.num_held < replica.places):
            run.admit()
        if run.prompts or run.decoding:
            run.advance()
        else:
            run.now = max(run.now, run.next_s)
    return np.array(run.first_s), np.array(run.end_s), run.queue_s


def _whole(means: Sequence[float]) -> list[int]:
    """Whole steps of each request, whose sum is that of the means."""
    return np.diff(np.floor(np.cumsum(means) + ROUNDING), prepend=0).astype(int).tolist()


class _Run:
    def __init__(
        self, replica: BatchingReplica, ready_s: Sequence[float], steps: Sequence[float], sizes: Sequence[float]
    ) -> None:
        self.replica, self.sizes, self.steps = replica, sizes, _whole(steps)
        self.ready_s = [*ready_s, inf]
        self.next_s = self.ready_s[0]  # at which the next request asks for a place; infinity after the last
        self.waited = _whole([replica.waited_steps] * len(ready_s))
        self.first_s, self.end_s, self.delay_s = ([0.0] * len(ready_s) for _ in range(3))
        self.prompts: deque[tuple[int, float]] = deque()  # request, what is left of its prompt; -1: computed again
        self.left = 0.0  # of all prompts
        self.coming: deque[tuple[int, int]] = deque()  # step that a prompt begins with, request
        self.decoding: list[tuple[int, int]] = []  # a heap of (last decode step, request)
        self.crowded: set[int] = set()  # requests that took the last places while others waited
        self.now = self.queue_s = 0.0
        self.clock = self.num_held = self.num_admitted = self.num_ended = 0

    def admit(self) -> None:
        """Give places to those that wait."""
        begun, is_idle = self.num_admitted, not (self.prompts or self.decoding)
        while self.num_held < self.replica.places and self.next_s <= self.now:
            self.num_admitted += 1
            self.num_held += 1
            self.next_s = self.ready_s[self.num_admitted]
            if self.replica.prompt_steps:
                waited = 0 if is_idle else self.waited[self.num_admitted - 1]
                self.coming.append((self.clock + waited, self.num_admitted - 1))
            else:
                self._begin(self.num_admitted - 1)
        if self.replica.recomputed and self.next_s <= self.now:
            self.crowded.update(range(begun, self.num_admitted))
        while self.coming and (self.coming[0][0] <= self.clock or not (self.prompts or self.decoding)):
            request = self.coming.popleft()[1]
            self._append(request, self.sizes[request])

    def advance(self) -> None:
        """One step with prompts, or the decode steps until a request ends or comes."""
        replica, computed, count, num_decoding = self.replica, [], 1, len(self.decoding)
        step_s, is_full = replica.step_s[num_decoding], self.num_held == replica.places
        if self.prompts:
            computed, part, together = self._take()
            step_s += replica.prompts_s(part, together, num_decoding)
        else:
            count = min(self.decoding[0], (self.coming or self.decoding)[0])[0] - self.clock
            if not is_full and self.next_s < inf:
                count = min(count, max(ceil((self.next_s - self.now) / step_s - ROUNDING), 1))
        begun, self.now = self.now, self.now + count * step_s
        self.clock += count
        if self.prompts and self.prompts[-1][1] == self.sizes[self.prompts[-1][0]]:
            self.queue_s += self.now - begun
        elif is_full:
            self.queue_s += max(self.now - max(begun, self.next_s), 0.0)
        self._end_decoded()
        for request in computed:
            if request >= 0:
                if replica.stages > 1:
                    self.delay_s[request] = (replica.stages - 1) * replica.prompts_s(1.0, 1.0, num_decoding)
                self._begin(request)
            if request in self.crowded:
                self._append(-1, replica.recomputed)

    def _append(self, request: int, size: float) -> None:
        self.prompts.append((request, size))
        self.left += size

    def _take(self) -> tuple[list[int], float, float]:
        """Compute a step's part of the prompts, the first first: those that are done, the part, and over the fullest's.

        The part is a sum of prompts; its fullest group has the largest piece, or as much as all others.
        """
        replica, done, kept = self.replica, [], []
        part = least = self.left / (ceil(self.left * replica.prompt_steps - ROUNDING) or 1)
        most, fullest = 1 / (replica.prompt_steps * replica.groups), part / replica.groups
        while self.prompts and least > ROUNDING:
            request, rest = self.prompts.popleft()
            own = rest / (ceil(rest / most - ROUNDING) or 1) if replica.groups > 1 else rest
            piece = rest if rest <= least + ROUNDING and own == rest else min(own, least)
            least, fullest = least - piece, max(fullest, piece)
            if piece < rest:
                kept.append((request, rest - piece))
            else:
                done.append(request)
        self.prompts.extendleft(reversed(kept))
        part -= max(least, 0.0)
        self.left = self.left - part if self.prompts else 0.0
        return done, part, part / fullest if replica.groups > 1 else 1.0

    def _begin(self, request: int) -> None:
        """The request has its first token and decodes the others, or has ended."""
        self.first_s[request] = self.now + self.delay_s[request]
        heapq.heappush(self.decoding, (self.clock + self.steps[request], request))
        if not self.steps[request]:
            self._end_decoded()

    def _end_decoded(self) -> None:
        while self.decoding and self.decoding[0][0] <= self.clock:
            _, request = heapq.heappop(self.decoding)
            self.end_s[request] = self.now + self.delay_s[request]
            self.num_held -= 1
            self.num_ended += 1
