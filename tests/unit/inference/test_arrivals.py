"""Latencies under arrivals against the estimate in its limits, and against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.answers.serving_arrivals import arrival_table
from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError
from meshwright.inference.arrivals import (
    ArrivalEstimate,
    LatencyLimits,
    Simulated,
    arrivals_named,
    capacity_per_s,
    drawn_lengths,
    estimate_arrivals,
    serve_all,
    simulate,
)
from meshwright.inference.estimate import estimate_load, estimate_rate
from meshwright.inference.formats import cache_format, weight_format
from meshwright.inference.layout import ServingLayout
from meshwright.inference.points import engines
from meshwright.inference.server import Server, server
from meshwright.inference.serving import RequestLoad
from meshwright.inference.work import Served

LOAD = RequestLoad(input_tokens=1024, output_tokens=256)
LONG = RequestLoad(input_tokens=20_000, output_tokens=100)
DENSE = {"tensor": 2, "replicas": 4}


def made(model="llama3.1-70b", cluster="h200-8x1", precision="fp8", engine="vllm", prefill=0, **degrees) -> Server:
    place = catalog.cluster(cluster)
    of = Served(
        model=catalog.model(model), cluster=place, weights=weight_format(precision, place.accelerator),
        cache=cache_format("fp8", place.accelerator), layout=ServingLayout(**(degrees or DENSE)),
    )  # fmt: skip
    return server(of, engines()[engine], prefill_replicas=prefill)


def at(asked: Server, load: RequestLoad, share: float, arrivals: str = "poisson", **more):
    return simulate(asked, load, arrivals_named(arrivals, share * capacity_per_s(asked, load)), **more)


SERVERS = {
    "dense": (made(), LOAD),
    "short prompts": (made(engine="trtllm"), RequestLoad(input_tokens=100, output_tokens=1000)),
    "long prompts": (made(engine="sglang"), LONG),
    "disaggregated": (made(prefill=1), LONG),
    "mixture": (
        made("deepseek-v3", "b200-8x1", "fp4", tensor=1, attention_data=8, expert=8),
        RequestLoad(input_tokens=8192, output_tokens=256),
    ),
    "pipeline": (
        made("llama3.1-405b", "h100-8x2", tensor=8, pipeline=2),
        RequestLoad(input_tokens=9, output_tokens=300),
    ),
    "cached prefixes": (made(), replace(LONG, prefix_hit_rate=0.8)),
    "drafted": (made(), replace(LOAD, drafted_per_step=3, accepted_per_step=1.7)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_without_a_load_a_request_has_the_latencies_of_one(name):
    asked, load = SERVERS[name]
    found, one = at(asked, load, 1e-6, requests=50), estimate_load(asked, replace(load, concurrency=1))
    assert found.itl_s.mean() == pytest.approx(one.itl.value, rel=0.01)
    assert found.ttft_s == pytest.approx(np.full(50, one.ttft.value), rel=1e-3)
    assert found.queue_share == 0


@pytest.mark.parametrize("name", SERVERS)
def test_a_saturated_server_finishes_what_the_estimate_does(name):
    asked, load = SERVERS[name]
    most = capacity_per_s(asked, load)
    places = int(estimate_load(asked, load).limit.sequences) if not asked.prefill_replicas else 200
    groups = 1 if asked.prefill_replicas else asked.of.layout.replicas
    num = 25 * places
    end_s = np.sort(serve_all(asked, load, np.arange(num) * groups / (1.3 * most), groups)[1])
    begin, end = int(0.6 * num), int(0.9 * num)
    rate = (end - begin) / (end_s[end] - end_s[begin]) * groups
    assert rate == pytest.approx(most, rel=0.03)
    if not asked.prefill_replicas:
        full = estimate_load(asked, load)
        assert most == pytest.approx(full.requests_per_s, rel=0.03)


@pytest.mark.parametrize("name", SERVERS)
def test_half_a_load_has_the_means_of_the_estimate(name):
    """The estimate takes the mean step. Steps that hold now more, now less take longer on average than the mean step.

    So prompts arrive at constant gaps here. The estimate lets some prompts share a step, which prompts at constant gaps
    never do. That changes little, except with attention groups: one prompt takes as long as one prompt on each group.
    Their prompts arrive by chance, in five draws, as means of one are a twentieth off.
    """
    asked, load = SERVERS[name]
    rate = 0.4 * capacity_per_s(asked, load)
    by_chance, mean = asked.of.layout.attention_data > 1, estimate_rate(asked, load, rate)
    found = [at(asked, load, 0.4, "poisson" if by_chance else "constant", seed=s) for s in range(5 if by_chance else 1)]
    request_s = mean.ttft.value + (load.output_tokens - 1) * mean.itl.value
    assert np.mean([one.in_flight for one in found]) == pytest.approx(rate * request_s, rel=0.1)
    assert np.mean([one.itl_s.mean() for one in found]) == pytest.approx(mean.itl.value, rel=0.1)


def test_bursts_lengthen_the_tail_and_constant_gaps_shorten_it():
    asked = made(tensor=8)
    tails = [
        at(asked, LONG, 0.6, name).percentiles()["ttft_s"]["p99"]
        for name in ("constant", "gamma:0.3", "poisson", "gamma:3")
    ]
    assert tails == sorted(tails)
    assert tails[-1] > 3 * tails[0]


def test_gamma_of_one_is_poisson_and_a_seed_repeats():
    asked = made(tensor=8)
    one, other = (at(asked, LONG, 0.6, name).ttft_s.mean() for name in ("poisson", "gamma:1"))
    assert one == pytest.approx(other, rel=0.05)
    first, again, second = (at(asked, LONG, 0.6, seed=seed).ttft_s for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_more_than_the_server_finishes_has_no_latencies():
    asked = made()
    most = capacity_per_s(asked, LOAD)
    assert at(asked, LOAD, 1.0) is None
    found = estimate_arrivals(asked, LOAD, "poisson", 2 * most, bounds=LatencyLimits(ttft_s=1.0))
    document = found.as_json()
    assert not document["is_stable"]
    assert "ttft_s" not in document
    assert 0.3 < document["headroom"] < 0.5  # below the capacity, half of what is asked


def test_the_highest_rate_is_the_last_that_keeps_the_bounds():
    asked = made()
    bounds = LatencyLimits(ttft_s=0.2, itl_s=0.03, percentile=99)
    found = estimate_arrivals(asked, LOAD, "poisson", 5.0, bounds=bounds)
    assert found.as_json()["headroom"] > 1
    for factor, kept in ((0.99, True), (1.1, False)):
        rate = found.highest_per_s * factor
        assert simulate(asked, LOAD, arrivals_named("poisson", rate)).keeps(bounds) is kept
    none = estimate_arrivals(asked, LOAD, "poisson", 5.0, bounds=LatencyLimits(itl_s=1e-4))
    assert none.highest_per_s == 0
    assert none.as_json()["good_share"] == 0


def test_the_tokens_of_a_step_bound_the_prompts_beside_decode_steps():
    """Two tokens an answer: eight prompts fill a step, so few requests decode in it, however many have a place.

    The estimate counts the time outside of steps, which others use here: 4 % of a request's.
    """
    asked, load = made("llama3.1-8b", "h100-1x1", "bf16", tensor=1), RequestLoad(input_tokens=3000, output_tokens=2)
    most = capacity_per_s(asked, load)
    full = estimate_load(asked, load)
    assert (full.limit.binds, full.requests_per_s) == ("prompts", pytest.approx(most, rel=0.03))
    end_s = np.sort(serve_all(asked, load, np.zeros(4000), 1)[1])
    assert 2000 / (end_s[3500] - end_s[1500]) == pytest.approx(most, rel=0.05)


def test_attention_groups_compute_prompts_longer_than_a_step_at_once():
    """Eight take the four steps of one, in which experts have more tokens, so half the capacity makes no queue."""
    asked, _ = SERVERS["mixture"]
    load = RequestLoad(input_tokens=32_000, output_tokens=256)
    one, found = estimate_load(asked, replace(load, concurrency=1)), at(asked, load, 0.5, requests=2000)
    assert found.ttft_s.mean() < 1.5 * one.ttft.value
    eight_s = serve_all(asked, load, np.zeros(8), 1)[0]
    assert one.ttft.value < eight_s.min() == eight_s.max() < 1.25 * one.ttft.value


@pytest.mark.parametrize("tokens", [(8000, 100), (32_000, 10), (1000, 200)])
def test_a_request_that_comes_by_chance_finds_one_more_than_in_a_closed_loop_of_as_many(tokens):
    """N others, the mean of all times (Wolff 1982), where one of N in a closed loop finds N - 1 (Lavenberg 1980)."""
    asked = made("llama3.1-8b", "h100-1x1", "bf16", tensor=1)
    load = RequestLoad(input_tokens=tokens[0], output_tokens=tokens[1])
    found = at(asked, load, 0.2)
    closed, same = (estimate_load(asked, replace(load, concurrency=found.in_flight + more)) for more in (1, 0))
    assert found.e2e_s.mean() == pytest.approx(closed.request_s, rel=0.06)
    assert found.e2e_s.mean() > same.request_s


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_replica_that_only_prefills_is_an_m_d_1_queue(share):
    """The mean wait is load / (2 (1 - load)) prompts (Erlang 1909)."""
    asked = made("llama3.1-8b", "h100-2x1", "bf16", prefill=1, tensor=1, replicas=2)
    load = RequestLoad(input_tokens=32_000, output_tokens=50)
    found, one = at(asked, load, share, requests=40_000), estimate_load(asked, replace(load, concurrency=1))
    prompt_s = sum(one.prompt_components_s.values())
    assert capacity_per_s(asked, load) == pytest.approx(1 / prompt_s)
    assert found.ttft_s.mean() - one.ttft.value == pytest.approx(prompt_s * share / (2 * (1 - share)), rel=0.06)


def test_an_answer_of_one_token_has_no_time_per_token():
    found = at(made(), RequestLoad(input_tokens=500, output_tokens=1), 0.5, requests=1)
    assert found.itl_s.tolist() == [0.0]
    assert found.e2e_s.tolist() == found.ttft_s.tolist()


@pytest.mark.parametrize("wrong", ["", "normal", "gamma", "gamma:", "gamma:x", "gamma:0", "gamma:nan", "poisson:2"])
def test_other_arrivals_are_refused(wrong):
    with pytest.raises(InputError, match="gamma:CV"):
        arrivals_named(wrong, 1.0)


@pytest.mark.parametrize("wrong", [0.0, 49.0, 100.0, float("nan")])
def test_other_percentiles_are_refused(wrong):
    with pytest.raises(InputError, match="percentile"):
        LatencyLimits(ttft_s=1.0, percentile=wrong)


def test_halves_of_the_requests_tell_whether_latencies_have_settled():
    alike, apart = np.tile([1.0, 2.0], 50), np.repeat([1.0, 1.2], 50)
    shared = {"arrived_s": alike, "ttft_s": alike, "itl_s": np.zeros(100), "queue_share": 0.0, "in_flight": 1.0}
    assert Simulated(e2e_s=alike, **shared).half_difference == 0
    assert Simulated(e2e_s=apart, **shared).half_difference == pytest.approx(0.2 / 1.1)


@pytest.mark.parametrize("percentile", [None, 90])
def test_the_interval_of_a_simulation_holds_the_values_of_other_seeds(percentile):
    asked, bounds = made(), LatencyLimits(ttft_s=1.0, percentile=percentile)
    found = at(asked, LOAD, 0.5, requests=4000)
    others = np.array([at(asked, LOAD, 0.5, requests=4000, seed=seed).bounded(bounds) for seed in range(1, 6)])
    half_s, value_s = np.array(found.half_widths(bounds)), np.array(found.bounded(bounds))
    assert np.all(np.abs(np.median(others, axis=0) - value_s) < 2 * half_s)
    assert np.all(half_s < 0.05 * value_s)
    near = LatencyLimits(itl_s=value_s[1] + half_s[1] / 2, percentile=percentile)
    estimate = ArrivalEstimate(
        arrivals="poisson", rate=1.0, seed=0, capacity_per_s=2.0, simulated=found, bounds=near, highest_per_s=1.0
    )
    assert "of ITL is" in arrival_table(estimate).caption
    assert "of TTFT is" not in arrival_table(estimate).caption
    assert estimate.as_json()["half_widths_s"]["itl_s"] == half_s[1]
    assert "± " not in arrival_table(replace(estimate, bounds=replace(near, itl_s=value_s[1] + 2 * half_s[1]))).caption


@pytest.mark.parametrize("name", ["dense", "mixture", "cached prefixes"])
def test_first_tokens_wait_for_other_prompts_as_long_as_in_the_estimate(name):
    """Of Poisson arrivals: what is left of the step that a request finds, and the prompts of its own step."""
    asked, load = SERVERS[name]
    mean = estimate_rate(asked, load, 0.5 * capacity_per_s(asked, load))
    alone = estimate_load(asked, replace(load, concurrency=1.0))
    assert mean.ttft.value > alone.ttft.value
    assert at(asked, load, 0.5).ttft_s.mean() == pytest.approx(mean.ttft.value, rel=0.2)


def test_lengths_of_requests_have_the_stated_mean_and_spread():
    load = replace(LOAD, input_spread=0.5, output_spread=1.0)
    drawn = drawn_lengths(load, 100_000, seed=1)
    assert drawn.mean(axis=0) == pytest.approx([1024, 256], rel=0.02)
    assert drawn.std(axis=0) / drawn.mean(axis=0) == pytest.approx([0.5, 1.0], rel=0.05)
    assert np.all(drawn_lengths(LOAD, 3, seed=1) == [1024, 256])


def test_unequal_lengths_lengthen_the_tail_and_have_the_means_of_the_estimate():
    asked, spread = made(), replace(LOAD, input_spread=1.0, output_spread=1.0)
    found, equal = (at(asked, load, 0.3, requests=4000).percentiles() for load in (spread, LOAD))
    assert found["ttft_s"]["p99"] > 1.5 * equal["ttft_s"]["p99"]
    assert found["e2e_s"]["p99"] > 2 * equal["e2e_s"]["p99"]
    mean = estimate_rate(asked, spread, 0.3 * capacity_per_s(asked, spread))
    assert found["e2e_s"]["mean"] == pytest.approx(mean.request_s, rel=0.1)
