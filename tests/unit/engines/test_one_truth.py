"""A plan, its export and the import of that export are one run: the same step time and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plan_questions import questions, questions_of_own_files, questions_of_software, stated_cluster

from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import ExternalProgramsEngine, ImportingEngine, find_engine
from meshwright.engines.choice import not_run
from meshwright.engines.maxtext.lower import CONFIGURATION
from meshwright.engines.megatron.lower import ARGUMENTS, BRIDGE
from meshwright.engines.trl.lower import CONFIGURATION as SFT
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.request import request_for
from meshwright.runfile import from_mapping, from_options, loads, pinned_text
from meshwright.specs.run import Run, with_software

FILES = {"megatron": (ARGUMENTS, BRIDGE), "maxtext": (CONFIGURATION,), "trl": (SFT,)}
BRIDGE_ALONE = ("fuses_experts", "fp8_attention")
"""Switches for which Megatron-LM has no option."""
TOP = 3
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
FEW = settings(max_examples=15, deadline=None, suppress_health_check=SUPPRESSED)
THOUSANDS = settings(max_examples=2000, deadline=None, suppress_health_check=SUPPRESSED)


def costs(run: Run) -> tuple[float, float]:
    """Seconds of a step and bytes of a device."""
    assert run.plan is not None
    step = estimate_plan(request_for(run), run.plan).step
    return step.step.value, step.memory.reserved_bytes


def require_one_truth(run: Run, fixed: tuple[str, ...], folder: Path) -> int:
    """Export the first plans of `run`, import each file, and compare the estimates; return the number of files."""
    if not_run(run):
        return 0
    try:
        request = free_request(run).fixing(**fixed_fields(fixed))
        result = best_plans(request, goal=goal_of(run), top=TOP)
    except (InputError, InfeasibleError):  # fixed fields contradict each other, or no plan fits
        return 0
    engine, run = find_engine(run.engine), with_software(run, result.request.stack)
    assert isinstance(engine, ImportingEngine)
    for ranked in (plans := result.plans[:TOP]):
        pinned = loads(pinned_text(run, ranked.plan))
        asked = estimate_plan(result.request, ranked.plan).step
        assert costs(pinned) == (asked.step.value, asked.memory.reserved_bytes)
        lower = engine.lower_export if isinstance(engine, ExternalProgramsEngine) else engine.lower
        files = lower(pinned, folder=Path("results")).files
        for name in FILES[run.engine]:
            if name == ARGUMENTS and any(getattr(switches_of(pinned), key) for key in BRIDGE_ALONE):
                continue
            (folder / name).write_text(files[name])
            found = engine.import_run(str(folder / name), cluster=stated_cluster(run))
            again = from_mapping(json.loads(json.dumps(found.content)))
            assert again.precision == pinned.precision
            assert costs(again) == pytest.approx(costs(pinned), rel=1e-9), (name, ranked.plan.describe())
    return len(plans)


ASKED = st.one_of([drawn(engines=tuple(FILES)) for drawn in (questions, questions_of_own_files, questions_of_software)])


@FEW
@given(question=ASKED)
def test_an_imported_export_is_estimated_as_its_plan(question, tmp_path):
    require_one_truth(*question, tmp_path)


@pytest.mark.slow
@THOUSANDS
@given(question=ASKED)
def test_thousands_of_imported_exports_are_estimated_as_their_plans(question, tmp_path):
    require_one_truth(*question, tmp_path)


@pytest.mark.when_touched  # test_an_imported_export_is_estimated_as_its_plan draws runs
@pytest.mark.parametrize(
    ("engine", "model", "cluster", "keys"),
    [
        ("megatron", "llama3.1-8b", "h100-8x4", ()),
        ("megatron", "llama3.1-70b", "h100-8x1", ()),  # fits with optimizer states in host memory alone
        ("megatron", "qwen2.5-7b", "h100-8x4", ()),
        ("megatron", "gpt3-175b", "a100-8x128", ("data.sequence_length=2048",)),
        ("megatron", "glm-4.5-air", "h100-8x16", ()),
        ("megatron", "mixtral-8x7b", "l40s-8x16", ("model={base: mixtral-8x7b, vocab: 151669}",)),  # padded
        ("megatron", "qwen3-30b-a3b", "b200-8x4", ("stack.preset=recipe",)),
        ("megatron", "deepseek-v3", "b200-8x32", ("precision=mxfp8", "stack.preset=recipe")),
        ("megatron", "qwen3-235b-a22b", "h100-8x32", ("stack.dispatcher=deepep", "stack.gradient_format=bf16")),
        ("maxtext", "gpt-oss-20b", "h100-8x4", ()),
        ("maxtext", "llama3.1-70b", "mi300x-8x8", ()),
        ("maxtext", "llama3.1-8b", "tpu-v5p-4x8", ()),
        ("maxtext", "qwen3-8b", "tpu-v6e-8x4", ("kernels.loss_chunk=1024",)),
        ("maxtext", "llama3.1-405b", "mi300x-8x16", ("optimizer.master_weights=false", "kernels.loss_chunk=2048")),
        ("megatron", "llama3.1-8b", "h100-8x4+a100-8x4", ()),
        ("megatron", "llama3.1-70b", "gb200-4x8+h100-4x2", ("stack.preset=recipe", "batch.global_sequences=64")),
        ("maxtext", "llama3.1-8b", "h100-8x4+a100-8x4", ()),
        ("megatron", "llama3.1-8b", "mi300x-8x4", ("stack.framework=primus-megatron", "stack.vintage=2025.7")),
        ("megatron", "qwen3-30b-a3b", "h100-8x4", ("stack.vintage=2024.5", "stack.preset=engine")),
        ("trl", "llama3.1-8b", "h100-8x4", ()),
        ("trl", "qwen2.5-7b", "mi300x-8x2", ("train.compile=true", "stack.vintage=2025.5")),
        ("trl", "llama3.1-70b", "h200-8x1", ("task=lora", "lora.base_format=nf4")),
        ("trl", "gemma2-9b", "b200-8x2", ("task=lora", "lora.use_dora=true", "optimizer.schedule=wsd")),
        ("trl", "llama3.1-8b", "h200-8x1", ("stack.offloaded_activations=1",)),
        ("trl", "llama3.2-1b", "h100-8x2", ("stack.reduces_once=true",)),
        ("maxtext", "llama3.1-8b", "tpu-v5p-4x8", ("stack.vintage=2024.9",)),
        ("maxtext", "qwen3-8b", "h200-8x1", ("stack.framework=mlperf-other", "stack.compiles=false")),
        ("maxtext", "deepseek-v2-lite", "mi355x-8x1", ("stack.framework=mlperf-nvidia", "stack.cuda_graphs=full")),
    ],
)
def test_runs_that_people_ask_for(engine, model, cluster, keys, tmp_path):
    run = from_options(
        model=model, cluster=cluster, global_batch=512, sequence_length=4096, engine=engine,
        overrides=["train.steps=100", *keys],
    )  # fmt: skip
    assert require_one_truth(run, (), tmp_path) > 0
