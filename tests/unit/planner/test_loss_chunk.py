"""The chunk of the loss: as large as memory allows, fixed, refused, written to run files and read back."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan_requests import plan_request
from tests.tiny_runs import LORA_70B

from meshwright.answers.plan_ranking import plan_run
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.tables import plan_row
from meshwright.engines.choice import planned
from meshwright.engines.native.check import check
from meshwright.errors import InputError
from meshwright.planner.explain import WhyNotVerdict, why_not
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.savings import note_on_loss
from meshwright.planner.screen import cost_model
from meshwright.planner.search import search
from meshwright.planner.space import default_space
from meshwright.runfile import loads, pinned_text
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.plan import Plan

TEXT = """
model: llama3.1-8b
cluster: h200-8x1
data: {source: synthetic, sequence_length: 16384}
batch: {global_sequences: 64}
optimizer: {name: adamw, learning_rate: 3.0e-4}
parallel: auto
train: {steps: 1}
"""
"""16,384 tokens of a vocabulary of 128,256: 32 chunks of the engine's own."""


def request_of(*, model: str = "llama3.1-8b", **changes) -> PlanRequest:
    return plan_request(model, "h200-8x1", seq_len=16384, **changes)


def one(values) -> float:
    return float(np.ravel(np.asarray(values))[0])


def test_memory_that_is_left_is_used_and_said():
    request = request_of()
    best, own = (search(r, top=1).best for r in (request, request.fixing(loss_chunk=None)))
    assert best is not None
    assert own is not None
    assert best.plan.loss_chunk == "all"
    assert best.plan.describe().endswith("loss=all")
    assert best.step_s < own.step_s * 0.99  # 32 sums over 2.1 GB a micro-batch are gone
    assert best.reserved_bytes <= request.usable_bytes
    assert "logits of all tokens" in (note_on_loss(best.plan) or "")
    assert own.plan.loss_chunk is None
    assert note_on_loss(own.plan) is None


