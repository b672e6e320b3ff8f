"""Options of forks and of earlier releases are read as those of Megatron-LM that stand for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.engines.megatron.test_forks import script
from tests.unit.engines.megatron.test_importing import imported

from meshwright.engines.base import find_engine
from meshwright.engines.megatron.check import check_export
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.megatron_lm.dialects import translated
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.megatron.unestimated import forks
from meshwright.errors import InputError
from meshwright.specs.features import AttentionKernel
from meshwright.specs.model import Activation
from meshwright.specs.plan import Offload, Recompute, Sharding

DEEPSPEED = "--deepspeed --deepspeed_config ds.json"


def test_every_meaning_has_options_of_megatron():
    meanings = [text for fork in forks() for text in fork.get("means", {}).values()]
    named = {word.removeprefix("--") for text in meanings for word in text.split() if word.startswith("--")}
    assert len(meanings) > 40
    assert named <= known_names(later=True).keys()


def test_options_of_earlier_releases(tmp_path):
    run, notes = imported(script(tmp_path, "--DDP-impl local --data-impl mmap --checkpoint-activations"))
    assert run.plan.recompute is Recompute.FULL
    assert "checkpoint-activations" not in notes
    call = "--activations-checkpoint-method block --activations-checkpoint-num-layers 2"
    assert imported(script(tmp_path, call))[0].plan.recompute_layers == 2
    with pytest.raises(InputError, match="--DDP-impl has a value that is not read: got 'torch', allowed: local"):
        imported(script(tmp_path, "--DDP-impl torch"))
    with pytest.raises(InputError, match="--DDP-impl cannot be expanded, it is not set"):
        imported(script(tmp_path, "--DDP-impl $IMPLEMENTATION"))


@pytest.mark.parametrize(
    ("stage", "sharding"),
    [
        ("0", Sharding.OPTIMIZER), ("1", Sharding.OPTIMIZER), ("2", Sharding.GRADIENTS), ("3", Sharding.PARAMETERS),
    ],
)  # fmt: skip
def test_the_stage_of_zero(stage, sharding, tmp_path):
    run, notes = imported(script(tmp_path, f"{DEEPSPEED} --zero-stage {stage}"))
    assert run.plan.sharding is sharding
    assert f"ds.json of DeepSpeed is not here: --zero-stage {stage} is taken" in notes


def test_settings_of_deepspeed_that_a_script_writes_decide(tmp_path):
    document = """ZERO=2
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": $ZERO%s}}
EOT"""
    run, notes = imported(script(tmp_path, f"{DEEPSPEED} --zero-stage 1", before=document % ""))
    assert run.plan.sharding is Sharding.GRADIENTS
    assert "--zero-stage 1 has no effect: DeepSpeed's settings say 2" in notes
    offloaded = document % ', "offload_optimizer": {"device": "cpu"}'
    assert imported(script(tmp_path, DEEPSPEED, before=offloaded))[0].plan.offload is Offload.OPTIMIZER
    with pytest.raises(InputError, match="weights that DeepSpeed offloads"):
        imported(script(tmp_path, DEEPSPEED, before=document % ', "offload_param": {"device": "nvme"}'))
    with pytest.raises(InputError, match=r"the stage of ZeRO is in ds\.json, which is not here") as caught:
        imported(script(tmp_path, DEEPSPEED))
    assert "--zero-stage 1" in caught.value.hint
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    assert imported(script(tmp_path, DEEPSPEED))[0].plan.sharding is Sharding.OPTIMIZER


def test_options_of_megatron_deepspeed(tmp_path):
    call = f"{DEEPSPEED} --zero-stage 0 --num-experts 1 --num-key-value-heads 2 --ds-sequence-parallel-size 2"
    run, notes = imported(script(tmp_path, f"{call} --train-tokens 10240 --lr-warmup-tokens 2048"))
    assert (run.model.attention.num_kv_heads, run.plan.context, run.model.experts) == (2, 2, None)
    tokens = run.global_batch * run.sequence_length
    assert (run.train.steps, run.optimizer.warmup_steps) == (min(10, 10240 // tokens), 2048 // tokens)
    assert "--cp-comm-type a2a" in notes
    for mixture in ("--num-experts 64", "--num-experts 2 4"):
        with pytest.raises(InputError, match="--num-experts has a value that is not read"):
            imported(script(tmp_path, f"{call} {mixture}"))
    assert imported(script(tmp_path, "--num-experts 4 --moe-router-topk 2"))[0].model.experts.num_experts == 4


def test_a_norm_in_the_words_of_megatron_deepspeed(tmp_path):
    for name, has_bias in (("layernorm", True), ("rmsnorm", False)):
        run, _ = imported(script(tmp_path, f"{DEEPSPEED} --zero-stage 1 --normalization {name}"))
        assert run.model.norm_bias is has_bias


def test_heads_and_vocabularies_of_bigcode(tmp_path):
    call = "--attention-head-type multiquery --pad-vocab-size-to 512 --tokenizer-type TokenizerFromFile"
    run, _ = imported(script(tmp_path, call))
    assert run.model.attention.num_kv_heads == 1
    with pytest.raises(InputError, match="--attention-head-type has a value that is not read: got 'multi'"):
        imported(script(tmp_path, "--attention-head-type multi"))


def test_options_with_underscores_and_with_an_equals_sign():
    words = [Word(text=text, line=1) for text in ("--min_lr=64", "--seq_length", "32", "--wholly_unknown", "1")]
    found, _ = translated(words, path=Path("x.sh"))
    assert [word.text for word in found] == ["--min-lr=64", "--seq-length", "32", "--wholly_unknown", "1"]


def test_layers_of_megatron_llm_have_no_biases_unless_asked(tmp_path):
    path = tmp_path / "megatron_lm.args"
    lines = ["num_layers 4", "hidden_size 64", "num_attention_heads 4", "seq_length 32", "max_position_embeddings 32",
             "micro_batch_size 1", "lr 1e-3", "vocab_size 512", "use_rms_norm", "num_attention_heads_kv 2",
             "position_embedding_type rotary", "data_impl mmap", "activations_checkpoint_method uniform"]  # fmt: skip
    for more, has_biases in ([], False), (["use_bias"], True):
        path.write_text("\n".join(f"--{line}" for line in [*lines, *more]), encoding="utf-8")
        model = imported(str(path))[0].model
        assert (model.attention.bias, model.norm_bias, model.attention.num_kv_heads) == (has_biases, False, 2)


MINDSPEED = "--use-fused-rmsnorm --handler-name x --tokenizer-name-or-path $T"


def test_layers_of_mindspeed_that_do_nothing(tmp_path):
    before = 'T="your tokenizer path"'
    call = f"{MINDSPEED} --num-layers 8 --noop-layers 6,7 --pipeline-model-parallel-size 2 --vocab-size 512"
    run, notes = imported(script(tmp_path, call, before=before))
    assert (run.model.num_layers, run.plan.layers_per_stage) == (6, (4, 2))
    assert "handler" not in notes
    listed = call.replace("--noop-layers 6,7", "--num-layer-list 3,5")
    assert imported(script(tmp_path, listed, before=before))[0].plan.layers_per_stage == (3, 5)
    for wrong in ("--noop-layers 8", "--noop-layers x", "--num-layer-list 3,6", "--num-layer-list 8"):
        with pytest.raises(InputError, match=f"{wrong.split()[0]} does not"):
            imported(script(tmp_path, call.replace("--noop-layers 6,7", wrong), before=before))


def test_mixtures_of_mindspeed(tmp_path):
    call = (
        f"{MINDSPEED} --num-layers 4 --num-experts 8 --moe-router-topk 2 --moe-intermediate-size 32 "
        "--moe-layer-freq -1 --moe-router-load-balancing-type softmax_topk --n-shared-experts 2 --vocab-size 512"
    )
    experts = imported(script(tmp_path, f"{call} --first-k-dense-replace 1 --norm-topk-prob"))[0].model.experts
    assert (experts.num_dense_layers, experts.num_shared, experts.ffn_hidden) == (1, 2, 32)
    assert experts.normalize_top_k
    experts = imported(script(tmp_path, f"{call} --first-k-dense-replace -1"))[0].model.experts
    assert (experts.num_dense_layers, experts.normalize_top_k) == (0, False)
    with pytest.raises(InputError, match="--moe-router-load-balancing-type has a value that is not read"):
        imported(script(tmp_path, call.replace("softmax_topk", "group_limited_greedy")))
    with pytest.raises(InputError, match="--spec names a description of the run"):
        imported(script(tmp_path, f"{call} --spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec"))
    run, _ = imported(script(tmp_path, f"{call} --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec"))
    assert run.model.experts is not None


def test_scaled_positions_of_mindspeed(tmp_path):
    llama = "--rope-scaling-type llama3 --rope-scaling-factor 8.0 --low-freq-factor 1.0 --high-freq-factor 4.0"
    run, _ = imported(script(tmp_path, f"{MINDSPEED} {llama} --original-max-position-embeddings 8192 --vocab-size 512"))
    assert (run.model.rope.factor, run.model.rope.original_context) == (8, 8192)
    with pytest.raises(InputError, match="positions that run files cannot express: got 'rope, yarn'"):
        imported(script(tmp_path, f"{MINDSPEED} --rope-scaling-type yarn --rope-scaling-factor 4 --vocab-size 512"))


def test_variables_that_nothing_sets_are_left_out_as_the_shell_does(tmp_path):
    run, notes = imported(script(tmp_path, "--bf16 $MOE_ARGS ${MORE[@]} --seed 3"))
    assert (run.train.seed, "$MOE_ARGS is not set and is left out" in notes) == (3, True)
    for before in ("[ $1 = x ] && MORE=--swiglu", "if [ $1 = x ]; then\n  MORE+=(--swiglu)\nfi", "read -r MORE"):
        with pytest.raises(InputError, match=r"cannot be expanded|MORE"):
            imported(script(tmp_path, "--bf16 $MORE --seed 3", before=before))
    with pytest.raises(InputError, match="cannot be expanded, it is not set"):
        imported(script(tmp_path, "--bf16 $MORE", before="source absent.sh"))


def test_a_program_in_a_folder_that_is_the_output_of_commands(tmp_path):
    call = script(tmp_path, "--seed 4", before="base=$(cd `dirname $0`; cd ../../; pwd)")
    path = Path(call)
    path.write_text(path.read_text().replace("python pretrain_gpt.py", "torchrun $base/pretrain_gpt.py"))
    assert imported(call)[0].train.seed == 4


def test_another_program_is_one_reason(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("torchrun train.py --hidden_width 64 --num_heads 4 --dataset c4 --model_type x --train_on 1")
    with pytest.raises(InputError, match="calls a program with other options than Megatron-LM: got '--hidden_width"):
        imported(str(path))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--position-embedding-type alibi", ("ALiBi",)),
        ("--position-embedding-type alibi --embed-layernorm", ("a norm after the embedding", "ALiBi")),
        ("--position-embedding-type rope --rotary-interleaved", ("rotations of neighbouring dimensions",)),
        ("--position-embedding-type none --swiglu", ("attention without positions",)),
    ],
)
def test_parts_that_cost_nothing_are_estimated_and_not_trained(options, parts, tmp_path):
    run, _ = imported(script(tmp_path, options))
    plain, _ = imported(script(tmp_path, "--position-embedding-type rope " + "--swiglu" * ("swiglu" in options)))
    assert (run.model.unsupported, run.model.learned_positions) == (parts, 0)
    assert replace(run.model, unsupported=(), rope=plain.model.rope) == plain.model
    checks = [find_engine(engine).check for engine in ("native", "megatron", "torchtitan", "maxtext")]
    for check in (*checks, check_export):
        assert f"no engine computes parts of train: {'; '.join(parts)}" in [problem.reason for problem in check(run)]


def test_deepspeed_shards_the_states_of_bf16_in_stage_0(tmp_path):
    document = """cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
