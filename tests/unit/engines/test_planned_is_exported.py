"""Every plan that the planner lists for an engine is one that the engine exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from tests.plan_questions import questions, questions_of_own_files

from meshwright.engines.base import ExternalProgramsEngine, check_export, find_engine
from meshwright.engines.choice import not_run, with_planned_engine
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.planner.fixed import fixed_fields
from meshwright.runfile import from_options
from meshwright.specs.run import Run, with_plan, with_software

TOP = 10
SUPPRESSED = [HealthCheck.too_slow]
FEW = settings(max_examples=12, deadline=None, suppress_health_check=SUPPRESSED)
THOUSANDS = settings(max_examples=2000, deadline=None, suppress_health_check=SUPPRESSED)


def refused(run: Run, fixed: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Return what the engine says of each plan that the planner lists for `run` and that is not exported."""
    if not_run(run):
        with pytest.raises(InputError, match=f"the {run.engine} engine cannot do this run"):
            with_planned_engine(run)
        return {}
    try:
        request = free_request(run).fixing(**fixed_fields(fixed))
        result = best_plans(request, goal=goal_of(run), top=TOP)
    except (InputError, InfeasibleError):  # fixed fields contradict each other, or no plan fits
        return {}
    found: dict[str, list[str]] = {}
    run = with_software(run, result.request.stack)
    for one in (with_plan(run, ranked.plan) for ranked in result.plans[:TOP]):
        assert one.plan is not None
        if problems := check_export(one):
            found[one.plan.describe()] = [str(problem) for problem in problems]
        else:
            _export(one)
    return found


def _export(run: Run) -> None:
    engine, folder = find_engine(run.engine), Path("results")
    if engine.check(run) and isinstance(engine, ExternalProgramsEngine):
        engine.lower_export(run, folder=folder)
    else:
        engine.lower(run, folder=folder)


ONCE = [
    ("megatron", "llama3.2-1b", "h100-8x16", 512, 4096, "", ""),  # sharded parameters
    ("megatron", "qwen3-1.7b", "gb200-16x4", 8, 512, "", "tensor=16"),  # repeated key/value heads
    ("megatron", "llama3-8b", "h200-8x4", 128, 6144, "optimizer.states=bf16", ""),
    ("megatron", "mixtral-8x7b", "h100-8x2", 64, 4096, "", "expert=1,tensor=2"),
    ("megatron", "llama2-7b", "h100-8x2", 64, 2048, "stack.offloaded_activations=0.3", ""),  # 9.6 layers
    ("maxtext", "qwen3-8b", "h100-8x4", 8, 4096, "", ""),  # context ranks hold parts of the weights
    ("maxtext", "llama3.1-70b", "tpu7x-4x4", 6, 16384, "", ""),  # two devices of JAX
    ("maxtext", "qwen3-14b", "tpu-v6e-4x1", 256, 8192, "task=lora", ""),
    ("maxtext", "qwen3-30b-a3b", "b200-8x6", 24, 6144, "precision=fp32", ""),
    ("torchtitan", "qwen3-14b", "a100-6x1", 512, 4096, "", ""),  # a stage without layers
    ("torchtitan", "qwen3-4b", "h200-8x3", 6, 4096, "", ""),  # tied embeddings
    ("torchtitan", "gpt-oss-120b", "mi355x-8x3", 1, 6144, "", ""),  # experts under sequence parallelism
    ("native", "llama3.1-8b", "mi355x-8x8", 16, 3000, "train.compile=true", "pipeline=2"),
    ("native", "glm-4.5-air", "mi355x-8x16", 1, 2048, "precision=mxfp8", ""),  # widths of a rank
    ("native", "llama3-8b", "h100-8x2", 64, 4096, "optimizer={name: adamw8bit}", ""),
    ("native", "llama3-8b", "h100-8x2", 64, 4096, "batch.label_tokens=4000000", "pipeline=2"),
]
"""Questions whose answers were refused: engine, model, cluster, batch, sequence, a key of the run, fixed fields."""


@pytest.mark.parametrize("asked", ONCE, ids=lambda asked: "-".join(map(str, asked[:3])))
def test_what_was_refused_once_is_not_planned(asked):
    engine, model, cluster, batch, length, key, fixed = asked
    run = from_options(
        model=model, cluster=cluster, global_batch=batch, sequence_length=length, engine=engine,
        overrides=["train.steps=100", *filter(None, [key])],
    )  # fmt: skip
    assert refused(run, tuple(filter(None, [fixed]))) == {}


@FEW
@given(questions() | questions_of_own_files())
def test_every_plan_that_is_listed_is_exported(question):
    assert refused(*question) == {}


@pytest.mark.slow
@THOUSANDS
@given(questions() | questions_of_own_files())
def test_every_one_of_thousands_is_exported(question):
    assert refused(*question) == {}
