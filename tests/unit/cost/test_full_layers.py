"""Layers without a window whose heads are of another shape: the mean layer is the mean of two models' layers."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.flops import attention_core_flops_per_token, count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.inference.memory import served
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import request_for
from meshwright.runfile import from_options
from meshwright.specs.model import Attention, FullLayers, Lora, Model
from meshwright.specs.plan import Plan

WINDOWED = Model(
    name="windowed", hidden=512, num_layers=6, vocab=1000, ffn_hidden=1024,
    attention=Attention(num_heads=8, num_kv_heads=4, head_dim=64, qk_norm=True, window=256, num_windowed_layers=6),
)  # fmt: skip
FULL = replace(WINDOWED, attention=Attention(num_heads=8, num_kv_heads=2, head_dim=128, qk_norm=True))
BOTH = replace(
    WINDOWED,
    attention=replace(
        WINDOWED.attention, num_windowed_layers=0, window_pattern=(True, False),
        full_layers=FullLayers(head_dim=128, num_kv_heads=2),
    ),
)  # fmt: skip
LORA = Lora(targets=("query", "key", "value", "output", "up"))


@pytest.mark.parametrize(
    "count",
    [
        lambda row: count_parameters(row).total,
        lambda row: count_parameters(row).active,
        lambda row: count_parameters(row).lora_layer,
        lambda row: attention_core_flops_per_token(row, seq_len=2048),
    ],
)
def test_counts_are_the_mean_of_both_kinds(count):
    windowed, full, both = (float(count(model_row(m, lora=LORA))) for m in (WINDOWED, FULL, BOTH))
    assert both == pytest.approx((windowed + full) / 2)
    assert min(windowed, full) < both < max(windowed, full)


def test_one_projection_of_keys_and_values_is_counted_once():
    full = replace(BOTH.attention.full_layers, shares_values=True)
    shared = replace(BOTH, attention=replace(BOTH.attention, full_layers=full))
    saved = [count_parameters(model_row(m)).total for m in (BOTH, shared)]
    assert saved[0] - saved[1] == pytest.approx(3 * 512 * 2 * 128)  # of three full layers


def test_steps_lie_between_those_of_both_kinds(case):
    plan, seconds = Plan(data_shard=8), []
    for model in (WINDOWED, FULL, BOTH):
        built = case(model=model, cluster="h100-8x1", plan=plan, seq_len=8192, global_batch=64)
        seconds.append(float(np.ravel(built.step_s)[0]))
    assert seconds[0] < seconds[2] < seconds[1]


def test_tensor_ranks_split_the_heads_of_both_kinds():
    run = from_options(model="llama3-8b", cluster="h100-8x8", global_batch=512, sequence_length=8192)
    for num_kv_heads, legal in ((2, False), (4, True)):
        full = FullLayers(head_dim=128, num_kv_heads=num_kv_heads)
        model = replace(BOTH, attention=replace(BOTH.attention, full_layers=full))
        context = legality_context(request_for(replace(run, model=model)))
        broken = {v.rule: v.message for v in violations(Plan(tensor=4, data_shard=16), context=context)}
        assert ("kv heads" not in broken) == legal
        assert legal or broken["kv heads"] == "tensor 4 does not divide 2 key/value heads"


def test_serving_is_refused():
    with pytest.raises(InputError, match="full layers of another shape"):
        served(BOTH)
