"""Layers whose attention and feed-forward read one input, beside layers in which the feed-forward follows."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import runfile
from meshwright.cost.elementwise import stream_accesses
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.layers import layer_parts
from meshwright.cost.memory import MemoryConstants, memory_constants
from meshwright.cost.memory.activations import layer_bytes
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.errors import InputError
from meshwright.kernels.traffic import ADDITION, RMS_NORM, USED_TWICE
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Attention, Model
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.precision import PRECISIONS

H = 1024
IN_TURN = Model(
    name="in-turn", hidden=H, num_layers=4, vocab=32000, ffn_hidden=4 * H, gated_ffn=False,
    attention=Attention(num_heads=16, num_kv_heads=16, head_dim=64),
)  # fmt: skip
ONE, TWO = (replace(IN_TURN, parallel_norms=num) for num in (1, 2))
ANY = memory_constants(Stack(framework="megatron-lm"))


UNSPLIT = Plan()


def kept(model: Model, plan: Plan = UNSPLIT, *, constants: MemoryConstants = ANY) -> float:
    """Bytes of one layer per token."""
    batch, precision = BatchTable(seq_len=1024, global_batch=1), precision_row(PRECISIONS["bf16"])
    return float(layer_bytes(model_row(model), batch, plan_row(plan), precision, constants, tokens=1).dense)


def test_one_norm_serves_both_blocks_and_flops_are_the_same():
    totals = [count_parameters(model_row(model)).total for model in (IN_TURN, TWO, ONE)]
    assert totals[0] == totals[1] == totals[2] + 4 * H
    assert len({float(model_flops_per_token(model_row(m), seq_len=1024)) for m in (IN_TURN, TWO, ONE)}) == 1


def test_a_bias_of_the_head_counts_beside_tied_embeddings_too():
    for tied in (False, True):
        biased, plain = (replace(IN_TURN, tied_embeddings=tied, head_bias=bias) for bias in (True, False))
        assert count_parameters(model_row(biased)).total - count_parameters(model_row(plain)).total == 32000


def test_norms_of_heads_have_biases_like_others():
    a = replace(IN_TURN.attention, qk_norm=True)
    models = [replace(IN_TURN, attention=a, norm_bias=bias) for bias in (True, False)]
    with_bias, without = (count_parameters(model_row(m)).total for m in models)
    assert with_bias - without == 4 * (2 * H + 2 * 64) + H


def test_a_layer_keeps_one_input_and_the_outputs_of_its_norms():
    """In bf16 two bytes each: the input of the second norm, and with one norm its output, are not there."""
    assert kept(IN_TURN) - kept(TWO) == 2 * H
    assert kept(IN_TURN) - kept(ONE) == 4 * H
    named = replace(ANY, keeps_named_only=1)
    block = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("mlp",))
    assert kept(TWO, block, constants=named) == kept(TWO, block)
    assert kept(IN_TURN, block) - kept(IN_TURN, block, constants=named) == 2 * H  # its second input is made again


def test_norms_that_are_recomputed_drop_their_outputs():
    again = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm",))
    dropped = [kept(model) - kept(model, again) for model in (IN_TURN, TWO, ONE)]
    assert dropped == [4 * H, 4 * H, 2 * H]


@pytest.mark.parametrize(("sequence_parallel", "expected"), [(True, (1 / 2, 3 / 4)), (False, (1 / 2, 3 / 4))])
def test_tensor_ranks_reduce_the_sum_of_both_blocks_once(case, sequence_parallel, expected):
    def seconds(model: Model):
        plan = Plan(tensor=8, sequence_parallel=sequence_parallel)
        built = case(model=model, cluster="h100-8x1", plan=plan, seq_len=4096, global_batch=8)
        return layer_parts(built.context, built.layer()).dense["tensor_parallel"]

    in_turn, one, two = (seconds(model) for model in (IN_TURN, ONE, TWO))
    assert [float(p.total_s / in_turn.total_s) for p in (one, two)] == pytest.approx(list(expected))
    if not sequence_parallel:
        assert float(one.forward_s / in_turn.forward_s) == float(two.forward_s / in_turn.forward_s) == 1 / 2


@pytest.mark.parametrize("num", [1, 2])
def test_accesses_of_the_residual_stream(num):
    forward, backward = stream_accesses(model_row(replace(IN_TURN, parallel_norms=num)))
    assert forward == num * RMS_NORM.forward + 2 * ADDITION.forward
    assert backward == num * (RMS_NORM.backward + USED_TWICE.backward)


def test_a_step_with_parallel_blocks_is_shorter(case):
    plan = Plan(tensor=8)
    seconds = [
        float(np.ravel(case(model=m, cluster="h100-8x1", plan=plan, seq_len=4096, global_batch=8).step_s)[0])
        for m in (IN_TURN, TWO, ONE)
    ]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(
    "other", ["num_mtp_layers=1", "norm_placement=both", "residual_streams=2", "experts={num_experts: 4, top_k: 2, "
              "ffn_hidden: 64, num_dense_layers: 1}"],
)  # fmt: skip
def test_what_has_no_formula_beside_it_is_refused(other):
    with pytest.raises(InputError, match="a model with parallel_norms has no"):
        runfile.load("llama3-8b", overrides=["model.parallel_norms=1", f"model.{other}"])
