"""The search of serving layouts against every load in turn, and Little's law."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.errors import InfeasibleError
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.constants import shipped_constants
from meshwright.inference.estimate import Server, estimate_load, estimate_rate, state
from meshwright.inference.formats import cache_format, weight_format
from meshwright.inference.layout import legal_layouts
from meshwright.inference.points import engines
from meshwright.inference.search import LatencyLimits, ServingQuestion, search_layouts
from meshwright.inference.serving import RequestLoad
from meshwright.inference.work import Served

PRECISION = {"h100-8x1": "fp8", "h100-8x4": "fp8", "mi300x-8x1": "fp8", "a100-8x1": "bf16"}


def question(cluster="h100-8x4", model="llama3.1-70b", *, lengths=(1024, 256), engine="vllm", **changes):
    place = catalog.cluster(cluster)
    weights = weight_format(PRECISION[cluster], place.accelerator)
    asked = ServingQuestion(
        model=catalog.model(model), cluster=place, weights=weights, cache=cache_format(weights.name, place.accelerator),
        engine=engines()[engine], load=RequestLoad(input_tokens=lengths[0], output_tokens=lengths[1]),
        bounds=LatencyLimits(), reserve=shipped_reserve(),
    )  # fmt: skip
    return replace(asked, **changes)


def server(asked, layout, prefill=0):
    of = Served(model=asked.model, cluster=asked.cluster, weights=asked.weights, cache=asked.cache, layout=layout)
    return Server(
        of=of, engine=asked.engine, reserve=asked.reserve, calibration=shipped_constants(), prefill_replicas=prefill
    )


def every_load(asked, layout, *, step=1.005):
    """Requests/s of all loads that keep the bounds: each whole number up to 20, then larger steps."""
    tried = server(asked, layout)
    rates = tried.rates
    try:
        most = int(state(tried, asked.load, rates).in_flight)
    except InfeasibleError:
        return
    count = 1
    while count <= most:
        found = state(tried, replace(asked.load, concurrency=float(count)), rates)
        if found.steady.ttft_s <= asked.bounds.ttft_s and found.steady.itl_s <= asked.bounds.itl_s:
            yield found.requests_per_s
        count = count + 1 if count < 20 else math.ceil(count * step)


questions = st.builds(
    question,
    st.sampled_from(["h100-8x1", "mi300x-8x1", "a100-8x1"]),
    st.sampled_from(["llama3.1-8b", "llama3.1-70b", "qwen3-30b-a3b"]),
    lengths=st.tuples(st.sampled_from([200, 3000, 20_000]), st.sampled_from([1, 20, 700])),
    engine=st.sampled_from(["vllm", "trtllm"]),
    bounds=st.builds(
        LatencyLimits, itl_s=st.sampled_from([0.008, 0.02, 0.05, math.inf]), ttft_s=st.sampled_from([0.1, 1.0, 9.0])
    ),
)


def is_not_behind(asked, *, step):
    best = search_layouts(asked).best
    layouts = legal_layouts(asked.model, asked.cluster)
    brute = max((rate for layout in layouts for rate in every_load(asked, layout, step=step)), default=None)
    assert (best is None) == (brute is None)
    if best is not None:
        assert best.requests_per_s >= 0.99 * brute


@settings(max_examples=4, deadline=None)
@given(questions)
def test_no_load_is_more_than_one_percent_better(asked):
    is_not_behind(asked, step=1.03)


@pytest.mark.slow  # more questions of the last test
@settings(max_examples=30, deadline=None)
@given(questions)
def test_no_load_of_many_questions_is_better(asked):
    is_not_behind(asked, step=1.005)


@pytest.mark.parametrize("cluster", ["h100-8x4", "h100-8x1"])
def test_a_rate_has_one_arithmetic(cluster):
    """The fewest devices of all loads, and the estimate at this rate."""
    asked = question(cluster, requests_per_s=20.0, bounds=LatencyLimits(itl_s=0.05))
    best = search_layouts(asked).best
    needed = [
        layout.replica_devices * math.ceil(20.0 / (max(rates) / layout.replicas))
        for layout in legal_layouts(asked.model, asked.cluster)
        if (rates := list(every_load(asked, layout)))
    ]
    assert best.layout.num_devices == min(needed)
    found = estimate_rate(server(asked, best.layout), asked.load, 20.0)
    assert (best.concurrency, best.itl_s) == pytest.approx((found.in_flight, found.itl.value), rel=1e-6)
    assert best.requests_per_s == pytest.approx(20.0, rel=1e-6)
    assert best.itl_s <= 0.05


def test_what_a_closed_loop_finishes_an_open_one_does_too():
    asked = question()
    tried = server(asked, next(layout for layout in legal_layouts(asked.model, asked.cluster) if layout.tensor == 2))
    full = state(tried, asked.load, tried.rates).in_flight
    closed = estimate_load(tried, replace(asked.load, concurrency=full))
    opened = estimate_rate(tried, asked.load, 0.97 * closed.requests_per_s)
    assert opened.in_flight < full


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([0.5, 1.0, 7.0, 64.0, 3000.0]),
    lengths=st.tuples(st.sampled_from([100, 4000, 32_000]), st.sampled_from([2, 32, 900])),
    prefill=st.sampled_from([1, 2, 3]),
)
def test_littles_law_where_prefill_has_its_own_replicas(count, lengths, prefill):
    """Requests in flight are their rate times their time, and no rate is above what both pools finish."""
    asked = question(lengths=lengths)
    layout = next(layout for layout in legal_layouts(asked.model, asked.cluster) if layout.replicas == 4)
    found = estimate_load(server(asked, layout, prefill), replace(asked.load, concurrency=count))
    spent_s = found.ttft.value + (lengths[1] - 1) * found.itl.value
    assert found.requests_per_s * spent_s == pytest.approx(found.in_flight, rel=1e-6)
    assert found.in_flight == pytest.approx(count)
    prompt_s = sum(found.prompt_components_s.values())
    assert found.requests_per_s <= prefill / prompt_s * (1 + 1e-9)


def test_a_bound_of_the_first_token_counts_the_wait_for_prefill():
    asked = question(lengths=(32_000, 32), disaggregated=True, bounds=LatencyLimits(ttft_s=4.0))
    found = search_layouts(asked)
    assert found.best is not None
    assert all(v.best.ttft_s <= 4.0 for v in found.verdicts if v.best)
    split = next(v.best for v in found.verdicts if v.best and v.prefill_replicas)
    again = state(server(asked, split.layout, split.prefill_replicas),
                  replace(asked.load, concurrency=split.concurrency), server(asked, split.layout).rates)  # fmt: skip
    assert again.steady.ttft_s == pytest.approx(split.ttft_s)
