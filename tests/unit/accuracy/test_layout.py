from collections.abc import Callable

import pytest
from tests.every_member import check_every

from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.rows import PublishedRun
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS
from meshwright.specs.plan import Offload, Plan, Recompute, Schedule, Sharding

ReadOne = Callable[..., PublishedRun]


@pytest.fixture
def plan_of(read_one: ReadOne) -> Callable[..., Plan]:
    def plan(**cells: object) -> Plan:
        run = read_one(**cells)
        assert run.conditions is not None, (run.reason, run.reason_detail)
        return run.conditions.plan

    return plan


def test_names_of_sharding(plan_of: Callable[..., Plan]) -> None:
    def check(dp_type: str, sharding: Sharding) -> None:
        assert plan_of(dp_type=dp_type).sharding is sharding

    check_every(
        [
            ("DDP", Sharding.NONE),
            ("DP", Sharding.NONE),
            ("ZeRO-0", Sharding.NONE),
            ("DDP+distopt (overlap-grad-reduce, overlap-param-gather)", Sharding.OPTIMIZER),
            ("ZeRO-1 (per paper)", Sharding.OPTIMIZER),
            ("ZeRO-2", Sharding.GRADIENTS),
            ("FSDP2 (ZeRO-2)", Sharding.GRADIENTS),
            ("FSDP2 (ZeRO-3) over dp*cp", Sharding.PARAMETERS),
            ("Megatron-FSDP", Sharding.PARAMETERS),
            ("HSDP 2 x 2", Sharding.PARAMETERS),
            ("ZeRO stage 3", Sharding.PARAMETERS),
            ("DeepSpeed stage-2", Sharding.GRADIENTS),
            ("zero_1", Sharding.OPTIMIZER),
            ("dist-opt", Sharding.OPTIMIZER),
            ("DeepSpeed 0.15", Sharding.OPTIMIZER),  # a version, no stage
            ("", Sharding.OPTIMIZER),
        ],
        lambda case: check(*case),
    )


def test_sharding_that_only_the_name_of_the_framework_says(plan_of: Callable[..., Plan]) -> None:
    named = "Axolotl (FSDP2)"
    assert plan_of(framework=named, dp_type="").sharding is Sharding.PARAMETERS
    assert plan_of(framework=named, dp_type="ZeRO-2").sharding is Sharding.GRADIENTS


@pytest.mark.parametrize(
    ("cells", "shard", "replicate"),
    [
        ({"dp_type": "FSDP"}, 64, 1),
        ({"dp_type": "FSDP 16 x DP 4 (HSDP)"}, 16, 4),
        ({"dp_type": "FSDP 32 (HSDP)"}, 32, 2),
        ({"dp_type": "FSDP: dcn_data 2 x dcn_fsdp 4 x ici_fsdp 8"}, 32, 2),
        ({"dp_type": "FSDP", "notes": "4 slice(s) of 16 chips"}, 16, 4),
        ({"dp_type": "FSDP", "notes": "ici_data_parallelism=2, opt_type=adamw"}, 32, 2),
        ({"dp_type": "FSDP 48 (HSDP)"}, 64, 1),
        ({"dp_type": "DDP", "notes": "4 slices"}, 64, 1),
        ({"dp_type": "", "framework": "fms-fsdp"}, 8, 8),
        ({"dp_type": "", "framework": "fms-fsdp", "notes": "FULL_SHARD"}, 64, 1),
    ],
)
def test_hybrid_sharding(plan_of: Callable[..., Plan], cells: dict[str, object], shard: int, replicate: int) -> None:
    plan = plan_of(num_gpus=64, cp=1, dp=64, **cells)
    assert (plan.data_shard, plan.data_replicate) == (shard, replicate)


