"""Serving under a load: closed forms, limits that must hold, bounds, prices and claims."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.arrays import scalar
from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import claim
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.arrivals import arrivals_named, simulate
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.claims import predict_serving_claim, published_replica_ratios
from meshwright.inference.constants import PRIORS
from meshwright.inference.estimate import estimate_load, estimate_rate
from meshwright.inference.formats import cache_format, weight_format
from meshwright.inference.layout import ServingLayout
from meshwright.inference.points import engines
from meshwright.inference.price import HourPrice, Ownership, facility_w, owned, token_price
from meshwright.inference.rates import smooth_maximum
from meshwright.inference.search import LatencyLimits, ServingQuestion, pareto, search_layouts
from meshwright.inference.server import server, transfer_s
from meshwright.inference.serving import BatchLimit, RequestLoad, prefill_steps_s, prompt_work, request_work
from meshwright.inference.work import Served, experts_chosen, group_on, kernels, step_work

LOAD = RequestLoad(input_tokens=1024, output_tokens=256)


def served(model="llama3.1-70b", cluster="h200-8x1", precision="fp8", **degrees):
    place = catalog.cluster(cluster)
    return Served(
        model=catalog.model(model),
        cluster=place,
        weights=weight_format(precision, place.accelerator),
        cache=cache_format("fp8", place.accelerator),
        layout=ServingLayout(**(degrees or {"tensor": 2, "replicas": 4})),
    )


@pytest.fixture(scope="module")
def vllm():
    return server(served(), engines()["vllm"])


# --- work ---


def test_a_decode_step_reads_each_weight_once_and_the_cache_of_every_sequence():
    of = served(tensor=1)
    one, two = (step_work(of, sequences=n, tokens=1, context=1000, decoding=True) for n in (8, 16))
    assert one.weight_bytes == two.weight_bytes == pytest.approx(70.6e9, rel=0.03)
    assert two.cache_bytes == 2 * one.cache_bytes == 16 * 1000 * 163_840
    assert two.gemm_flops == 2 * one.gemm_flops == pytest.approx(16 * 2 * 69.5e9, rel=0.01)


def test_tensor_ranks_share_the_work_and_communicate():
    one, eight = (step_work(served(tensor=n), sequences=8, tokens=1, context=1000, decoding=True) for n in (1, 8))
    assert eight.gemm_flops * 8 == pytest.approx(one.gemm_flops)
    assert eight.cache_bytes * 8 == pytest.approx(one.cache_bytes)
    assert (one.num_collectives, eight.num_collectives) == (0, 160)


def test_a_token_goes_once_to_each_node_and_back():
    """R1 on four nodes: 4 (1 - (3/4)^8) nodes have one of its 8 experts, its own among them; 8 bits out, 16 back."""
    of = served("deepseek-v3", "h100-8x4", "fp8", attention_data=32, expert=32)
    work = step_work(of, sequences=32 * 8, tokens=2048, context=1024, decoding=False)
    net, message = group_on(of.cluster, 32), 8 * 2048 * 7168 * 2
    nodes = 4 * (1 - 0.75**8) * 0.75
    moe_s = 58 * nodes * 1.5 * message * float(net.far_s_per_byte)
    dense_s = 3 * 2 * message * 31 * max(float(net.up_s_per_byte), float(net.far_s_per_byte) / 8)
    assert work.dispatch_s == pytest.approx(moe_s + dense_s, rel=0.01)
    assert work.collective_s == 0


def test_few_ranks_gather_the_tokens_of_all_and_the_rate_of_prompts_on_four_nodes_is_near_the_published_one():
    eight = served("deepseek-v3", "h200-8x1", "fp8", attention_data=8, expert=8)
    one, two = (step_work(eight, sequences=n, tokens=2048, context=1024, decoding=False) for n in (256, 512))
    assert two.dispatch_s == pytest.approx(2 * one.dispatch_s, rel=0.05)
    up_s = float(group_on(eight.cluster, 8).up_s_per_byte)
    assert one.dispatch_s == pytest.approx(61 * 2 * 7 * 32 * 2048 * 7168 * 2 * up_s, rel=0.05)
    many = served("deepseek-v3", "h100-8x4", "fp8", attention_data=32, expert=32)
    asked = server(many, replace(engines()["sglang"], batch_tokens=16_384))
    load = RequestLoad(input_tokens=2048, output_tokens=1, concurrency=256)
    found = estimate_load(asked, load).requests_per_s * 2048 / 4  # of a node; 52,300 with two-batch overlap
    assert 35_000 < found < 52_300


def test_a_small_batch_reads_few_experts_and_a_large_one_all():
    of = served("deepseek-v3", "b200-8x1", "fp4", tensor=8)
    small, large = (step_work(of, sequences=n, tokens=1, context=100, decoding=True) for n in (1, 4096))
    assert small.weight_bytes < 0.1 * large.weight_bytes
    assert experts_chosen(8, 8, 1) == 8


def test_latents_are_read_once_for_all_heads():
    of = served("deepseek-v3", "b200-8x1", "fp4", tensor=8)
    work = step_work(of, sequences=1, tokens=1, context=1000, decoding=True)
    assert work.cache_bytes == 1000 * 35_136
    assert work.attention_flops == 1000 * 61 * 2 * 16 * (2 * 512 + 64)


def test_a_cached_prefix_saves_the_work_of_a_prompt_of_its_length():
    of, whole = served("deepseek-v3", "b200-8x1", "fp4", tensor=8), RequestLoad(input_tokens=20_000, output_tokens=100)
    cached = replace(whole, prefix_hit_rate=0.75)
    assert (cached.computed_tokens, replace(whole, input_tokens=2, prefix_hit_rate=0.9).computed_tokens) == (5000, 1)
    all_of_it, prefix, rest = (
        prompt_work(of, load, 1) for load in (whole, replace(whole, input_tokens=15_000), cached)
    )  # fmt: skip
    for name in ("gemm_flops", "grouped_flops", "attention_flops", "elementwise_bytes"):
        assert getattr(rest, name) == pytest.approx(getattr(all_of_it, name) - getattr(prefix, name))
    assert rest.cache_bytes == 15_000 * 35_136
    assert all_of_it.cache_bytes == 0


def test_prefix_caching_shortens_prompts_and_not_decode_steps(vllm, meshwright):
    less, more = (
        estimate_load(vllm, replace(LOAD, input_tokens=16_000, concurrency=1, prefix_hit_rate=h)) for h in (0.0, 0.9)
    )
    assert more.ttft.value < 0.25 * less.ttft.value
    assert more.step_components_s == less.step_components_s
    assert more.as_json()["cached_tokens"] == pytest.approx(14_400)
    for share in (1.0, -0.1):
        with pytest.raises(InputError, match="prefix_hit_rate is no share"):
            replace(LOAD, prefix_hit_rate=share)
    asked = ("--model", "llama3.1-70b", "--cluster", "h100-8x1", "--precision", "fp8", "--input-tokens", 8192)
    found = [
        meshwright("inference", "plan", *asked, "--output-tokens", 256, "--itl", 50, *more, "--json").json
        for more in ((), ("--prefix-hit-rate", 0.5))
    ]  # fmt: skip
    assert found[1]["best"]["output_tokens_per_s"] > 1.3 * found[0]["best"]["output_tokens_per_s"]
    assert "cached prefixes" in " ".join(found[1]["notes"])


# --- the steady state ---


def test_rates_follow_from_times(vllm):
    found = estimate_load(vllm, replace(LOAD, concurrency=32))
    out, request_s = found.output_tokens_per_s.value, 32 / found.requests_per_s  # Little's law
    assert found.total_tokens_per_s.value == pytest.approx(out * (1024 + 256) / 256)
    assert found.ttft.value + found.itl.value * 255 == pytest.approx(request_s)


@pytest.mark.parametrize(("tokens", "engine"), [((32_000, 32), "vllm"), ((1024, 1), "vllm"), ((1024, 1), "sglang")])
def test_requests_beyond_the_prompts_that_fill_every_step_wait_for_their_first_token(tokens, engine):
    asked, load = server(served(), engines()[engine]), RequestLoad(input_tokens=tokens[0], output_tokens=tokens[1])
    most = estimate_load(asked, load)
    assert most.limit.binds == "prompts"
    for times in (1, 2, 4):
        found = estimate_load(asked, replace(load, concurrency=times * most.in_flight))
        assert found.requests_per_s == pytest.approx(most.requests_per_s)
        assert found.itl.value == pytest.approx(most.itl.value)
        e2e_s = found.ttft.value + found.itl.value * (tokens[1] - 1)
        assert e2e_s * found.requests_per_s == pytest.approx(times * most.in_flight, rel=0.02)  # Little's law


def test_the_search_counts_the_wait_for_other_prompts():
    """32,000 tokens in and 32 out: 193 requests in flight would be within 2 s if prompts did not wait for prompts."""
    of = served(cluster="h100-8x1", tensor=8)
    question = ServingQuestion(
        model=of.model, cluster=of.cluster, weights=of.weights, cache=of.cache, engine=engines()["vllm"],
        load=RequestLoad(input_tokens=32_000, output_tokens=32), bounds=LatencyLimits(ttft_s=2.0),
        reserve=shipped_reserve(),
    )  # fmt: skip
    best = search_layouts(question).best
    assert best.ttft_s + 31 * best.itl_s == pytest.approx(best.concurrency / best.requests_per_s, rel=0.02)
    assert best.concurrency < 12


def test_more_requests_in_flight_mean_more_tokens_and_longer_gaps(vllm):
    loads = [estimate_load(vllm, replace(LOAD, concurrency=n)) for n in (4, 16, 64, 256)]
    for less, more in pairwise(loads):
        assert less.output_tokens_per_s.value < more.output_tokens_per_s.value
        assert less.itl.value < more.itl.value


def test_the_cache_bounds_the_batch():
    asked = server(served(tensor=1, replicas=1), engines()["trtllm"])
    found = estimate_load(asked, RequestLoad(input_tokens=20_000, output_tokens=2_000))
    assert found.limit.binds == "kv_cache"
    assert found.limit.sequences == pytest.approx(found.memory.cache / (22_000 * 163_840))


def test_an_engine_without_a_windowed_cache_keeps_all_tokens_of_every_layer():
    of = served("gpt-oss-120b", "h200-1x1", "mxfp4", tensor=1, replicas=1)
    load = RequestLoad(input_tokens=32_768, output_tokens=1024)
    full, windowed = (estimate_load(server(of, engines()[name]), load) for name in ("trtllm", "vllm"))
    assert (full.limit.binds, windowed.limit.binds) == ("kv_cache", "kv_cache")
    assert full.limit.sequences == pytest.approx(full.memory.cache / (33_792 * 36 * 2 * 8 * 64))
    assert windowed.limit.sequences == pytest.approx(windowed.memory.cache / ((33_280 + 128) * 18 * 2 * 8 * 64))


def test_the_host_bounds_the_steps_of_short_prompts_only(vllm):
    """Each step with prompts starts its kernels from Python; a step of the decoding graph does not."""
    one, limit = RequestLoad(input_tokens=64, output_tokens=9), BatchLimit(sequences=1.0, binds="concurrency")
    loads = [replace(one, input_tokens=n) for n in (64, 128, 8192)]
    for name, bound in (("sglang", True), ("llamacpp", False)):
        works = [request_work(served(tensor=8, replicas=1), load, engines()[name], limit) for load in loads]
        short, double, long = (scalar(prefill_steps_s(work, vllm.rates, 1.0)) for work in works)
        eager_s = 80 * 11 * scalar(vllm.rates.eager_kernel_s)
        assert (short == pytest.approx(eager_s, rel=0.2)) is bound
        assert (double < 1.05 * short) is bound
        assert long > 2 * eager_s


def test_a_step_of_few_tokens_is_a_graph_but_for_attention(vllm):
    """vLLM captures sizes of up to 512 tokens, and cuts its graphs at attention: 4 of 11 kernels are started."""
    limit, kernel_s = BatchLimit(sequences=1.0, binds="concurrency"), 80 * scalar(vllm.rates.eager_kernel_s)
    for tokens, num_kernels in ((512, 4), (513, 11)):
        load = RequestLoad(input_tokens=tokens, output_tokens=9)
        names = ({}, {"eager_prompts": False})
        works = [request_work(vllm.of, load, replace(vllm.engine, **changes), limit) for changes in names]
        started_s, device_s = (scalar(prefill_steps_s(work, vllm.rates, 1.0)) for work in works)
        assert started_s == pytest.approx(smooth_maximum(device_s, num_kernels * kernel_s))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama3.1-70b", (80 * (7 + 4), 80 * 4)),
        ("qwen3-30b-a3b", (48 * (8 + 9), 48 * 5)),
        ("gpt-oss-120b", (36 * (7 + 9), 36 * 4)),
        ("deepseek-v3", (61 * 10 + 3 * 4 + 58 * 10, 61 * 5)),
    ],
)
def test_kernels_are_counted_by_kind_of_layer(name, found):
    assert kernels(catalog.model(name)) == found


def test_a_scheduler_that_works_ahead_hides_the_host_and_delays_first_tokens(vllm):
    load = replace(LOAD, concurrency=16)
    before, ahead = (
        estimate_load(replace(vllm, engine=replace(vllm.engine, steps_ahead=n)), load) for n in (0, 1)
    )  # fmt: skip
    hidden = before.step_components_s["host"] - ahead.step_components_s["host"]
    assert hidden == pytest.approx(scalar(vllm.rates.host_s), rel=0.01)
    assert ahead.itl.value < before.itl.value
    alone = estimate_load(replace(vllm, engine=replace(vllm.engine, steps_ahead=1)), replace(load, concurrency=1))
    idle = estimate_load(replace(vllm, engine=replace(vllm.engine, steps_ahead=2)), replace(load, concurrency=1))
    assert alone.ttft.value == idle.ttft.value  # an idle server has scheduled nothing
    assert 0 < ahead.ttft.value - before.ttft.value < sum(ahead.step_components_s.values())


def test_prompts_share_steps_only_where_requests_end_often(vllm):
    limit = BatchLimit(sequences=64.0, binds="concurrency")
    loads = [RequestLoad(input_tokens=128, output_tokens=n) for n in (6400, 16)]
    rare, often = (request_work(vllm.of, load, vllm.engine, limit) for load in loads)
    assert rare.prompt_steps == pytest.approx(1.0, rel=0.01)
    assert often.prompt_steps == pytest.approx(15 / 64, rel=0.02)
    assert often.token_steps == 128 / 8192


def test_requests_wait_for_a_scheduler_that_looks_seldom(vllm):
    load = replace(LOAD, concurrency=16)
    often, seldom = (
        estimate_load(replace(vllm, engine=replace(vllm.engine, polled_steps=n)), load) for n in (1, 4)
    )  # fmt: skip
    waited_s = 1.5 * sum(often.step_components_s.values())
    assert waited_s < seldom.ttft.value - often.ttft.value < 1.5 * often.itl.value  # some of the steps have prompts
    assert seldom.itl.value == pytest.approx(often.itl.value, rel=0.001)
    assert 16 / seldom.requests_per_s == pytest.approx(16 / often.requests_per_s + waited_s)  # Little's law


def test_an_open_loop_serves_what_arrives_and_refuses_more(vllm):
    found = estimate_rate(vllm, LOAD, 3.0)
    assert found.requests_per_s == pytest.approx(3.0, rel=1e-3)
    with pytest.raises(InfeasibleError, match="more than the server finishes"):
        estimate_rate(vllm, LOAD, 1e6)


def test_a_server_with_one_request_is_as_fast_as_it_gets(vllm):
    rare, one = estimate_rate(vllm, LOAD, 1e-3), estimate_load(vllm, replace(LOAD, concurrency=4))
    assert rare.itl.value <= one.itl.value
    assert estimate_load(vllm, RequestLoad(input_tokens=9, output_tokens=1, concurrency=1)).itl.value == 0


def test_accepted_drafts_raise_the_rate_and_rejected_ones_lower_it(vllm):
    plain, good, bad = (
        estimate_load(vllm, replace(LOAD, concurrency=8, drafted_per_step=n, accepted_per_step=a)).itl.value
        for n, a in ((0, 0.0), (3, 2.0), (3, 0.0))
    )
    assert good < 0.6 * plain < plain <= bad


def test_disaggregated_prefill_keeps_prompts_out_of_decode_steps():
    long = RequestLoad(input_tokens=8192, output_tokens=256, concurrency=64)
    mixed, split = (estimate_load(server(served(), engines()["vllm"], prefill_replicas=n), long) for n in (0, 2))
    assert split.itl.value < mixed.itl.value
    assert transfer_s(served(), 8192) == pytest.approx(8192 * 163_840 / (450e9 * 2))


LONG = RequestLoad(input_tokens=32_000, output_tokens=32)


def test_prompts_wait_for_a_replica_that_prefills():
    asked = server(served(cluster="h100-8x2", tensor=4, replicas=4), engines()["vllm"], prefill_replicas=1)
    one, some, many = (estimate_load(asked, replace(LONG, concurrency=n)) for n in (1, 8, 64))
    prompt_s = sum(one.prompt_components_s.values())
    outside_s = float(asked.rates.request_s[0] + 32_000 * asked.rates.token_s[0])
    assert one.ttft.value == pytest.approx(prompt_s + outside_s, rel=0.05)  # nobody is before it
    assert some.ttft.value == pytest.approx(7.8 * prompt_s, rel=0.05)
    assert many.request_s == pytest.approx(64 * prompt_s, rel=0.01)
    assert many.requests_per_s == pytest.approx(1 / prompt_s, rel=0.01)
    assert one.itl.value == pytest.approx(many.itl.value, rel=1e-3)  # there is hardly more than one to decode
    assert one.prefill_share == 0.25


def test_replicas_that_only_prefill_need_answers_to_decode():
    asked = server(served(), engines()["vllm"], prefill_replicas=1)
    with pytest.raises(InputError, match="nothing to decode"):
        estimate_load(asked, RequestLoad(input_tokens=10, output_tokens=1, concurrency=4))


def test_stages_work_on_parts_of_the_batch_at_once():
    one, two = (
        estimate_load(server(served(cluster="h200-8x2", **degrees), engines()["vllm"]), replace(LOAD, concurrency=512))
        for degrees in ({"tensor": 8}, {"tensor": 8, "pipeline": 2})
    )
    assert two.output_tokens_per_s.value > 1.3 * one.output_tokens_per_s.value
    small = replace(LOAD, concurrency=1)
    plain, piped = (
        estimate_load(server(served(cluster="h200-8x2", **degrees), engines()["vllm"]), small).itl.value
        for degrees in ({"tensor": 8}, {"tensor": 8, "pipeline": 2})
    )
    assert piped == pytest.approx(plain, rel=0.02)


def test_an_interval_holds_its_value(vllm):
    found = estimate_load(vllm, replace(LOAD, concurrency=16))
    for estimate in (found.ttft, found.itl, found.output_tokens_per_s):
        assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_tokens": 0},
        {"output_tokens": 10**10},
        {"concurrency": -1},
        {"accepted_per_step": 2.0, "drafted_per_step": 1},
        {"accepted_per_step": -1.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_loads_that_cannot_be(wrong):
    with pytest.raises(InputError):
        replace(LOAD, **wrong)


def test_all_replicas_cannot_prefill():
    with pytest.raises(InputError, match="only prefill"):
        server(served(), engines()["vllm"], prefill_replicas=4)


def test_every_prior_has_its_reason():
    assert all(prior.reason and 0 < prior.sd < 1 for prior in PRIORS)


# --- the search ---


def question(model="llama3.1-70b", cluster="h200-8x1", precision="fp8", **changes):
    of = served(model, cluster, precision, tensor=1)
    asked = ServingQuestion(
        model=of.model, cluster=of.cluster, weights=of.weights, cache=of.cache, engine=engines()["vllm"],
        load=LOAD, bounds=LatencyLimits(ttft_s=2.0, itl_s=0.03), reserve=shipped_reserve(),
    )  # fmt: skip
    return replace(asked, **changes)


def test_the_best_point_keeps_the_bounds_and_none_that_does_is_better():
    asked = question()
    found = search_layouts(asked)
    assert found.best.keeps(asked.bounds)
    kept = [v.best.output_tokens_per_s for v in found.verdicts if v.best]
    assert found.best.output_tokens_per_s == max(kept)
    assert {v.layout.describe() for v in found.verdicts} == {"8 x TP1", "4 x TP2", "2 x TP4", "TP8"}


def test_a_tighter_bound_needs_more_devices_for_each_request():
    loose, tight = (search_layouts(question(bounds=LatencyLimits(itl_s=itl_s))).best for itl_s in (0.08, 0.0112))
    assert loose.layout.tensor < tight.layout.tensor
    assert loose.output_tokens_per_s > tight.output_tokens_per_s


def test_a_bound_that_nothing_keeps_is_said_for_every_layout():
    found = search_layouts(question(bounds=LatencyLimits(itl_s=1e-4)))
    assert found.best is None
    assert all("ITL" in v.stopped_by for v in found.verdicts)


def test_a_rate_is_served_by_as_few_devices_as_can():
    asked = question(requests_per_s=5.0)
    found = search_layouts(asked).best
    assert found.requests_per_s >= 5.0
    assert found.layout.num_devices < 8


def test_a_rate_is_served_between_powers_of_two_in_flight():
    bounds = LatencyLimits(itl_s=0.05)
    for cluster in ("h100-8x4", "h100-8x8"):
        best = search_layouts(question(cluster=cluster, requests_per_s=100.0, bounds=bounds)).best
        assert best.layout.tensor == 2
        assert best.layout.num_devices == 26  # a closed loop that finishes the rate has longer gaps and needs 28
        assert best.requests_per_s == pytest.approx(100)
        assert best.itl_s < 0.05
        fewer = replace(served(cluster=cluster), layout=replace(best.layout, replicas=best.layout.replicas - 1))
        found = simulate(server(fewer, engines()["vllm"]), LOAD, arrivals_named("poisson", 100.0))
        assert found is None or not found.keeps(bounds)


def test_plan_and_estimates_of_a_rate_and_of_a_concurrency_agree():
    asked = question(cluster="h100-8x3", requests_per_s=100.0, bounds=LatencyLimits())
    plan = search_layouts(asked).best
    of = replace(served(cluster="h100-8x3"), layout=plan.layout)
    by_rate = estimate_rate(server(of, engines()["vllm"]), LOAD, 100.0)
    by_load = estimate_load(server(of, engines()["vllm"]), replace(LOAD, concurrency=by_rate.in_flight))
    simulated = simulate(server(of, engines()["vllm"]), LOAD, arrivals_named("poisson", 100.0))
    arriving = estimate_rate(server(of, engines()["vllm"]), LOAD, 100.0, simulated)
    for found in (by_load, plan, arriving):
        assert found.requests_per_s == pytest.approx(100.0) == by_rate.requests_per_s
    assert by_load.itl.value == pytest.approx(by_rate.itl.value)
    assert (plan.concurrency, plan.itl_s, plan.ttft_s) == (arriving.in_flight, arriving.itl.value, arriving.ttft.value)
    assert arriving.in_flight == pytest.approx(100.0 * arriving.request_s) == pytest.approx(by_rate.in_flight, rel=0.05)
    of = served(cluster="h100-8x3", tensor=2, replicas=12)
    most = estimate_load(server(of, engines()["vllm"]), replace(LOAD, concurrency=4522))
    assert estimate_rate(server(of, engines()["vllm"]), LOAD, most.requests_per_s).in_flight == pytest.approx(4522)


def test_disaggregated_layouts_keep_the_bound_of_the_first_token_and_no_load_beats_them():
    asked = question(cluster="h100-8x2", load=LONG, disaggregated=True, bounds=LatencyLimits(ttft_s=4.0))
    verdicts = [v for v in search_layouts(asked).verdicts if v.prefill_replicas and v.best]
    assert verdicts
    for verdict in verdicts:
        of = served(cluster="h100-8x2", tensor=1)
        one = server(replace(of, layout=verdict.layout), engines()["vllm"], prefill_replicas=verdict.prefill_replicas)
        loads = [estimate_load(one, replace(LONG, concurrency=n)) for n in range(1, 41)]
        kept = [found.output_tokens_per_s.value for found in loads if found.ttft.value <= 4.0]
        assert verdict.best.output_tokens_per_s >= max(kept) * (1 - 1e-6)
        assert verdict.best.ttft_s <= 4.0


def test_the_front_has_no_point_that_another_beats():
    front = search_layouts(question(disaggregated=True)).front
    for a, b in pairwise(front):
        assert a.interactivity <= b.interactivity
        assert a.tokens_per_s_per_device >= b.tokens_per_s_per_device
    assert pareto(front) == list(front)


# --- price ---


def test_dollars_per_million_tokens(vllm):
    """East US 2, 10,000 output tokens/s of a node at full use: 1.33 USD per million (48 USD an hour)."""
    found = estimate_load(vllm, replace(LOAD, concurrency=64))
    device = vllm.of.cluster.accelerator
    price = token_price(found, HourPrice(usd_per_device_hour=6.0), device)
    out = found.output_tokens_per_s.value
    assert price.usd_per_million_output == pytest.approx(48e6 / 3600 / out)
    whole = price.usd_per_million_input_share * 1024 + price.usd_per_million_output_share * 256
    assert whole == pytest.approx(price.usd_per_million_output * 256)
    half = token_price(found, HourPrice(usd_per_device_hour=6.0, utilization=0.5), device)
    assert half.usd_per_million_total == pytest.approx(2 * price.usd_per_million_total)


def test_a_licence_is_paid_for_every_hour_of_the_year():
    assert HourPrice(usd_per_device_hour=1.0, licence_usd_per_device_year=4000).total_usd_per_device_hour == (
        pytest.approx(1.457, abs=1e-3)
    )


def test_an_owned_device_pays_for_power():
    device = catalog.accelerator("h200")
    cheap, dear = (owned(Ownership(capital_usd=40_000, usd_per_kwh=p), device) for p in (0.0, 0.1))
    more = dear.usd_per_device_hour - cheap.usd_per_device_hour
    assert more == pytest.approx(facility_w(device) / 1000 * 0.1)


@pytest.mark.parametrize("wrong", [{"capital_usd": 0.0}, {"capital_usd": 1.0, "life_years": -1}], ids=str)
def test_terms_that_cannot_be(wrong):
    with pytest.raises(InputError):
        Ownership(**wrong)


# --- claims ---


def test_published_tables_hold_a_gain_of_replicas_without_a_change_of_hardware():
    assert sorted(round(r, 2) for r in published_replica_ratios().values()) == [1.28, 1.32, 1.36]


def test_the_comparison_of_405b_is_computed_with_its_band_and_its_parts():
    found = predict_serving_claim(claim("s65_12"))
    assert found.is_inside
    assert 1.1 < found.value.value < 2.2
    assert any("replicas over TP8" in line for line in found.plans)
    assert any("1.28, 1.32, 1.36" in line for line in found.plans)


@pytest.mark.parametrize(
    ("claim_id", "value"), [("s65_13", 1), ("s65_15", 3), ("s65_18", 62.853), ("s65_23", 84.8), ("s65_24", 4000)]
)
def test_claims_that_are_arithmetic(claim_id, value):
    assert predict_serving_claim(claim(claim_id)).value.value == pytest.approx(value)


def test_claims_about_training_are_not_answered_here():
    assert predict_serving_claim(claim("s65_01")) is None