@settings(deadline=None, max_examples=40)
@given(
    ratio=st.floats(0.1, 1.0),
    micro=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    model=st.sampled_from(["llama3.1-8b", "qwen2.5-0.5b", "llama3.2-1b", "deepseek-v2-lite"]),
)
def test_the_formula_is_what_trying_every_chunk_finds(ratio, micro, tensor, pipeline, context, model):
    """The chunk fits, the whole model estimates the same memory, and one chunk fewer does not fit."""
    request = request_of(model=model)
    plan = Plan(tensor=tensor, pipeline=pipeline, context=context, data_shard=8, micro_batch=micro)
    row, cost = plan_row(plan), cost_model(request)
    memory = cost.memory(row)
    least = one(memory.reserved_bytes)
    budget = least + ratio * 3e10
    chunk, reserved = (one(x) for x in cost.loss_chunks(row, memory, budget))
    tokens = request.seq_len * micro / context

    def reserves(chunk: float) -> float:
        return one(cost.memory(replace(row, loss_chunk=np.array(chunk))).reserved_bytes)

    assert reserves(chunk) == pytest.approx(reserved)
    assert reserved <= max(budget, least) * (1 + 1e-9)
    own = max(1.0, np.ceil(tokens / max(1, 2**26 // (request.model.vocab / tensor))))
    chunks = own if chunk < 0 else 1.0 if chunk == 0 else np.ceil(tokens / chunk)
    assert chunks <= own
    fewer = [n for n in range(1, int(chunks)) if n < 8 or n == chunks - 1]
    for n in fewer:
        rows = 0 if n == 1 else np.ceil(tokens / n / 128) * 128
        if chunk < 0 and reserves(-1) == pytest.approx(reserves(0)):
            break  # the engine has one chunk by itself
        assert reserves(rows) > budget


def test_a_plan_that_leaves_no_memory_keeps_the_engines_own():
    request = request_of()
    row = plan_row(Plan(data_shard=8))
    memory = cost_model(request).memory(row)
    chunk, reserved = cost_model(request).loss_chunks(row, memory, one(memory.reserved_bytes))
    assert one(chunk) == -1
    assert one(reserved) == one(memory.reserved_bytes)


BETWEEN = pytest.mark.when_touched  # 0.55 leaves little memory, 0.95 much


@pytest.mark.when_touched  # test_the_formula_is_what_trying_every_chunk_finds tries them
@pytest.mark.parametrize("ratio", [0.55, pytest.param(0.62, marks=BETWEEN), pytest.param(0.7, marks=BETWEEN), 0.95])
def test_the_search_finds_what_trying_all_chunks_does(ratio):
    """The best plan over every number of chunks, each searched by itself."""
    request = request_of(usable_memory_ratio=ratio)
    best = search(request, top=1).best
    tried = [search(request.fixing(loss_chunk=c), top=1).best for c in (None, "all", 8192, 5504, 4096, 2048, 1024)]
    least = min(found.value for found in tried if found is not None)
    assert best is not None
    assert best.value <= least * (1 + 1e-3)


def test_larger_chunks_are_never_predicted_slower():
    """Of the head's loss: what the bound of the search rests on, within its margin."""
    for name in ("llama3.1-8b", "qwen2.5-0.5b", "llama3.2-1b"):
        request = request_of(model=name)
        cost = cost_model(request)
        rows = [replace(plan_row(Plan(data_shard=8)), loss_chunk=np.array(c)) for c in (0, 8192, 4096, 2048, 512)]
        steps = [one(cost.steps(row).step_s) for row in rows]
        assert all(a <= b * (1 + 2e-3) for a, b in pairwise(steps))


def test_budgets_without_a_limit_have_one_chunk():
    cost = cost_model(request_of())
    row = plan_row(Plan(data_shard=8))
    chunk, _ = cost.loss_chunks(row, cost.memory(row), MemoryBudget(capacity_bytes=float("inf")).usable_bytes)
    assert one(chunk) == 0


def test_the_run_file_carries_the_key_and_is_estimated_alike():
    run = planned(loads(TEXT, file="run.yaml"))
    assert run.plan is not None
    assert run.plan.loss_chunk is None  # said once, by the run
    assert run.kernels.loss_chunk == "all"
    reread = loads(pinned_text(run, run.plan), file="run.yaml")
    assert reread.kernels == run.kernels
    ranking = plan_run(loads(TEXT, file="run.yaml"), fixed={}, top=1)
    assert ranking.to_dict()["plans"][0]["kernels"] == {"loss_chunk": "all"}
    request = request_for(reread)
    assert reread.plan is not None
    reserved = one(cost_model(request).memory(plan_row(reread.plan)).reserved_bytes)
    assert reserved == pytest.approx(ranking.best.step.memory.reserved_bytes)
    json.dumps(ranking.to_dict(), default=str)


@pytest.mark.parametrize("said", ["all", "512", "auto"])
def test_a_run_that_names_it_leaves_nothing_to_choose(said):
    request = request_for(loads(TEXT + f"kernels: {{loss_chunk: {said}}}\n", file="run.yaml"))
    assert default_space(request).grows_loss == (said == "auto")
    assert one(request.precision_table.loss_chunk) == {"all": 0, "512": 512, "auto": -1}[said]


def test_other_engines_devices_and_frozen_heads_have_no_choice():
    assert not default_space(request_of(engine="megatron")).grows_loss
    assert not default_space(request_for(loads(LORA_70B, file="run.yaml"))).grows_loss
    routed = loads(TEXT + "kernels: {routes: {linear_cross_entropy: reference}}\n", file="run.yaml")
    assert not default_space(request_for(routed)).grows_loss
    asked = loads(TEXT + "kernels: {routes: {linear_cross_entropy: liger}, loss_chunk: 512}\n", file="run.yaml")
    assert [problem.key for problem in check(replace(asked, plan=Plan()))] == ["kernels.loss_chunk"]


@pytest.mark.parametrize("chunk", [None, "all", 512])
def test_rows_keep_what_a_plan_says(chunk):
    assert plan_from_row(plan_row(Plan(loss_chunk=chunk))).loss_chunk == chunk


@pytest.mark.parametrize(("word", "value"), [("auto", None), ("ALL", "all"), ("4096", 4096)])
def test_words(word, value):
    assert fixed_fields([f"loss_chunk={word}"]) == {"loss_chunk": value}


@pytest.mark.parametrize("word", ["", "none", "0", "-3", "1.5"])
def test_other_words_are_refused(word):
    with pytest.raises(InputError, match="loss_chunk") as caught:
        fixed_fields([f"loss_chunk={word}"])
    assert "auto, all, a whole number" in str(caught.value)


def test_why_not():
    request = request_of()
    best = search(request, top=1).best
    assert best is not None
    few = why_not(request, {"loss_chunk": 512}, winner=best)
    assert few.verdict is WhyNotVerdict.SLOWER
    assert few.comparison is not None
    assert few.comparison.step_ms.delta > 100
    assert "loss_chunk=512" in str(few)
    larger = why_not(request, {"micro_batch": 4}, winner=best)
    assert larger.verdict is not WhyNotVerdict.ILLEGAL
    megatron = request_of(engine="megatron")
    found = search(megatron, top=1).best
    assert found is not None
    refused = why_not(megatron, {"loss_chunk": "all"}, winner=found)
    assert refused.verdict is WhyNotVerdict.ILLEGAL
    assert "has no choice of a chunk of the loss" in str(refused)


def test_stacks_with_all_logits_are_not_changed():
    """The column says nothing to a stack whose loss has no chunks."""
    request = request_of(engine="megatron")
    cost, row = cost_model(request), plan_row(Plan(data_shard=8))
    other = replace(row, loss_chunk=np.array(512))
    assert one(cost.memory(other).reserved_bytes) == one(cost.memory(row).reserved_bytes)
    assert one(cost.steps(other).step_s) == one(cost.steps(row).step_s)
