"""Rows with one condition in the words of strangers: each takes effect, is noted, or is listed as not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.every_member import check_every

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun

ReadOne = Callable[..., PublishedRun]

FSDP = {
    "framework": "torchtitan", "framework_version": "2025-06", "date": "2025-06-09", "num_gpus": 64, "mbs": 1,
    "gbs": 128, "cp": "", "dp": "", "tp": 1, "pp": 1, "dp_type": "FSDP", "precision": "bf16", "tok_s_gpu_best": 6000,
}  # fmt: skip
"""A row of sharded parameters that says everything."""


def _conditions(run: PublishedRun) -> RunConditions:
    assert run.conditions is not None, (run.reason, run.reason_detail)
    return run.conditions


Case = tuple[dict[str, object], Any, str]
"""Cells that differ from `FSDP`, what is read, and the words of a note on it (""): there is no such note, as without
the cells."""


def _check(read_one: ReadOne, cases: list[Case], value: Callable[[RunConditions], Any]) -> None:
    usual = read_one(**FSDP).assumed

    def one(case: Case) -> None:
        cells, expected, noted = case
        run = read_one(**FSDP | cells)
        assert value(_conditions(run)) == expected
        new = [note for note in run.assumed if note not in usual]
        assert any(noted in note for note in new) if noted else new == [], new
        assert not run.unread

    check_every(cases, one, name=lambda case: str(case[0]))


def test_attention_alone_in_8_bits_leaves_the_gemms(read_one: ReadOne) -> None:
    cases: list[Case] = [
        ({"precision": "fp8 attention only"}, ("bf16", True), ""),
        ({"precision": "bf16 (fp8 attention)"}, ("bf16", True), ""),
        ({"precision": "FP8 except attention", "notes": "current scaling"}, ("fp8", False), ""),
        ({"precision": "", "notes": "fp8 attention only"}, ("bf16", True), "precision bf16, as the note says"),
        ({"precision": "fp8", "notes": "only attention in FP8"}, ("fp8", True), "notes say bf16 of the precision"),
        ({"notes": "no FP8 attention"}, ("bf16", False), ""),
    ]
    _check(read_one, cases, lambda c: (c.precision, c.software["fp8_attention"]))


def test_a_kernel_that_is_denied_leaves_the_stacks_own(read_one: ReadOne) -> None:
    words = ("no FA3", "FA3 not used", "without FlashAttention-3", "FA3: disabled")
    for framework in ("torchtitan", "NeMo"):
        usual = _conditions(read_one(**FSDP | {"framework": framework})).software["attention"]
        for note in words:
            run = read_one(**FSDP | {"framework": framework, "notes": note})
            assert (_conditions(run).software["attention"], run.unread) == (usual, ()), note


def test_a_denied_recomputation_in_its_column_is_none(read_one: ReadOne) -> None:
    words = ("gradient_checkpointing: false", "AC: off", "activation checkpointing disabled", "no AC")
    _check(read_one, [({"recompute": text}, "none", "") for text in words], lambda c: str(c.plan.recompute))


def test_batches_in_words(read_one: ReadOne) -> None:
    none: dict[str, object] = {"gbs": ""}
    cases: list[Case] = [
        (none | {"notes": "GBS 1M tokens"}, 128, "1,048,576 tokens, as the note says"),
        (none | {"notes": "global batch of 4M tokens"}, 512, "4,194,304 tokens, as the note says"),
        (none | {"notes": "4M-token global batch"}, 512, "4,194,304 tokens"),
        (none | {"notes": "global batch size 4,194,304 tokens"}, 512, "4,194,304 tokens"),
        (none | {"notes": "0.5M tokens per step"}, 64, "524,288 tokens"),
        (none | {"notes": "batch size of 8.192M tokens", "seq_len": 1000}, 8192, "8,192,000 tokens"),
        (none | {"notes": "4.2M tokens per batch"}, 64, "4,200,000 tokens is no whole number of sequences of 8,192"),
        (none | {"gbs_tokens": 4_200_000}, 64, "is no whole number of sequences"),
        (none | {"notes": "effective batch size 256"}, 256, "gbs 256, as the note says"),
        (none | {"notes": "total batch size: 256"}, 256, "gbs 256, as the note says"),
        (none | {"notes": "batch of 512 sequences"}, 512, "gbs 512, as the note says"),
        (none | {"notes": "gradient accumulation 16"}, 1024, "grad_accum 16, as the note says"),
        (none | {"notes": "accumulating gradients over 4 steps"}, 256, "grad_accum 4, as the note says"),
        (none | {"notes": "no gradient accumulation"}, 64, "grad_accum 1, as the note says"),
        (none | {"mbs": "", "notes": "per-device batch 2"}, 128, "mbs 2, as the note says"),
        ({"notes": "GBS 1M tokens"}, 128, ""),
        ({"notes": "global batch 4M tokens"}, 128, "128 sequences of 8192 are not 4,194,304 tokens"),
        ({"notes": "gradient accumulation 16"}, 128, "micro-batch 1 x DP 64 x 16 steps is not batch 128"),
        ({"notes": "per-device batch 2"}, 128, "notes say 2 sequences of a rank: not used"),
    ]
    _check(read_one, cases, lambda c: c.global_batch)


def test_a_note_says_which_part_of_fsdp_is_kept_whole(read_one: ReadOne) -> None:
    words = ("reshard_after_forward=False", "reshard_after_forward: never", "SHARD_GRAD_OP", "ZeRO-2")
    cases: list[Case] = [({"notes": text}, "gradients", "sharding gradients, as the note says") for text in words]
    cases += [
        ({"notes": "FULL_SHARD"}, "parameters", ""),
        ({"dp_type": "ZeRO-3", "notes": "ZeRO-2"}, "parameters", "notes say sharding of gradients: its column used"),
        ({"dp_type": "distopt", "notes": "no distributed optimizer"}, "optimizer", "notes say sharding of none"),
    ]
    _check(read_one, cases, lambda c: c.plan.sharding.name.lower())


def test_hybrid_sharding_is_stated_as_a_mesh_or_by_its_axes(read_one: ReadOne) -> None:
    cases: list[Case] = [
        ({"notes": "HSDP 8x8"}, (8, 8), ""),
        ({"notes": "HSDP (4, 16)"}, (16, 4), ""),
        ({"notes": "FSDP 16 x DP 4"}, (16, 4), ""),
        ({"notes": "HSDP: shard 16, replicate 4"}, (16, 4), ""),
        ({"notes": "DP shard/replicate: 32/2"}, (32, 2), ""),
        ({"notes": "hybrid sharding within a node"}, (8, 8), "over the 8 ranks of a node"),
        ({"dp_type": "HYBRID_SHARD"}, (8, 8), "over the 8 ranks of a node"),
        (
            {"dp_type": "HSDP (ZeRO-3 within a node)", "gpus_per_node": 4, "recompute": "full"},
            (4, 16),
            "over the 4 ranks of a node",
        ),
        ({"dp_type": "FSDP (ZeRO-3)", "notes": "hybrid sharding"}, (64, 1), ""),
        ({"notes": "HSDP 8x9"}, (64, 1), "notes say 9 ranks share the parameters: not used"),
    ]
    _check(read_one, cases, lambda c: (c.plan.data_shard, c.plan.data_replicate))


def test_a_run_in_16_bits_alone_has_no_masters(read_one: ReadOne) -> None:
    words = ("pure bf16", "bf16 parameters and optimizer states", "no fp32 master weights", "bf16-true")
    cases: list[Case] = [({"notes": text}, (0.0, 2.0, 4.0), "") for text in words]
    cases += [
        ({"precision": "bf16-true"}, (0.0, 2.0, 4.0), ""),
        ({"precision": "bf16-mixed"}, (4.0, 4.0, 8.0), ""),
        ({"notes": "fp32 master weights"}, (4.0, 4.0, 8.0), ""),
        ({"notes": "pure bf16, 8-bit AdamW"}, (0.0, 2.0, 2 * (1 + 4 / 256)), ""),
    ]

    def formats(c: RunConditions) -> tuple[float, float, float]:
        return c.number_formats.master_bytes, c.number_formats.grad_bytes, c.number_formats.optimizer_state_bytes

    _check(read_one, cases, formats)


def test_a_framework_whose_states_are_narrow_already_is_not_halved_twice(read_one: ReadOne) -> None:
    torchtune = FSDP | {"framework": "torchtune", "num_gpus": 1, "gbs": 1, "dp_type": "", "gpu": "H200"}
    runs = [read_one(**torchtune | {"notes": note}) for note in ("", "pure bf16")]
    plain, stated = predict(runs).memory_allocated_bytes
    assert stated == plain


def test_communication_of_data_parallel_ranks_that_nothing_hides(read_one: ReadOne) -> None:
    ranks = {"framework": "Megatron-LM", "dp_type": "distopt", "model": "Llama3 8B", "gbs": 64}
    words = ("no overlap of communication", "overlap disabled", "without overlap_grad_reduce", "--overlap-comm false")
    usual = read_one(**FSDP | ranks)
    for note in words:
        run = read_one(**FSDP | ranks | {"notes": note})
        assert (_conditions(run).overlaps_data, run.unread) == (False, ()), note
        slower, faster = predict([run, usual]).tokens_per_s_per_device
        assert slower < faster, note
    assert _conditions(read_one(**FSDP | ranks | {"notes": "--overlap-grad-reduce"})).overlaps_data is True


def test_adapters_in_the_note_of_a_pretraining_are_named(read_one: ReadOne) -> None:
    _check(read_one, [({"task": "pretrain", "notes": "LoRA"}, None, "notes say lora of the task")], lambda c: c.lora)


def test_what_is_known_and_not_costed_is_named(read_one: ReadOne) -> None:
    cases: list[Case] = [
        ({"notes": "PCIe Gen4 x16"}, "bf16", "a generation of PCIe"),
        ({"notes": "chunked loss"}, "bf16", "the loss in chunks"),
        ({"notes": "allgather dispatcher"}, "bf16", "the dispatcher that gathers all tokens"),
    ]
    _check(read_one, cases, lambda c: c.precision)


def test_flops_that_are_not_those_of_the_tokens_are_doubted(read_one: ReadOne) -> None:
    for tflops, doubted in ((40, True), (400, False), (3200, True)):
        run = read_one(**FSDP | {"tflops_per_gpu": tflops})
        assert any("what 6,000 tokens/s mean: the tokens used" in note for note in run.assumed) is doubted
        assert run.tokens_per_s_per_device == 6000