def test_missing_degrees_follow_from_the_number_of_devices(read_one: ReadOne) -> None:
    run = read_one(num_gpus=64, tp=2, pp="", cp="", dp="", gbs=128)
    assert run.conditions
    assert run.conditions.plan.data == 32


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"dp": 8}, "data-parallel and context ranks are all devices"),
        ({"dp": "", "dp_type": "FSDP2"}, "fully sharded data parallelism"),
        ({"dp": "", "gbs": 8}, "the batch is micro-batch x data-parallel ranks"),
    ],
)
def test_rows_without_degrees_that_can_only_be_data_parallel(
    read_one: ReadOne, cells: dict[str, object], why: str
) -> None:
    run = read_one(**{"tp": "", "pp": "", "cp": ""} | cells)
    assert run.conditions
    assert run.conditions.plan.data == 8
    assert f"no tensor or pipeline parallelism: {why}" in run.assumed


def test_a_stated_context_degree_leaves_the_rest_to_data(read_one: ReadOne) -> None:
    run = read_one(tp="", pp="", cp=2, dp="", dp_type="FSDP", gbs=4, mbs="", grad_accum="")
    assert run.conditions
    assert (run.conditions.plan.context, run.conditions.plan.data) == (2, 4)
    assert read_one(tp="", pp="", cp=2, dp="", dp_type="FSDP", gbs=6, mbs="").conditions is None


@pytest.mark.parametrize(
    ("cells", "micro_batch", "global_batch"),
    [
        ({"mbs": "", "grad_accum": 16}, 2, 128),
        ({"mbs": "", "grad_accum": "", "seq_len": 256}, 32, 128),
        ({"mbs": "", "grad_accum": ""}, 1, 128),  # 32 do not fit
        ({"gbs": "", "grad_accum": 4}, 1, 16),
        ({"gbs": "", "gbs_tokens": 64 * 8192}, 1, 64),
        ({"gbs": "", "grad_accum": ""}, 1, 4),
        ({"mbs": "", "pp": 2, "dp": 2}, 1, 128),
    ],
)
def test_batch_from_what_is_stated(
    read_one: ReadOne, cells: dict[str, object], micro_batch: int, global_batch: int
) -> None:
    c = read_one(**cells).conditions
    assert c
    assert (c.plan.micro_batch, c.global_batch) == (micro_batch, global_batch)


def test_micro_batch_per_device_is_scaled_to_the_replica(read_one: ReadOne) -> None:
    c = read_one(framework="MaxText", dp_type="FSDP", tp=2, cp=1, dp=4, mbs=2, gbs=16).conditions
    assert c
    assert c.plan.micro_batch == 4


def test_a_pipelined_row_without_any_batch_is_not_guessed(read_one: ReadOne) -> None:
    assert read_one(gbs="", pp=2, dp=2).reason is Reason.NO_BATCH


@pytest.mark.parametrize(
    ("cells", "schedule"),
    [
        ({"vpp": 4}, Schedule.INTERLEAVED),
        ({"vpp": ""}, Schedule.ONE_F_ONE_B),
        ({"notes": "Interleaved 1F1B; local batch 32"}, Schedule.INTERLEAVED),
        ({"notes": "zero bubble schedule"}, Schedule.ZERO_BUBBLE),
        ({"notes": "DualPipe"}, Schedule.DUALPIPE),
        ({"notes": "DualPipeV"}, Schedule.DUALPIPE_V),
        ({"schedule": "ZBV"}, Schedule.ZBV),
        ({"pp": 1, "dp": 4, "vpp": 4}, Schedule.ONE_F_ONE_B),
    ],
)
def test_schedule(plan_of: Callable[..., Plan], cells: dict[str, object], schedule: Schedule) -> None:
    plan = plan_of(**{"pp": 2, "dp": 2} | cells)
    assert plan.schedule is schedule
    stated = SCHEDULE_RECORDS[schedule].min_chunks
    assert plan.virtual_pipeline == (cells.get("vpp") or stated if plan.pipeline > 1 else 1)


