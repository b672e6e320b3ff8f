"""Kernel names, time by category, and which steps are profiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.training.profiling.categories import FRAMES, PATTERNS, WAIT, Category, category, operator_category
from meshwright.training.profiling.shares import STEP, summarize
from meshwright.training.profiling.steps import VARIABLE, ProfileSteps, steps_of_environment, steps_to_profile


def recorded() -> dict[Category, list[str]]:
    names: dict[Category, list[str]] = {}
    for line in (Path(__file__).parent / "kernel_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names[Category(line.strip("[]"))] = below = []
        elif line and not line.startswith("#"):
            below.append(line)
    return names


KERNELS = recorded()
OPERATORS = {
    Category.GEMM: ["aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "aten::_scaled_mm"],
    Category.ATTENTION: [
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "_Attention",
        "autograd::engine::evaluate_function: _AttentionBackward",
    ],
    Category.ELEMENTWISE: ["aten::mul", "aten::_softmax", "aten::copy_", "aten::rms_norm", "aten::embedding", "detach"],
    Category.OPTIMIZER: ["aten::_fused_adamw_", "aten::_foreach_norm", "Optimizer.step#AdamW.step"],
    Category.PIPELINE_WAIT: [WAIT],
    Category.COMMUNICATION: ["c10d::allreduce_", "gloo:all_reduce", "c10d::_allgather_base_", "nccl:all_gather"],
    Category.IDLE: [
        "autograd::engine::evaluate_function: MmBackward0",
        "MmBackward0",
        "torch::autograd::AccumulateGrad",
        "_LinearCrossEntropy",
        "aten::item",
    ],
    Category.OTHER: ["acme::op"],
}


@pytest.mark.parametrize(("expected", "name"), [(c, n) for c, names in KERNELS.items() for n in names])
def test_kernels(expected, name):
    assert category(name) is expected


@pytest.mark.parametrize(("expected", "name"), [(c, n) for c, names in OPERATORS.items() for n in names])
def test_operators(expected, name):
    assert operator_category(name) is expected


def test_every_line_of_the_table_can_be_read_and_has_a_reason():
    for pattern in (*PATTERNS, *FRAMES):
        re.compile(pattern.expression)
        assert len(pattern.why) > 3
    assert {p.category for p in PATTERNS} == set(Category) - {Category.OTHER, Category.IDLE}


def test_no_line_of_the_table_is_without_a_name_that_it_decides():
    names = [n for names in (*KERNELS.values(), *OPERATORS.values()) for n in names]
    deciding = {next((p for p in PATTERNS if re.search(p.expression, n)), None) for n in names}
    assert len(deciding) > 20


# --- shares ---


def event(name, start_us, end_us, *, cat="kernel", lane=7):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": lane, "ts": start_us, "dur": end_us - start_us}


def step(number, start_us, end_us):
    return event(f"{STEP}{number}", start_us, end_us, cat="user_annotation", lane=1)


def test_communication_behind_computation_is_hidden():
    trace = [
        step(1, 0, 100),
        event("nvjet_tst_x", 0, 40),
        event("ncclDevKernel_AllGather_RING_LL", 30, 60, lane=20),
        event("acme", 60, 70),
        event("nvjet_tst_x", 90, 130),  # what lies outside the step does not count
    ]
    found = summarize({"traceEvents": trace})
    shares = {name: share for name, share in found["shares"].items() if share}
    assert shares == pytest.approx({"GEMM": 0.5, "communication": 0.2, "other": 0.1, "idle": 0.2})
    assert found["communication"] == pytest.approx({"busy_s": 30e-6, "exposed_s": 20e-6})
    assert [k["name"] for k in found["unknown"]] == ["acme"]
    assert (found["device"], found["steps"]) == ("gpu", [1])


def test_what_an_operator_calls_belongs_to_it():
    trace = [
        step(4, 0, 100),
        event("Optimizer.step#AdamW.step", 0, 50, cat="user_annotation", lane=1),
        event("aten::mul", 10, 20, cat="cpu_op", lane=1),
        event("autograd::engine::evaluate_function: MulBackward0", 50, 90, cat="cpu_op", lane=1),
        event("aten::mul", 60, 80, cat="cpu_op", lane=1),
    ]
    found = summarize({"traceEvents": trace})
    shares = {name: share for name, share in found["shares"].items() if share}
    assert shares == pytest.approx({"optimizer": 0.5, "elementwise": 0.2, "idle": 0.3})
    kernels = {(k["name"], k["category"]): k["seconds"] for k in found["kernels"]}
    assert kernels["aten::mul", "optimizer"] == pytest.approx(10e-6)
    assert kernels["Optimizer.step#AdamW.step", "optimizer"] == pytest.approx(40e-6)


def test_what_runs_while_a_send_or_receive_is_on_its_way_keeps_its_category():
    """Gloo's ranges last from the call to the wait, on the thread that computes meanwhile."""
    trace = [
        step(1, 0, 100),
        event("gloo:send", 1, 99, cat="user_annotation", lane=1),
        event("gloo:recv", 5, 40, cat="user_annotation", lane=1),
        event("aten::mm", 10, 20, cat="cpu_op", lane=1),
        event(WAIT, 25, 40, cat="user_annotation", lane=1),
        event("aten::mm", 50, 90, cat="cpu_op", lane=1),
    ]
    shares = {name: share for name, share in summarize({"traceEvents": trace})["shares"].items() if share}
    assert shares == pytest.approx({"GEMM": 0.5, "pipeline wait": 0.15, "communication": 0.1, "idle": 0.25})


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no profiled step"):
        summarize({"traceEvents": [event("nvjet_x", 0, 1)]})


NAMES = [names[0] for names in KERNELS.values()]


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 300), st.integers(1, 80), st.integers(1, 3)), max_size=30)
)
def test_shares_are_ratios_that_add_up_to_one(kernels):
    trace = [step(1, 0, 100), step(2, 150, 250), event("Memset (Device)", 0, 1)]
    trace += [event(name, start, start + length, lane=lane) for name, start, length, lane in kernels]
    found = summarize({"traceEvents": trace})
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in found["shares"].values())
    assert found["window_s"] == pytest.approx(200e-6)
    assert found["communication"]["exposed_s"] <= found["communication"]["busy_s"] + 1e-12


# --- which steps ---


@pytest.mark.parametrize(
    ("asked", "done", "num_steps", "first", "last"),
    [
        (None, 0, 100, 6, 8),
        (None, 40, 100, 46, 48),
        (None, 0, 7, 5, 7),
        (None, 0, 2, 1, 2),
        (ProfileSteps(first=10, last=13), 0, 100, 10, 13),
    ],
)
def test_which_steps(asked, done, num_steps, first, last):
    expected = ProfileSteps(first=first, last=last)
    assert steps_to_profile(asked, done=done, num_steps=num_steps) == expected


def test_steps_that_a_resumed_run_has_behind_it_are_not_profiled():
    assert steps_to_profile(ProfileSteps(first=3, last=4), done=3, num_steps=9) is None


def test_processes_learn_of_the_steps_through_their_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert steps_of_environment() is None
    steps = ProfileSteps(first=6, last=8)
    monkeypatch.setenv(VARIABLE, str(steps))
    assert steps_of_environment() == steps
    assert [step for step in range(12) if steps.covers(step)] == [5, 6, 7, 8]  # the first of them does not count


@pytest.mark.parametrize("text", ["", "3", "0:2", "5:4", "a:b", "1:2:3", "-1:3"])
def test_other_texts_are_no_steps(text):
    with pytest.raises(ValueError, match="no range of steps"):
        ProfileSteps.parse(text)
