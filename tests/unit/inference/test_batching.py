"""The simulated replica against closed forms of queues."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from meshwright.inference.batching import BatchingReplica
from meshwright.inference.batching import serve as serve_requests

PROMPT_S = 0.5


def replica(**changes) -> BatchingReplica:
    """Prompts of one step each, which are computed one by one, and answers of one token."""
    plain = {
        "places": 10**6, "step_s": [0.0], "prompt_steps": 1.0,
        "prompts_s": lambda part, _together, _decoding: part * PROMPT_S,
    }  # fmt: skip
    return BatchingReplica(**(plain | changes))


def serve(one, ready_s, steps=0.0, sizes=None):
    """Serve requests of equal lengths, or of those given."""
    count = len(ready_s)
    return serve_requests(one, ready_s, [steps] * count if np.isscalar(steps) else steps, sizes or [1.0] * count)


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        found.append(now)
    return found


def waited_share(t: float, load: float) -> float:
    """P(wait <= t) of M/D/1 with services of 1 (Erlang 1909; Crommelin 1932)."""
    return (1 - load) * sum(
        (load * (k - t)) ** k / math.factorial(k) * math.exp(-load * (k - t)) for k in range(math.floor(t) + 1)
    )


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prompts_alone_are_an_m_d_1_queue(load):
    ready = poisson(load / PROMPT_S, 200_000)
    first_s, end_s, queue_s = serve(replica(), ready)
    waits = (first_s - np.array(ready)) / PROMPT_S - 1
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.04)
    for t in (0.5, 1.5, 3.5):
        assert np.mean(waits <= t + 1e-9) == pytest.approx(waited_share(t, load), abs=0.01)
    # steps that begin with two or more: P(0) = 1 - load, P(1) = (1 - load) (e^load - 1) of what a departure leaves
    behind = load * (1 - (1 - load) * math.exp(load))
    assert queue_s / end_s[-1] == pytest.approx(behind, abs=0.01)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_place_that_decodes_is_an_m_d_1_queue(load):
    ready = poisson(load / 10.0, 100_000)
    first_s, end_s, _queue_s = serve(replica(places=1, step_s=[0.0, 0.1], prompt_steps=0.0), ready, 100.0)
    waits = (first_s - np.array(ready)) / 10.0
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert end_s - first_s == pytest.approx(np.full(len(ready), 10.0))


def test_constant_arrivals_below_the_capacity_do_not_wait():
    ready = [0.6 * i for i in range(100)]
    first_s, _end_s, queue_s = serve(replica(), ready)
    assert first_s - np.array(ready) == pytest.approx(np.full(100, PROMPT_S))
    assert queue_s == 0


def test_steps_are_shared_and_prompts_lengthen_them():
    """Two prompts at once; then both decode; a third comes in the second step and lengthens the third."""
    one = replica(
        step_s=[0.0, 1.0, 2.0, 3.0],
        prompt_steps=0.5,
        prompts_s=lambda part, _together, decoding: part / (4 if decoding else 2),
    )
    first_s, end_s, _queue_s = serve(one, [0.0, 0.0, 4.0], 3.0)
    assert first_s.tolist() == [1.0, 1.0, 7.25]  # steps end at 3, 5, and with the prompt at 7.25
    assert end_s.tolist() == [7.25, 7.25, 10.25]


def test_a_prompt_begins_after_the_steps_that_are_scheduled_when_it_comes():
    """The first finds an idle replica. The second comes in its second decode step, and waits for one more."""
    one = replica(step_s=[0.0, 1.0, 1.0], waited_steps=1.0)
    first_s, end_s, _queue_s = serve(one, [0.0, 2.0], 9.0)
    assert first_s.tolist() == [0.5, 5.0]
    assert end_s.tolist() == [10.0, 14.0]


def test_places_are_taken_in_order_and_a_queue_is_counted():
    first_s, end_s, queue_s = serve(replica(places=1, step_s=[0.0, 1.0], prompt_steps=0.0), [0.0, 0.5, 10.0], 2.0)
    assert first_s.tolist() == [0.0, 2.0, 10.0]
    assert end_s.tolist() == [2.0, 4.0, 12.0]
    assert queue_s == 1.5


def test_answers_of_fractional_steps_have_their_mean():
    first_s, end_s, _queue_s = serve(replica(step_s=[0.0, 1.0], prompt_steps=0.0), [10.0 * i for i in range(8)], 2.25)
    assert (end_s - first_s).mean() == 2.25


def test_a_prompt_of_several_steps_is_cut_into_equal_parts():
    parts = []
    one = replica(prompt_steps=2.5, prompts_s=lambda part, _together, _decoding: parts.append(part) or 1.0)
    assert serve(one, [0.0])[0].tolist() == [3.0]
    assert parts == pytest.approx([1 / 3] * 3)


def test_attention_groups_compute_long_prompts_at_once_and_each_in_its_own_steps():
    """Of prompts of two steps on two groups: one takes two steps, two together as many, and three four."""
    for count, ends in ((1, [2.0]), (2, [2.0, 2.0]), (3, [2.0, 2.0, 4.0])):
        parts = []
        one = replica(prompt_steps=1.0, groups=2, prompts_s=lambda *step: parts.append(step[:2]) or 1.0)  # noqa: B023
        assert serve(one, [0.0] * count)[0].tolist() == ends
        assert parts[0] == ((0.5, 1.0) if count == 1 else (1.0, 2.0))


def test_a_prompt_beside_decode_steps_is_late_by_what_it_adds_to_the_other_stages():
    """Of two stages: 0.5 s in each where the replica is idle, and 0.1 s where it decodes in steps of both stages."""
    one = replica(
        stages=2, step_s=[0.0, 1.0, 1.0], prompts_s=lambda _part, _together, decoding: 0.1 if decoding else 0.5
    )
    first_s, end_s, _queue_s = serve(one, [0.0, 1.0], 9.0)
    assert first_s == pytest.approx([1.0, 0.5 + 1.0 + 1.0 + 0.1 + 0.1])
    assert end_s - first_s == pytest.approx([9.1, 9.0])


def test_recomputed_prompts_delay_others_where_more_wait_than_have_a_place():
    few, many = (
        serve(replica(places=2, step_s=[0.0, 0.1, 0.1], recomputed=again), [0.0] * 200, 10.0)[1].max()
        for again in (0.0, 0.5)
    )
    assert many - few == pytest.approx(198 * 0.5 * PROMPT_S, rel=0.05)


@pytest.mark.parametrize("variation", [0.5, 1.0])
def test_prompts_of_unequal_lengths_are_an_m_g_1_queue(variation):
    """Mean wait of load (1 + CV^2) / (2 (1 - load)) services (Pollaczek 1930; Khinchin 1932)."""
    load = 0.5
    ready = poisson(load / PROMPT_S, 50_000)
    sizes = np.random.default_rng(1).gamma(variation**-2, variation**2, len(ready)).tolist()
    first_s, _end_s, _queue_s = serve(replica(places=1), ready, sizes=sizes)
    waits = (first_s - np.array(ready)) / PROMPT_S - np.array(sizes)
    assert waits.mean() == pytest.approx(load * (1 + variation**2) / (2 * (1 - load)), rel=0.05)


def test_each_request_decodes_its_own_steps():
    first_s, end_s, _queue_s = serve(replica(step_s=[0.0, *[1.0] * 3], prompt_steps=0.0), [0.0] * 3, [5.0, 0.0, 2.0])
    assert (end_s - first_s).tolist() == [5.0, 0.0, 2.0]
