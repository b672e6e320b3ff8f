"""One run in other words, units and columns: the same conditions, and contradictions that are said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.every_member import check_every

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun

ReadMany = Callable[..., list[PublishedRun]]
Cells = dict[str, Any]

MEGATRON: Cells = {
    "gpu": "H100-SXM-80GB", "model": "LLAMA3.1-70B", "num_gpus": 128, "gpus_per_node": 8, "seq_len": 8192, "gbs": 128,
    "mbs": "", "tp": "", "pp": "", "cp": "", "dp": "", "dp_type": "", "recompute": "", "framework_version": "",
    "precision": "bf16", "framework": "megatron-lm", "tok_s_gpu_best": 900,
}  # fmt: skip
TITAN = MEGATRON | {
    "model": "LLAMA3.1-8B", "framework": "torchtitan", "mbs": 1, "dp_type": "fsdp", "gpu": "A100-SXM-80GB",
    "tok_s_gpu_best": 3000,
}  # fmt: skip
LORA = MEGATRON | {"task": "lora", "framework": "NeMo", "num_gpus": 8, "gbs": 32, "tp": 2, "pp": 4, "mbs": 1}


def conditions(run: PublishedRun) -> RunConditions:
    assert run.conditions is not None, (run.notes, run.reason, run.reason_detail)
    return replace(run.conditions, fabric_hint="", network="")  # of which predictions tell


def _notes(*texts: str) -> list[Cells]:
    return [{"notes": text} for text in texts]


def _links(*texts: str) -> list[Cells]:
    return [{"interconnect": text} for text in texts]


SAME: dict[str, tuple[Cells, list[Cells]]] = {
    "degrees": (
        MEGATRON,
        [
            {"tp": 8, "pp": 4, "dp": 4, "mbs": 1},
            *_notes(
                "TP8 PP4 DP4 mbs 1", "tp=8,pp=4, dp=4, mbs=1", "TP/PP/DP = 8/4/4, micro batch size 1",
                "8-way TP, 4-way PP; micro-batch 1", "(TP, PP, DP) = (8, 4, 4), MBS 1", "tp8pp4dp4mbs1",
                "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --micro-batch-size 1",
                "8x4x4 (TP x PP x DP), mbs 1", "3D parallelism: 8 x 4 x 4 (TP x PP x DP), mbs 1",
                "TP 8, PP 4, GA 32", "TP8, PP4, num_microbatches=32", "TP8xPP4xDP4; MBS1",
            ),
        ],
    ),
    "shards and replicas": (
        TITAN | {"dp_type": ""},
        [
            {"dp_type": "HSDP 16x8"},
            {"dp_type": "HSDP"},
            *_notes(
                "HSDP 16x8", "HSDP (16, 8)", "dp_shard=8 dp_replicate=16", "FSDP 8 x DP 16", "FSDP8 DDP16",
                "FSDP=8, DDP=16", "data_parallel_replicate_degree=16, data_parallel_shard_degree=8",
            ),
        ],
    ),
    "sharded parameters": (
        TITAN | {"dp_type": ""},
        [
            *({"dp_type": text} for text in ("fsdp2", "ZeRO-3", "zero stage 3", "FULL_SHARD", "FSDP (128)")),
            *_notes("FSDP2", "fully sharded data parallel", "FSDP=128", "dp_shard=128"),
        ],
    ),
    "selective recomputation of torchtitan": (
        TITAN,
        [
            {"recompute": "selective (per-op SAC)"}, {"recompute": "selective"}, {"recompute": "selective AC"},
            *_notes("selective AC", "AC selective", "selective activation checkpointing", "SAC", "op-level SAC"),
        ],
    ),
    "every second layer": (
        TITAN,
        [
            {"recompute": "every 2 layers"},
            *_notes("AC every 2 layers", "selective AC, every 2 layers", "selective_ac_option=2"),
            {"notes": "AC of half of the layers"},
        ],
    ),
    "four ports": (
        TITAN,
        [
            *_links(
                "4x100 Gb/s RoCE", "RoCE, 4 NICs of 100 Gb/s", "400 Gb/s RoCE per node (4 NICs)", "four 100G RoCE NICs",
                "50 GB/s RoCE per node, 4 NICs", "RoCE v2, 4x100 GbE",
            ),
            *_notes("network: RoCE v2, 4x100 Gbit/s", "interconnect: 4x100G RoCE"),
            {"network": "4x100G RoCE", "interconnect": ""},
        ],
    ),
    "one port": (
        TITAN,
        _links(
            "1x200 Gb/s InfiniBand per node", "HDR, one port per node", "single HDR200 NIC",
            "InfiniBand 200 Gb/s, one HCA per node",             "1x HDR",
        ),
    ),
    "EFA": (
        TITAN | {"gpu": "H100-SXM-80GB"},
        [*_links("EFA", "AWS EFA", "EFA 3.2 Tbps"), {"notes": "p5.48xlarge"}, {"gpu": "H100 (p5.48xlarge)"}],
    ),
    "adapters on all linear layers": (
        LORA,
        _notes(
            "LoRA r=16 all linear layers", "lora_rank=16 lora_target=all", "LoRA rank 16 on all linear layers",
            "peft lora r 16 q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        ),
    ),
    "a quantised base": (
        LORA,
        _notes("QLoRA r=16 nf4 all linear", "QLoRA nf4, r=16 all linear", "LoRA r=16 all linear, load_in_4bit"),
    ),
}  # fmt: skip


def test_the_same_conditions_in_other_words_are_the_same_conditions(read_many: ReadMany) -> None:
    rows = [(name, base | {"interconnect": ""} | cells) for name, (base, many) in SAME.items() for cells in many]
    columns = {column: "" for _, cells in rows for column in cells}
    runs = read_many(*(columns | cells for _, cells in rows))
    first: dict[str, PublishedRun] = {}

    def check(case: tuple[str, PublishedRun]) -> None:
        name, run = case
        usual = first.setdefault(name, run)
        assert conditions(run) == conditions(usual), (name, run.notes)
        assert run.reason is None
        assert len({*predict([run, usual]).tokens_per_s_per_device}) == 1

    check_every([(name, run) for (name, _), run in zip(rows, runs, strict=True)], check)


@pytest.mark.parametrize(
    ("framework", "modules"),
    [("torchtitan", ("norm", "activation", "alternate_matmuls")), ("megatron-lm", ("core_attention",))],
)
def test_what_selective_means_is_of_the_framework(
    read_many: ReadMany, framework: str, modules: tuple[str, ...]
) -> None:
    (run,) = read_many(TITAN | {"framework": framework, "recompute": "selective"})
    assert conditions(run).plan.recompute_modules == modules


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"samples_per_s": 5}, "5 samples/s of 128 devices are 320 tokens/s per device, printed 900: the latter used"),
        ({"mem_gb_per_gpu": 200}, "200 GB of memory, more than h100 has: not used"),
    ],
)
def test_measures_that_contradict_each_other_or_the_device_are_said(
    read_many: ReadMany, cells: Cells, said: str
) -> None:
    (run,) = read_many(MEGATRON | {"tp": 8, "pp": 4, "mbs": 1} | cells)
    assert said in run.assumed
    assert run.memory_bytes is None


def test_a_rate_that_was_rounded_contradicts_nothing(read_many: ReadMany) -> None:
    (run,) = read_many(MEGATRON | {"tp": 8, "pp": 4, "mbs": 1, "samples_per_s": 13})  # 14.06 without its last digits
    assert not any("samples/s" in note for note in run.assumed)