EOT"""
    for call, before in ((f"{DEEPSPEED} --zero-stage 0", ""), (DEEPSPEED, document)):
        run, notes = imported(script(tmp_path, call, before=before))
        assert run.plan.sharding is Sharding.OPTIMIZER
        assert "stage 0 of ZeRO in bf16: DeepSpeed shards the optimizer states" in notes
        path = Path(script(tmp_path, call, before=before))
        path.write_text(path.read_text(encoding="utf-8").replace("--bf16", "--fp16"), encoding="utf-8")
        assert imported(str(path))[0].plan.sharding is Sharding.NONE


def test_attention_of_megatron_deepspeed_is_unfused_without_an_option(tmp_path):
    call = f"{DEEPSPEED} --zero-stage 1"
    assert imported(script(tmp_path, call))[0].stack.features.attention is AttentionKernel.UNFUSED
    for option in ("--use-flash-attn", "--use-flash-attn-v2", "--use-flash-attn-builder"):
        run, notes = imported(script(tmp_path, f"{call} {option}"))
        assert run.stack.features.attention is AttentionKernel.FA3
        assert "--use-flash-attn has no effect" not in notes


def test_gated_blocks_of_bigscience(tmp_path):
    run, _ = imported(script(tmp_path, "--glu-activation swiglu --no-bias-gelu-fusion"))
    assert (run.model.gated_ffn, run.model.ffn_hidden) == (True, 4 * run.model.hidden)
    assert run.model.activation is Activation.SILU
    run, _ = imported(script(tmp_path, "--glu-activation swiglu --ffn-hidden-size 688"))
    assert (run.model.gated_ffn, run.model.ffn_hidden) == (True, 688)
    with pytest.raises(InputError, match="--glu-activation has a value that is not read: got 'geglu', allowed: swiglu"):
        imported(script(tmp_path, "--glu-activation geglu"))