RECOMPUTED = [
    ("", Recompute.NONE, (), None),
    ("none (perf preset)", Recompute.NONE, (), None),
    ("full (use_checkpoint=true in matching config)", Recompute.FULL, (), None),
    ("full layers=5", Recompute.FULL, (), 5),
    ("recompute_num_layers=2 (2 layers on every stage)", Recompute.FULL, (), 2),
    ("recompute_layer_ids [0-9]", Recompute.FULL, (), 5),
    ("selective layer", Recompute.FULL, (), 8),
    *((no, Recompute.NONE, (), None) for no in ("off", "No", "false", "0", "disabled", "-", "n/a")),
    *((yes, Recompute.FULL, (), None) for yes in ("yes", "True", "on", "1", "every layer", "uniform/1")),
    ("activation checkpointing", Recompute.FULL, (), None),
    ("block, 4 layers", Recompute.FULL, (), 4),
    ("selective activation checkpointing", Recompute.SELECTIVE, ("core_attention",), None),
    ("selective", Recompute.SELECTIVE, ("core_attention",), None),
    ("selective(core_attn)", Recompute.SELECTIVE, ("core_attention",), None),
    ("selective modules=['layernorm', 'moe_act']", Recompute.SELECTIVE, ("norm", "activation"), None),
    ("selective modules=['mla_up_proj']", Recompute.SELECTIVE, ("mla_up_projection",), None),
    ("selective [layernorm, moe]", Recompute.SELECTIVE, ("norm", "moe"), None),
    ("selective [norm, act, shared_expert]", Recompute.SELECTIVE,
     ("norm", "activation", "shared_experts"), None),
    ("save_dot_with_context_except_mlp", Recompute.SELECTIVE,
     ("norm", "activation", "mlp", "moe"), None),
]  # fmt: skip


def test_names_of_recomputation(plan_of: Callable[..., Plan]) -> None:
    def check(text: str, kind: Recompute, modules: tuple[str, ...], layers: int | None) -> None:
        plan = plan_of(recompute=text, pp=2, dp=2, layers=32)
        assert (plan.recompute, plan.recompute_modules, plan.recompute_layers) == (kind, modules, layers)

    check_every(RECOMPUTED, lambda case: check(*case))


@pytest.mark.parametrize(
    ("hardware", "kind", "layers"), [(50, Recompute.NONE, None), (55, Recompute.FULL, 10), (68, Recompute.FULL, None)]
)
def test_layers_that_hardware_flops_count_twice(
    plan_of: Callable[..., Plan], hardware: float, kind: Recompute, layers: int | None
) -> None:
    cells = {"recompute": "selective (fraction of blocks, not stated)", "mfu_pct": 50, "layers": 32}
    plan = plan_of(**cells, hfu_pct=hardware)
    assert (plan.recompute, plan.recompute_layers) == (kind, layers)
    assert plan_of(**cells).recompute is Recompute.SELECTIVE


def test_sequence_parallelism_as_stated_or_as_the_framework_of_the_time(plan_of: Callable[..., Plan]) -> None:
    tensor = {"tp": 2, "cp": 1}
    assert plan_of(**tensor, seq_parallel="yes (default)").sequence_parallel
    assert all(plan_of(**tensor, seq_parallel=yes).sequence_parallel for yes in ("on", "Enabled", "n/a"))
    assert not any(plan_of(**tensor, seq_parallel=no).sequence_parallel for no in ("no", "off", "False"))
    assert plan_of(**tensor).sequence_parallel
    old = {"framework": "Megatron-LM", "framework_version": "2021-04"}
    assert not plan_of(**tensor, **old).sequence_parallel


def test_experts_need_ranks_and_divisibility(read_one: ReadOne) -> None:
    moe = {"model": "Mixtral-8x7B", "cp": 1, "dp": 8}
    fits = read_one(**moe, ep=8).conditions
    assert fits
    assert (fits.plan.expert, fits.plan.expert_tensor) == (8, 1)
    assert read_one(**moe, ep=16).reason is Reason.INCONSISTENT
    missing = read_one(**moe)
    assert missing.conditions
    assert missing.conditions.plan.expert == 1
    assert "no expert parallelism" in missing.assumed


@pytest.mark.parametrize(
    ("notes", "modules"),
    [
        ("remat_policy=custom, decoder_layer_input=offload", None),
        ("query_proj=offload, key_proj=offload, out_proj=offload", {"norm", "activation", "core_attention", "mlp"}),
        ("context=device, query_proj=device, mlpwo=device", {"norm", "activation", "mlp"}),
        ("context=device, qkv_proj=device, mlpwi_0=device, mlpwi_1=device", {"norm", "activation"}),
        ("query_proj=remat, context=remat", None),
    ],
)
def test_tensors_that_maxtext_keeps(plan_of: Callable[..., Plan], notes: str, modules: set[str] | None) -> None:
    plan = plan_of(framework="MaxText", recompute="custom", notes=notes)
    if modules is None:
        assert plan.recompute is Recompute.FULL
    else:
        assert set(plan.recompute_modules) - {"moe"} == modules


