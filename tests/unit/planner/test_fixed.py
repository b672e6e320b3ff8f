from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.every_member import check_every

from meshwright.errors import InputError, UnknownNameError
from meshwright.planner.fixed import fixed_fields
from meshwright.specs.plan import (
    ALL_TOKENS,
    RECOMPUTE_MODULES,
    WEIGHT_CACHES,
    AxisOrder,
    Offload,
    Plan,
    Recompute,
    Schedule,
    Sharding,
)


def test_every_kind_of_value():
    words = ["tensor=8,pipeline=1_6", "sequence_parallel=false", "offload=optimizer", "recompute=full"]
    assert fixed_fields(words) == {
        "tensor": 8,
        "pipeline": 16,
        "sequence_parallel": False,
        "offload": Offload.OPTIMIZER,
        "recompute": Recompute.FULL,
    }


def test_a_list_goes_on_after_a_comma():
    found = fixed_fields(["recompute_modules=norm,mlp,sharding=gradients"])
    assert found == {"recompute_modules": ("norm", "mlp"), "sharding": Sharding.GRADIENTS}


@pytest.mark.parametrize(
    ("word", "modules"),
    [("norm,feed_forward", ("feed_forward", "norm")), ("feed_forward+norm", ("feed_forward", "norm")), ("none", ())],
)
def test_stored_activations(word, modules):
    assert fixed_fields([f"stored_activations={word},weight_cache=OFF"]) == {
        "stored_activations": modules,
        "weight_cache": "off",
    }


def test_what_cannot_be_fixed():
    def check(word, error, message):
        with pytest.raises(error, match=message) as caught:
            fixed_fields([word])
        assert type(caught.value) is error

    check_every(
        [
            ("stored_activations=mlp", UnknownNameError, "feed_forward, none, norm"),
            ("stored_activations=", UnknownNameError, "module with stored activations"),
            ("weight_cache=auto", InputError, "on, off"),
            ("tensor", InputError, "not an assignment"),
            ("tensr=8", UnknownNameError, "did you mean 'tensor'"),
            ("tensor=0", InputError, "whole number, 1 or more"),
            ("tensor=-2", InputError, "whole number"),
            ("tensor=²", InputError, "whole number"),
            ("tensor=", InputError, "whole number"),
            ("schedule=1f2b", InputError, "1f1b"),
            ("sharding=4", InputError, "none, optimizer, gradients, parameters"),
            ("sharding=hybrid_shard", InputError, "data_replicate=N"),
            ("sequence_parallel=maybe", InputError, "true, false"),
            ("cpu_offload=true", InputError, "weights and gradients in host memory are not planned"),
            ("gradient_accumulation_steps=8", UnknownNameError, "hold micro_batch and data_shard"),
            ("num-layers-per-virtual-pipeline-stage=2", UnknownNameError, "virtual_pipeline counts"),
            ("ulysses=2", UnknownNameError, "all-to-all over heads is not costed"),
            ("gpus=7", UnknownNameError, "the key is 'cluster'"),
            ("axis_order=dp-tp-pp", InputError, "tp-cp-dp-pp, tp-cp-pp-dp"),
            ("recompute_modules=norms", UnknownNameError, "did you mean 'norm'"),
            ("layers_per_stage=4,x", InputError, "7,8x14,7"),
            ("layers_per_stage=4,-1", InputError, "7,8x14,7"),
            ("layers_per_stage=8x99999999", InputError, "7,8x14,7"),
        ],
        lambda case: check(*case),
    )


def test_a_field_is_fixed_once():
    assert fixed_fields(["tp=8", "tensor=8"]) == {"tensor": 8}
    with pytest.raises(InputError, match="tensor is given twice"):
        fixed_fields(["tp=8,tensor=4"])


