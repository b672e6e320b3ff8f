"""Categories of XLA's instructions by the text of a module, and time by category from a trace of JAX's profiler."""

from __future__ import annotations

import pytest

from meshwright.training.profiling.categories import Category
from meshwright.training.profiling.hlo import instruction_categories, summarize_executions
from meshwright.training.profiling.steps import ProfileSteps

HLO = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/env/maxtext/train.py"
2 "/env/optax/_src/update.py"
3 "/env/maxtext/layers/attention_op.py"
4 "/env/maxtext/layers/linears.py"

FunctionNames
1 "train_step"
2 "a/b.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=4}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=4 end_column=4}
3 {file_name_id=3 function_name_id=1 line=9 end_line=9 column=4 end_column=4}
4 {file_name_id=4 function_name_id=1 line=9 end_line=9 column=4 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}
4 {file_location_id=4 parent_frame_id=3}
5 {file_location_id=4 parent_frame_id=1}

%fused_computation (param_0: f32[8,8], param_1: f32[8,8]) -> f32[8,8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%param_0, %param_0), metadata={op_name="jit/dot_general" stack_frame_id=5}
}

%body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %ynn_fusion.1 = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%fused_computation, metadata={stack_frame_id=5}
  %ynn_fusion.2 = f32[8]{0} fusion(%a), kind=kCustom, calls=%other, metadata={stack_frame_id=5}
  %exp.3 = f32[8,8]{1,0} exponential(%a), metadata={op_name="jit/exp" stack_frame_id=4}
  %all-gather.2 = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-gather(%a, %b), metadata={stack_frame_id=4}
}

ENTRY %main (p: f32[8,8]) -> (s32[], f32[8,8]) {
  %while.1 = (s32[], f32[8,8]{1,0}) while(%p), condition=%c, body=%body
  %cublas-gemm.1 = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cublas$gemm"
  %stranger.1 = f32[8,8]{1,0} custom-call(%p), custom_call_target="acme"
  %add.9 = f32[8,8]{1,0} add(%p, %p), metadata={op_name="jit/add" stack_frame_id=2}
  ROOT %tuple.1 = (s32[], f32[8,8]{1,0}) tuple(%p)
}
"""
STEPS = ProfileSteps(first=6, last=7)
TRACED = ProfileSteps(first=5, last=7)


def test_instructions_have_the_category_of_their_operation_or_their_source():
    found = instruction_categories(HLO)
    expected = {
        "ynn_fusion.1": Category.GEMM,  # by what it contains
        "ynn_fusion.2": Category.ELEMENTWISE,
        "exp.3": Category.ATTENTION,  # its caller's caller
        "all-gather.2": Category.COMMUNICATION,  # although attention asks for it
        "while.1": Category.IDLE,
        "cublas-gemm.1": Category.GEMM,
        "stranger.1": Category.OTHER,
        "add.9": Category.OPTIMIZER,
    }
    assert {name: found[name] for name in expected} == expected


def event(name: str, start_us: float, end_us: float, *, run: int, device: int = 0, thread: int = 1):
    about = {"hlo_op": name, "hlo_module": "jit_train_step", "run_id": str(run), "device_ordinal": str(device)}
    return {
        "ph": "X", "name": name, "pid": 7, "tid": thread, "ts": start_us, "dur": end_us - start_us, "args": about,
    }  # fmt: skip


def executions(*starts_us: float):
    """100 us each: 10 us of a loop before its GEMM, a collective on another thread that the GEMM hides half of."""
    for run, start_us in enumerate(starts_us):
        yield event("while.1", start_us, start_us + 60, run=run)
        yield event("ynn_fusion.1", start_us + 10, start_us + 60, run=run)
        yield event("all-gather.2", start_us + 35, start_us + 85, run=run, thread=2)
        yield event("add.9", start_us + 85, start_us + 100, run=run)
        yield event("ynn_fusion.1", start_us, start_us + 1000, run=run, device=1)


def summarized(trace):
    return summarize_executions(
        {"traceEvents": list(trace)}, module="jit_train_step", hlo=HLO, traced=TRACED, steps=STEPS
    )


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own():
    host = {"ph": "X", "name": "train", "pid": 7, "tid": 3, "ts": 0.0, "dur": 9.0, "args": {"step_num": "5"}}
    found = summarized([host, {"ph": "M", "name": "thread_name"}, *executions(0, 200, 400)])
    assert (found["steps"], found["device"]) == ([6, 7], "cpu")
    assert found["window_s"] == pytest.approx(400e-6)  # 100 to 500
    shares = {name: share for name, share in found["shares"].items() if share}
    assert shares == pytest.approx({"GEMM": 0.25, "communication": 0.125, "optimizer": 0.075, "idle": 0.55})
    assert found["communication"] == pytest.approx({"busy_s": 100e-6, "exposed_s": 50e-6})
    assert found["unknown"] == []


@pytest.mark.parametrize("starts", [(), (0,), (0, 200), (0, 200, 400, 600)])
def test_another_number_of_executions_is_refused(starts):
    with pytest.raises(ValueError, match=f"{len(starts)} executions of jit_train_step, and 3 steps"):
        summarized(executions(*starts))


def test_an_instruction_that_the_text_lacks_is_listed_by_name():
    extra = (event("convert.77", start + 2, start + 8, run=i) for i, start in enumerate((0, 200, 400)))
    found = summarized([*executions(0, 200, 400), *extra])
    assert [kernel["name"] for kernel in found["unknown"]] == ["convert.77"]
