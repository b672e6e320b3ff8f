"""Wordings of notes, as others write them, and what they state (`wordings.txt`, written before the reader was run)."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.every_member import check_every

from meshwright.accuracy.recomputation import recompute_of_note
from meshwright.accuracy.shipped import wordings
from meshwright.accuracy.statements import read_statements

_LINES = [
    line.split("=>")
    for line in (Path(__file__).parent / "wordings.txt").read_text("utf-8").splitlines()
    if line.strip() and not line.startswith("# ")
]


def _stated(note: str) -> dict[str, str]:
    said = read_statements(note)
    values = {name: said.value(name) for name in wordings()["switch"] if name != "recompute"}
    values["recompute"] = recompute_of_note(note) or None
    return {name: str(value) for name, value in values.items() if value is not None}


def test_each_note_states_what_is_written_beside_it() -> None:
    check_every(_LINES, _states, name=lambda line: line[0].strip())


def _states(line: list[str]) -> None:
    note, expected = line
    parts = [part.strip() for part in expected.split(";") if part.strip()]
    said = read_statements(note.strip())
    assert _stated(note.strip()) == dict(part.split("=", 1) for part in parts if part != "?")
    if "?" in parts:
        assert said.unread or said.not_modelled or said.contradictions()


OPTIONS = """
activation_checkpointing recompute recompute_activations recompute_granularity activation_checkpoint.mode
ac use_recompute gradient_checkpointing gradient_checkpointing_enable checkpoint_activations remat ac_mode
recompute_layer moe_layer_recompute fsdp_activation_checkpointing grad_ckpt activation_offload
offload_activations cpu_offloading
offload_optimizer optimizer_cpu_offload use_flash_attention_2 fused_attention use_torch_compile compile.enable
enable_cuda_graph cuda_graph_impl sequence_parallel enable_sequence_parallelism tp_comm_overlap async_tp
overlap_grad_reduce overlap_comm use_distributed_optimizer use_megatron_fsdp use_hsdp reshard_after_forward fp8
fp8_param_gather fp8_attention grad_reduce_in_fp32 accumulate_grad_in_fp32 moe_enable_deepep hybridep tf32 mtp use_lora
moe_router_force_load_balancing force_load_balance fake_balanced_gate moe_pad_expert_input_to_capacity load_in_4bit
moe_grouped_gemm overlap_moe_expert_parallel_comm
"""
DENIALS = ("{}=False", "{}: null", "{}=0", "no {}", "{} disabled", "{}: off")


def test_an_option_that_is_denied_is_never_read_as_if_it_were_on() -> None:
    def check(option: str, denial: str) -> None:
        on, off = _stated(f"{option}=True"), _stated(denial.format(option))
        assert on
        assert not on.items() & off.items()
        assert off or read_statements(denial.format(option)).unread

    check_every([(option, denial) for option in OPTIONS.split() for denial in DENIALS], lambda case: check(*case))


_WORDS = st.sampled_from(
    [*(line[0].strip() for line in _LINES), "not", "no", "and", ",", "(", ")", ";", "=", "8", "99999999999"]
)


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(_WORDS, max_size=6).map(" ".join)))
def test_any_note_is_read_and_each_clause_is_kept(note: str) -> None:
    said = read_statements(note)
    assert set(said.unread) <= {clause.text for clause in said.clauses}
    for clause in said.clauses:
        assert all(0 <= m.start < m.end <= len(clause.text) for m in clause.mentions)
    recompute_of_note(note)