def test_what_the_field_calls_the_data_width():
    assert fixed_fields(["dp=4"]) == fixed_fields(["data_shard=4"])


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["TP8PP4EP8"], {"tensor": 8, "pipeline": 4, "expert": 8}),
        (["tp8_pp4-cp2"], {"tensor": 8, "pipeline": 4, "context": 2}),
        (["TP8 x PP4"], None),
        (["PP16,EP64,schedule=dualpipe"], {"pipeline": 16, "expert": 64, "schedule": Schedule.DUALPIPE}),
        (["tensor = 8 , pipeline = 4"], {"tensor": 8, "pipeline": 4}),
        (["recompute_modules=norm, mlp"], {"recompute_modules": ("norm", "mlp")}),
        (["recompute_modules=none"], {"recompute_modules": ()}),
        (["DP8 zero3"], {"data_shard": 8, "sharding": Sharding.PARAMETERS}),
        (["FSDP4 DP2"], {"data_shard": 4, "data_replicate": 2, "sharding": Sharding.PARAMETERS}),
        (["TP8 tensor=4"], None),
        (["TP8 TQ2"], None),
        ([""], None),
    ],
)
def test_plans_in_the_words_of_papers(words, fields):
    if fields is None:
        with pytest.raises(InputError):
            fixed_fields(words)
    else:
        assert fixed_fields(words) == fields


def test_names_and_values_in_the_words_of_other_tools():
    def check(words, ours):
        assert fixed_fields([words]) == fixed_fields([ours])

    check_every(
        [
            ("tensor_model_parallel_size=8,pipeline-model-parallel-size=4", "tensor=8,pipeline=4"),
            ("micro_batch_size=2,CONTEXT_PARALLEL_SIZE=2", "mbs=2,cp=2"),
            ("zero_stage=3", "sharding=parameters"),
            ("sharding_strategy=SHARD_GRAD_OP", "sharding=gradients"),
            ("sharding=ZeRO-1", "sharding=optimizer"),
            ("fsdp=4", "data_shard=4,sharding=parameters"),
            ("schedule=ZB-H1", "schedule=zero_bubble"),
            ("pipeline_parallel_schedule=ScheduleZBVZeroBubble", "schedule=zbv"),
            ("schedule=Interleaved1F1B", "schedule=interleaved"),
            ("schedule=DualPipe-V", "schedule=dualpipev"),
            ("gradient_checkpointing=true", "recompute=full,recompute_layers=all"),
            ("recompute_layers=all", "recompute=full,recompute_layers=all"),
            ("activation_checkpointing=off", "recompute=none"),
            ("recompute_granularity=full", "recompute=full"),
            ("recompute_modules=core_attn,moe_act", "recompute_modules=core_attention,activation"),
            ("order=tp-cp-ep-dp-pp", "axis_order=tp-cp-dp-pp"),
            ("sp=yes", "sequence_parallel=true"),
        ],
        lambda case: check(*case),
    )


DEGREES = st.sampled_from((1, 2, 3, 8, 64))
PLANS = st.builds(
    Plan,
    tensor=DEGREES,
    context=DEGREES,
    pipeline=DEGREES,
    virtual_pipeline=DEGREES,
    expert=DEGREES,
    expert_tensor=DEGREES,
    data_shard=DEGREES,
    sharding=st.sampled_from(Sharding),
    micro_batch=DEGREES,
    schedule=st.sampled_from(Schedule),
    recompute_layers=st.none() | st.just(8),
    layers_per_stage=st.none() | st.just((7, 8, 8, 6)),
    offload=st.sampled_from(Offload),
    axis_order=st.sampled_from(AxisOrder),
    stored_activations=st.none() | st.just(("feed_forward", "norm")),
    weight_cache=st.none() | st.sampled_from(WEIGHT_CACHES),
    loss_chunk=st.none() | st.just(ALL_TOKENS) | st.just(512),
) | st.builds(
    Plan,
    data_shard=DEGREES,
    data_replicate=DEGREES,
    sharding=st.just(Sharding.PARAMETERS),
    recompute=st.just(Recompute.SELECTIVE),
    recompute_modules=st.lists(st.sampled_from(RECOMPUTE_MODULES), min_size=1, unique=True).map(tuple),
) | st.builds(Plan, recompute=st.just(Recompute.FULL), recompute_layers=st.none() | st.just(8))  # fmt: skip


@given(plan=PLANS)
def test_a_plan_is_read_as_it_is_printed(plan):
    read = replace(Plan(), **fixed_fields([plan.describe()]))
    assert read.describe() == plan.describe()