def test_custom_recomputation_is_that_of_the_recipe(plan_of: Callable[..., Plan]) -> None:
    shape = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "framework_version"), "")
    cells = shape | {"model": "Llama3.1-70B", "gpu": "TPU7x", "framework": "MaxText", "recompute": "custom"}
    source = "github:AI-Hypercomputer/tpu-recipes training/ironwood/README.md"
    read = plan_of(**cells, source=source, date="2026-03-01")
    assert set(read.recompute_modules) == {"norm", "activation", "mlp"}
    assert plan_of(**cells, source="elsewhere", date="2026-03-01").recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("cells", "tensor", "context"),
    [
        ({"cp": 8}, 1, 4),
        ({"tp": 2, "cp": 4}, 1, 4),
        ({"tp": 4, "cp": 1}, 2, 1),
        ({"tp": 1, "cp": 3}, 1, 3),
        ({"tp": 1, "cp": 1}, 1, 1),
    ],
)
def test_degrees_in_cores_become_degrees_in_chips(
    plan_of: Callable[..., Plan], cells: dict[str, object], tensor: int, context: int
) -> None:
    notes = "per chip (1 chip = 2 TensorCores / JAX devices); synthetic data"
    plan = plan_of(**{"tp": 1, "pp": 1, "num_gpus": 48, "gpus_per_node": 4, "dp": "", "gbs": 48} | cells, notes=notes)
    assert (plan.tensor, plan.context) == (tensor, context)


@pytest.mark.parametrize(("date", "micro_batch"), [("2024-12-30", 4), ("2026-03-29", 1)])
def test_micro_batches_of_torchtitans_pipelines(plan_of: Callable[..., Plan], date: str, micro_batch: int) -> None:
    cells = {
        "framework": "torchtitan",
        "framework_version": "",
        "tp": 1,
        "pp": 4,
        "cp": 1,
        "dp": 2,
        "mbs": "",
        "grad_accum": "",
        "gbs": 32,
    }
    assert plan_of(**cells, date=date).micro_batch == micro_batch


def test_a_batch_per_device_is_one_micro_batch(plan_of: Callable[..., Plan]) -> None:
    cells = {"mbs": "", "grad_accum": "", "gbs": 128, "seq_len": 8192}
    assert plan_of(**cells).micro_batch == 1  # the whole batch of a replica does not fit
    assert plan_of(**cells, notes="per_device_batch_size=32").micro_batch == 128 // plan_of(**cells).data


@pytest.mark.parametrize(
    ("stated", "sharding"),
    [
        ("FULL_SHARD", Sharding.PARAMETERS),
        ("HYBRID_SHARD", Sharding.PARAMETERS),
        ("3", Sharding.PARAMETERS),
        ("SHARD_GRAD_OP", Sharding.GRADIENTS),
        ("2", Sharding.GRADIENTS),
        ("1", Sharding.OPTIMIZER),
        ("NO_SHARD", Sharding.NONE),
    ],
)
def test_sharding_in_the_words_of_pytorch_and_deepspeed(read_one, stated, sharding):
    run = read_one(dp_type=stated)
    assert run.conditions.plan.sharding is sharding


def test_a_sharding_that_is_not_understood_is_noted(read_one):
    assert "dp_type 'half sharded' is not understood" in read_one(dp_type="half sharded").assumed


@pytest.mark.parametrize("note", ["without CPU offload", "no CPU offload", "CPU offload: none", "never offloaded"])
def test_what_a_row_denies_to_offload_is_not_offloaded(read_one, note):
    run = read_one(framework="torchtitan", notes=note)
    assert run.conditions.plan.offload is Offload.NONE
    assert not any("offload" in line for line in (*run.assumed, *run.unread))
    assert read_one(framework="torchtitan", notes="CPU offload").conditions.plan.offload is Offload.OPTIMIZER
