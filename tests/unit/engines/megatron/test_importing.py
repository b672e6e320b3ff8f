"""Arguments of Megatron-LM as run files: our exports, those that it publishes, and what is noted or refused."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_core.constructors import recomputed_per_chunk, recomputed_per_rank
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.megatron_lm.model_options import UNSUPPORTED
from meshwright.errors import InputError
from meshwright.specs.model import AttentionKind, RopeScaling, Router
from meshwright.specs.plan import Plan, Recompute, Schedule
from meshwright.specs.run import Run

PUBLISHED = YAML(typ="safe").load((Path(__file__).parent / "published_arguments.yaml").read_text(encoding="utf-8"))


def imported(source: str, cluster: str = "h100-8x1") -> tuple[Run, str]:
    found = contract.import_run(source, cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    return runfile.loads(stream.getvalue()), "\n".join(found.notes)


TOY = """
model: {name: toy, hidden: 64, num_layers: 8, vocab: 512, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}, rope: {theta: 500000}}
data: {sequence_length: 256}
batch: {global_sequences: 64, micro: 2}
optimizer: {learning_rate: 3.0e-4, warmup_steps: 3}
cluster: h100-8x1
engine: megatron
parallel: {data_shard: 8, sharding: optimizer, recompute: full}
train: {steps: 20, seed: 7, checkpoint: {folder: saved, every_steps: 5}}
"""
MIXTURE = "model.experts={num_experts: 8, top_k: 2, ffn_hidden: 32%s}"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.schedule=wsd", "optimizer.decay_shape=sqrt", "optimizer.betas=[0.8, 0.99]", "precision=fp32",
         "train.checkpoint=null"],
        ["optimizer.schedule=linear", "optimizer.final_ratio=0", "optimizer.gradient_clip=null",
         "train.checkpoint.asynchronous=false"],
        ["optimizer.schedule=inverse_sqrt", "optimizer.warmup_steps=2", "precision=fp32"],
        ["optimizer.schedule=constant", "data.source=tokens/train.bin"],
        ["model.rope={theta: 500000, scaling: llama3, factor: 8, original_context: 8192}"],
        ["model.tied_embeddings=true", "model.attention.qk_norm=true", "model.attention.head_dim=32"],
        ["model=qwen2.5-7b", "parallel={tensor: 4, data_shard: 2}"],
        ["model=llama3.1-8b", "parallel={tensor: 2, data_shard: 4, sequence_parallel: false, sharding: none}"],
        ["model=gpt3-175b", "data.sequence_length=2048", "parallel={tensor: 8, data_shard: 1}"],
        ["model.gated_ffn=false", "model.norm_bias=true", "model.learned_positions=256", "model.rope.theta=10000"],
        ["parallel={data_shard: 8, recompute: {modules: [core_attention, norm, mlp]}}"],
        ["parallel={pipeline: 2, data_shard: 4, recompute: {layers: 2}}"],
        ["parallel={pipeline: 2, data_shard: 4, layers_per_stage: [3, 5]}"],
        ["parallel={pipeline: 2, virtual_pipeline: 2, schedule: interleaved, tensor: 2, data_shard: 2}"],
        ["parallel={pipeline: 2, data_shard: 4, axis_order: tp-cp-pp-dp}"],
        ["parallel={pipeline: 2, virtual_pipeline: 2, schedule: interleaved, data_shard: 4, recompute: {layers: 2}}"],
        [MIXTURE % "", "model.ffn_hidden=0", "train.balance_loss=0.02", "train.router_z_loss=0.001",
         "parallel={data_shard: 4, tensor: 2, expert: 4, expert_tensor: 1}"],
        ["model=qwen3-30b-a3b", "parallel={data_shard: 4, tensor: 2, expert: 2, expert_tensor: 2}"],
        [MIXTURE % ", num_dense_layers: 1, num_shared: 2, router: sigmoid, routed_scale: 2.5",
         "train.balance_bias_rate=0.01", "parallel={data_shard: 8, expert: 8}"],
        [MIXTURE % ", normalize_top_k: false, num_shared: 1, shared_ffn_hidden: 48", "model.ffn_hidden=0",
         "parallel={data_shard: 8}"],
    ],
    ids=["plain", "wsd", "linear", "inverse-sqrt", "constant", "llama3", "qwen3", "biases", "tensor", "gpt3",
         "no-biases", "modules", "layers", "stages", "interleaved", "axis-order", "interleaved-layers", "experts",
         "catalogue", "sigmoid", "not-normalised"],
)  # fmt: skip
def test_our_exports_come_back(overrides, tmp_path):
    run = runfile.loads(TOY, overrides=overrides)
    files = contract.lower(run, folder=Path("out")).files

    def comes_back(file: str) -> None:
        path = tmp_path / f"{run.model.name}{Path(file).suffix}"
        path.write_text(files[file])
        again, notes = imported(str(path))
        assert notes == ""
        keys = ("model", "plan", "precision", "optimizer", "train", "data", "global_batch", "sequence_length")
        for key in keys:
            assert getattr(again, key) == getattr(run, key), key
        stated = replace(run, stack=again.stack)  # Megatron's defaults of switches that the run leaves open
        as_stated = contract.lower_export(stated, folder=Path("out")).files[file]
        assert contract.lower(again, folder=Path("out")).files[file] == as_stated

    check_every(("megatron_lm.args", "megatron_bridge.yaml"), comes_back)


PLANS = {
    "train_mixtral_8x7b_distributed": "EP8 PP4 DP16 zero1 mbs1 1f1b",
    "train_llama3_8b_h100_fp8": "DP8 zero1 mbs1",
    "train_gpt3_175b_distributed": "TP8 PP16 DP1 ddp mbs1 1f1b",
    "mixtral_8x22b_tp2pp8ep8vpp1_release": "TP2 EP8 ETP2 PP8 DP8 zero1 mbs1 1f1b",
    "mixtral_8x7b_tp1pp4ep8vpp8_release": "TP2 EP8 PP4 VPP8 DP16 zero1 mbs1 interleaved",
    "deepseekv3_proxy": "TP2 EP16 PP4 VPP2 DP16 zero1 mbs1 interleaved layers=2x6,1x2",
    "gpt3_mcore_te_tp2_pp2/": "TP2 PP2 DP2 ddp mbs4 1f1b",
    "vp1_uneven_pipeline": "PP4 DP2 ddp mbs4 1f1b layers=2,4x2,2",
    "vp2_account_for_embedding_loss": "PP4 VPP2 DP2 ddp mbs4 interleaved",
    "uniform_full_recompute": "DP8 ddp mbs4 recompute=full",
    "ep4_etp1_memory_speed": "TP2 EP4 PP2 VPP4 DP2 zero1 mbs4 interleaved",
    "moe_mcore_te_ep8": "EP8 DP8 zero1 mbs4",
    "te_8experts_etp1_ep4": "TP2 EP4 DP4 ddp mbs4",
    "te_tp2_pp2_cp2": "TP2 CP2 PP2 DP1 ddp mbs4 1f1b",
    "tp4_cp2_native_fp8": "TP4 CP2 DP1 zero1 mbs2",
}
"""Plans of published arguments by a part of their names, on the smallest cluster that they fill."""


def published(part: str, folder: Path, more: str = "") -> tuple[Run, str]:
    (name,) = [name for name in PUBLISHED if part in name]
    (folder / "published.args").write_text(PUBLISHED[name])
    large = ("mixtral", "gpt3_175b", "deepseek")
    cluster = "h100-8x16" if any(word in part for word in large) else "h100-8x1"
    cluster = "h100-8x8" if part == "train_mixtral_8x7b_distributed" else cluster
    size = "" if "--vocab-size" in PUBLISHED[name] or more else " --vocab-size 50257"  # their files are not here
    return imported(f"{folder / 'published.args'}{size}{more}", cluster)


@pytest.mark.parametrize(("part", "plan"), PLANS.items())
def test_what_it_publishes(part, plan, tmp_path):
    run, notes = published(
        part, tmp_path, " --vocab-size 32000" if part.startswith(("train_mix", "mixtral", "deepseek")) else ""
    )
    assert run.plan is not None
    assert run.plan.describe() == plan
    assert "cannot be read" not in notes


def test_published_models_are_those_that_they_name(tmp_path):
    run, notes = published("train_mixtral_8x7b_distributed", tmp_path, " --vocab-size 32000")
    assert run.model.name == "mixtral-8x7b"
    assert (run.num_steps, run.global_batch, run.optimizer.warmup_steps) == (500_000, 256, 500)
    assert run.optimizer.betas == (0.9, 0.999)  # Megatron-LM's
    assert run.train.balance_loss == 0.01
    for words in ("until step 320000", "--sequence-parallel has no effect", "--init-method-std 0.01"):
        assert words in notes, notes
    run, notes = published("train_llama3_8b_h100_fp8", tmp_path)
    assert (run.model.hidden, run.model.vocab, run.precision.name) == (4096, 128_256, "fp8_delayed")
    assert run.num_steps == 1_953_125_000 // 128
    assert run.model.zero_centered_norms
    run, notes = published("train_gpt3_175b_distributed", tmp_path)
    assert (run.model.vocab, run.model.learned_positions, run.model.gated_ffn) == (50_257, 2048, False)
    assert run.optimizer.warmup_steps == 430
    assert "--rampup-batch-size 16 16 5859375" in notes
    run, _ = published("uneven_pipeline", tmp_path)
    assert run.plan.layers_per_stage == (2, 4, 4, 2)
    run, _ = published("memory_speed", tmp_path)
    assert run.model.attention.kind is AttentionKind.MLA
    assert run.model.rope.scaling is RopeScaling.YARN
    assert run.model.experts.router is Router.SIGMOID
    assert (run.model.experts.num_dense_layers, run.model.num_mtp_layers) == (1, 1)
    run, _ = published("deepseekv3_proxy", tmp_path, " --vocab-size 129280")
    assert run.plan.layers_per_stage == (2, 2, 2, 2, 2, 2, 1, 1)

    run, _ = published("mixtral_8x7b_alltoall", tmp_path, " --vocab-size 32000")
    assert (run.model.experts.num_experts, run.model.rope.rotated_share) == (8, 0.5)


def test_squared_relu_is_noted(tmp_path):
    run, notes = published("gpt3_15b_8t", tmp_path, " --vocab-size 32000")
    assert not run.model.gated_ffn
    assert "--squared-relu is not carried over" in notes


SCRIPT = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-"1"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=${TP:-${TENSOR:-2}}
MICRO=2; SAVED=${1:-"saved"}
mkdir -p "$(dirname "$SAVED")"
DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL=(
    --num-layers 4 --hidden-size 64   # sizes; don't change
    --num-attention-heads 4 --swiglu \
    --normalization RMSNorm
    --position-embedding-type rope
    --disable-bias-linear
    "--vocab-size 512"
)
TRAINING=" \
    --micro-batch-size $MICRO \
    --global-batch-size $((MICRO * WORLD_SIZE * 2)) \
    --lr 1e-3 --train-iters 10 --bf16 \
"
if [ -n "${WANDB_API_KEY}" ]; then
    MODEL+=(--wandb-project x --num-layers 5)
elif [[ "$TP" == "4" ]] || [ $NUM_NODES -gt 4 ]; then
    MODEL+=(--num-layers 6)
else
    MODEL+=(--seq-length 128)
fi
MODEL+=(--mock-data)
PROGRAM=pretrain_gpt.py
if [ ! -f "$PROGRAM" ]; then
    echo "there is none"
    if [ -n "$TP" ]; then echo; fi
fi
declare -a OPTIONS=(--weight-decay 0.2)
torchrun ${DISTRIBUTED[@]} "$PROGRAM" ${MODEL[@]} "${OPTIONS[@]}" $TRAINING \
    --tensor-model-parallel-size ${TP} --save "$SAVED" --save-interval 5 2>&1 | tee log.txt
"""


def test_a_script(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    run, _ = imported(str(path))
    assert (run.model.num_layers, run.model.hidden, run.model.vocab, run.sequence_length) == (4, 64, 512, 128)
    assert (run.global_batch, run.micro_batch, run.plan.tensor, run.plan.data) == (32, 2, 2, 4)
    assert run.train.checkpoint.folder == "saved"
    assert run.optimizer.weight_decay == 0.2
    run, _ = imported(f"{path} TP=4 elsewhere --seq-length 64 --seed 3")
    assert (run.model.num_layers, run.sequence_length, run.plan.tensor, run.train.seed) == (6, 64, 4, 3)
    assert run.train.checkpoint.folder == "elsewhere"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python pretrain_gpt.py \\\n  --seq-length $LENGTH", r"train.sh:2: --seq-length cannot be expanded"),
        ("X=1\npython pretrain_gpt.py $MORE", "train.sh:2: cannot be expanded"),
        ("X=1\n\npython pretrain_gpt.py --num-layer 4", "train.sh:3: Megatron-LM has no such option"),
        ("python pretrain_gpt.py 4", "a value without an option"),
        ("python pretrain_gpt.py --swiglu=1", "takes no value"),
        ("python pretrain_gpt.py --num-layers", "takes a value"),
        ("fi", "train.sh:1: a word that nothing begins"),
        ("if [ ! -f x ]; then\n  B=2\nfi\npython pretrain_gpt.py --swiglu $B",
         r"train.sh:4: cannot be expanded, B depends on files or programs \(line 2\)"),
        ("B=1\nif grep x y; then\n  B=2\nfi\npython pretrain_gpt.py --num-layers 1 --hidden-size 1 "
         "--num-attention-heads 1 --seq-length 1 --tensor-model-parallel-size $B",
         r"train.sh:5: --tensor-model-parallel-size cannot be expanded, B depends on files or programs \(line 3\)"),
        ("python pretrain_gpt.py --data-path $D --lr 1 <rate>", "train.sh:1: --lr takes one value: got '1 <rate>'"),
        ("A=(--seq-length\n <length>)\npython pretrain_gpt.py ${A[@]}",
         "train.sh:1: --seq-length cannot be expanded, a placeholder stands for it: got '<length>'\nhint: write the"),
        ("python pretrain_gpt.py --seq-length=<your length>", "a placeholder stands for it: got '<your length>'"),
        ("python pretrain_gpt.py --seq-length '$<n>'", "--seq-length cannot be expanded"),
        ("python pretrain_gpt.py --data-path $3 --seq-length $2 --log-interval $LOG --lr $RATE --num-layers $N",
         r'set it after the file: "train.sh ARGUMENT1 ARGUMENT2 RATE=... N=..."'),
        ("python pretrain_gpt.py --lr 1 2", "train.sh:1: --lr takes one value: got '1 2'"),
        ("python pretrain_gpt.py --lrr 1\\\n --num-layer 4",
         "such option: got '--lrr'\n.*such option: got '--num-layer'"),
        ("python pretrain_gpt.py --log-interval 1 $MORE", "train.sh:1: cannot be expanded"),
        ("if [ 'x ]; then\n  B=2\nfi", "' is not closed"),
        ("A=(1\n2", "is not closed"),
        ("echo", "calls no pretrain_gpt.py"),
    ],
)  # fmt: skip
def test_scripts_that_are_not_read(script, words, tmp_path):
    (tmp_path / "train.sh").write_text(script + "\n")
    with pytest.raises(InputError) as caught:
        imported(str(tmp_path / "train.sh"))
    assert re.search(words, str(caught.value)) or words in str(caught.value)


@pytest.mark.parametrize(("decay", "is_noted"), [(7, False), (9, True)])
def test_a_decay_that_begins_within_the_warm_up_is_noted(decay, is_noted, tmp_path):
    """`OptimizerParamScheduler.get_lr` of megatron/core takes up its curve where the warm-up ends."""
    options = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    wsd = f"--lr-decay-style WSD --lr-wsd-decay-iters {decay} --train-iters 10 --lr-warmup-iters 3 --lr-decay-iters 10"
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py {options} {wsd}\n")
    assert ("begins within the warm-up of 3" in imported(str(tmp_path / "train.sh"))[1]) is is_noted


def test_placeholders_of_files_are_noted(tmp_path):
    options = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    script = "DATA=/data/<your data>/text\nFILES=(\n --save <save> --save-interval 5\n --load '<save>/x'\n)\n"
    script += "docker run <image> ls\n"
    path = tmp_path / "train.sh"
    path.write_text(f'{script}torchrun pretrain_gpt.py {options} "${{FILES[@]}}" --data-path "$DATA" --bf16 > <log>\n')
    run, notes = imported(str(path))
    assert (run.data.source, run.train.checkpoint.folder) == ("synthetic", "checkpoints")
    for words in ("data of /data/<your data>/text is not carried over", "--save <save> cannot be expanded"):
        assert words in notes
    assert "--load" not in notes


@pytest.mark.parametrize(
    "call",
    [
        "torchrun pretrain_gpt.py > log {}", "torchrun pretrain_gpt.py 2>&1 {} | tee log",
        "> log torchrun pretrain_gpt.py {}",
        "torchrun pretrain_gpt.py --swiglu <in 2>err {} &> all", "torchrun pretrain_gpt.py {} &\nwait",
    ],
)  # fmt: skip
def test_options_behind_redirections_count(call, tmp_path):
    options = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    path = tmp_path / "train.sh"
    path.write_text(call.format(f"{options} --tensor-model-parallel-size 2") + "\n")
    run, _ = imported(str(path))
    assert (run.precision.name, run.plan.tensor) == ("bf16", 2)


def test_a_sourced_script_is_followed_or_noted(tmp_path):
    (tmp_path / "train.sh").write_text(". ./sizes.sh\ntorchrun pretrain_gpt.py $SIZES\n")
    with pytest.raises(InputError, match=r"train.sh:2: cannot be expanded, it is not set: got .\$SIZES"):
        imported(str(tmp_path / "train.sh"))
    options = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    (tmp_path / "sizes.sh").write_text(f'SIZES="{options}"\n')
    run, _ = imported(str(tmp_path / "train.sh"))
    assert run.model.num_layers == 4
    (tmp_path / "train.sh").write_text(f". ./absent.sh\ntorchrun pretrain_gpt.py {options}\n")
    _, notes = imported(str(tmp_path / "train.sh"))
    assert "./absent.sh is not read" in notes


PLAIN = {
    "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128, "vocab-size": 512, "lr": 1e-3,
    "position-embedding-type": "rope", "micro-batch-size": 1, "global-batch-size": 16, "train-iters": 10, "bf16": True,
    "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True,
}  # fmt: skip


def model_arguments(folder: Path, **changes: object) -> str:
    given = PLAIN | {name.replace("_", "-"): value for name, value in changes.items()}
    stream = StringIO()
    YAML().dump({"MODEL_ARGS": {f"--{name}": value for name, value in given.items()}}, stream)
    (folder / "model_config.yaml").write_text(stream.getvalue())
    return str(folder / "model_config.yaml")


def test_a_configuration_of_its_tests_and_defaults(tmp_path):
    run, notes = imported(model_arguments(tmp_path, rampup_batch_size="[8 8 100]", fp16=False))
    assert run.model.ffn_hidden == int(4 * 64 * 2 / 3 / 64) * 64
    assert run.model.tied_embeddings
    assert run.optimizer.weight_decay == 0.01
    assert run.optimizer.schedule.value == "linear"
    assert (run.train.seed, run.optimizer.final_ratio, run.plan.sharding.name) == (1234, 0.0, "NONE")
    assert "--rampup-batch-size 8 8 100" in notes


def test_moments_in_bf16_are_carried(tmp_path):
    kinds = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
    run, notes = imported(model_arguments(tmp_path, use_precision_aware_optimizer=True, **kinds))
    assert run.optimizer.states.value == "bf16"
    assert "moments" not in notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_parallel": True}, "has no effect without tensor parallelism"),
        ({"expert_model_parallel_size": 4}, "have no effect without --num-experts"),
        ({"moe_router_topk": 4}, "have no effect without --num-experts"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "virtual stages have no effect"),
        ({"recompute_num_layers": 1}, "have no effect without --recompute-granularity full"),
        ({"num_experts": 4, "tensor_model_parallel_size": 2}, "need --sequence-parallel"),
        ({"overlap_param_gather": True}, "has no effect without --use-distributed-optimizer"),
        ({"num_query_groups": 2}, "has no effect without --group-query-attention"),
        ({"lr_warmup_iters": 20}, "longer than the training"),
        ({"max_position_embeddings": 64}, "is more than --max-position-embeddings"),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, "without --use-precision-aware-optimizer"),
        (
            {"exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True},
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp32 are not carried over",
        ),
        ({"main_grads_dtype": "bf16", "use_precision_aware_optimizer": True}, "--main-grads-dtype bf16 is not"),
        ({"use_checkpoint_args": True}, "takes the shapes of the model from the checkpoint; here the arguments decide"),
        ({"use_mp_args_from_checkpoint_args": True}, "takes tensor and pipeline parallelism from the checkpoint"),
        ({"bf16": False, "fp8_format": "hybrid"}, "without --bf16 are carried over with weights in bf16"),
        ({"exit_interval": 10}, "not carried over: --exit-interval 10"),
        ({"init_method_std": 0.1, "finetune": True}, "not carried over: .*--init-method-std 0.1, --finetune"),
    ],
)
def test_contradictions_are_noted(changes, words, tmp_path):
    _, notes = imported(model_arguments(tmp_path, **changes))
    assert re.search(words, notes), notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 12}, "cannot be split over the data ranks"),
        ({"tensor_model_parallel_size": 3}, "do not divide the cluster's 8 devices"),
        ({"num_experts": 4, "expert_model_parallel_size": 3}, "do not divide the 8 devices of a pipeline stage"),
        ({"pipeline_model_parallel_size": 8}, "cannot be split over 8 stages"),
        ({"recompute_granularity": "full"}, "needs --recompute-method"),
        ({"recompute_granularity": "selective", "recompute_modules": "mhc"}, "do not recompute"),
        ({"position_embedding_type": "relative"}, "positions"),
        ({"optimizer": "muon"}, "an optimizer"),
        ({"lr_decay_style": "exponential"}, "a schedule that"),
        ({"fp16": True}, "both"),
        ({"window_size": "128"}, "--window-size is not the tokens before and after: got '128'"),
        ({"num_experts": 4, "moe_layer_freq": 2}, "dense layers after layers with experts"),
        ({"num_experts": 4, "moe_layer_freq": "exit()"}, "not an expression of whole numbers"),
        ({"num_experts": 4, "moe_layer_freq": "([1]*3)"}, "3 layers"),
        ({"lr": False}, "lack --lr"),
        ({"num_layers": "many"}, "is not a number"),
        ({"num_layers": "nan"}, "is not a number"),
        ({"num_layers": 0}, "lack --num-layers"),
        ({"num_attention_heads": 0}, "lack --num-attention-heads"),
        ({"global_batch_size": 0}, "cannot be split over"),
        ({"num_experts": 4, "moe_aux_loss_coeff": "x"}, "is not a number"),
        ({"position_embedding_type": "rope", "rope_type": "yarn"}, "positions"),
        ({"num_layers": 1.5}, "not a whole number"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL"}, "does not assign 4 layers"),
        ({"use_mup": True}, "cannot express: --use-mup"),
        ({"hybrid_layer_pattern": "M-M|*"}, "unequal pipeline stages.*got 'M-M|.'"),
        ({"tensor_parallel_num_weight_shards": 4}, "--tensor-parallel-num-weight-shards.*got '4'"),
        ({"encoder_num_layers": 4, "num_layers": False}, "a training that run files cannot express: --encoder-num-l"),
        ({"perform_rl_step": True}, "a training that run files cannot express: --perform-rl-step"),
        ({"yaml_cfg": "gpt.yaml"}, r":\d+: --yaml-cfg names a description .*got 'gpt.yaml'"),
        ({"spec": "my.layers layer"}, r"--spec names a description .*got 'my.layers layer', allowed: options"),
    ],
)
def test_what_is_refused(changes, words, tmp_path):
    with pytest.raises(InputError, match=words):
        imported(model_arguments(tmp_path, **changes))


def test_the_vocabulary_is_that_of_its_file(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    run, _ = imported(model_arguments(tmp_path, vocab_size=False, vocab_file="vocab.json"))
    assert run.model.vocab == 3
    run, notes = imported(model_arguments(tmp_path, vocab_size=False))
    assert "the 50257 tokens of GPT-2 are assumed" in notes
    assert run.model.vocab == 50_257


@pytest.mark.parametrize(
    ("tokenizer", "size", "of"),
    [
        ({"vocab_file": "absent-vocab.json"}, 50_257, "GPT-2"),
        ({"vocab_file": "/data/gpt2/vocab.json"}, 50_257, "GPT-2"),
        ({"vocab_file": "${DATA}/vocab.json"}, 50_257, "GPT-2"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "${DATA}/tokenizer.model"}, 32_000, "llama2-7b"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "a/Meta-Llama-3-8B"}, 128_256, "llama3-8b"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "$2"}, 32_000, "llama2-7b"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/hub/mine/tokenizer.model"}, 32_000, "llama2-7b"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "x/Llama-2-70b-chat-hf/tokenizer.model"}, 32_000,
         "llama2-70b"),
        ({"tokenizer_type": "Llama3Tokenizer", "tokenizer_model": "/x/Meta-Llama-3.1-8B/tokenizer.json"}, 128_256,
         "llama3.1-8b"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "Qwen/Qwen3-30B-A3B"}, 151_936, "qwen3-30b-a3b"),
        ({"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": "$DATA/nemotron_2_256k.model"}, 256_000,
         "nemotron_2_256k.model"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "google/mt5-base"}, 250_100, "google/mt5-base"),
        ({"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": "x/llama-7b/tokenizer.model"}, 32_000,
         "llama-7b"),
    ],
)  # fmt: skip
def test_the_vocabulary_that_the_name_of_a_tokenizer_implies(tokenizer, size, of, tmp_path):
    run, notes = imported(model_arguments(tmp_path, vocab_size=False, **tokenizer))
    assert run.model.vocab == size
    assert f"the {size} tokens of {of} are assumed" in notes
    run, notes = imported(model_arguments(tmp_path, padded_vocab_size=640, vocab_size=False, **tokenizer))
    assert (run.model.vocab, "assumed" in notes) == (640, False)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"tokenizer_type": "NullTokenizer"}, "the size of the vocabulary is not given"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "my/tokenizer"}, "file of .* my/tokenizer"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "$A/our-tokenizer-100k.model"}, "file of Llama2"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/x/Own-7b-hf/tokenizer.model"}, "file of Llama2"),
        (
            {"tokenizer_type": "Llama3Tokenizer", "tokenizer_model": "/x/own-Llama-3-8B/tokenizer.json"},
            "file of Llama3",
        ),
        ({"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": "x.model"}, "file of .* x.model"),
        ({"vocab_file": "bert/vocab.txt"}, "vocabulary of BERT or T5"),
        ({"vocab_file": "/data/our_tokenizer_131072/vocab.json"}, "file of GPT2BPETokenizer /data/our_tokenizer"),
        ({"tokenizer_type": "BertWordPieceCase"}, "vocabulary of BERT or T5"),
    ],
)
def test_vocabularies_that_must_be_given(tokenizer, words, tmp_path):
    with pytest.raises(InputError, match=words):
        imported(model_arguments(tmp_path, vocab_size=False, **tokenizer))


@given(pipeline=st.integers(2, 4), chunks=st.integers(1, 4), per_stage=st.integers(1, 4), recomputed=st.integers(0, 16))
def test_recomputed_layers_come_back(pipeline, chunks, per_stage, recomputed):
    """Megatron counts per virtual stage, a run file per rank: export and import convert both ways."""
    model = replace(catalog.model("llama3.1-8b"), num_layers=pipeline * chunks * per_stage)
    plan = Plan(
        pipeline=pipeline, virtual_pipeline=chunks, recompute=Recompute.FULL, recompute_layers=recomputed,
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
    )  # fmt: skip
    per_chunk = recomputed_per_chunk(model, plan)
    of_a_rank = chunks * per_stage
    assert (per_chunk is None) == (min(recomputed, of_a_rank) % chunks != 0)
    if per_chunk is not None:
        counts = [per_stage] * pipeline * chunks
        assert recomputed_per_rank(per_chunk, counts, pipeline=pipeline) == [min(recomputed, of_a_rank)] * pipeline


def test_recomputed_layers_are_per_stage_in_megatron(tmp_path):
    changes = {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
               "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}  # fmt: skip
    run, _ = imported(model_arguments(tmp_path, **changes))
    assert run.plan.recompute_layers == 2
    text = contract.lower(run, folder=Path("out")).files["megatron_lm.args"]
    assert "--recompute-num-layers 1\n" in text


def test_yaml_with_a_name_twice_and_lines(tmp_path):
    path = Path(model_arguments(tmp_path))
    text = path.read_text()
    path.write_text(
        text.replace("MODEL_ARGS:", "SHARED: &shared {--seed: 5}\nMODEL_ARGS:\n  <<: *shared") + "  --lr: 2e-3\n"
    )
    run, _ = imported(str(path))
    assert (run.optimizer.learning_rate, run.train.seed) == (2e-3, 5)
    path.write_text(text + "  --learning: 1\n")
    with pytest.raises(InputError, match=f"model_config.yaml:{len(PLAIN) + 2}: Megatron-LM has no such option"):
        imported(str(path))


def test_options_that_are_told_apart_are_megatrons():
    assert set(UNSUPPORTED) <= set(known_names(later=True))


def test_options_of_later_releases(tmp_path):
    later = {"async_strategy": "mcore", "verify_integrity": True, "eval_global_batch_size": 8}
    _, notes = imported(model_arguments(tmp_path))
    assert imported(model_arguments(tmp_path, **later))[1] == notes
    _, notes = imported(model_arguments(tmp_path, step_batch_size_schedule="0:8", mla_down_proj_fusion=True))
    assert "--step-batch-size-schedule 0:8 is not carried over: the batch size is constant" in notes
    assert re.search("does not include.*--mla-down-proj-fusion", notes)
    run, _ = imported(model_arguments(tmp_path, cuda_graph_impl="local", cuda_graph_modules="attn"))
    assert run.stack == imported(model_arguments(tmp_path, cuda_graph_impl="local", cuda_graph_scope="attn"))[0].stack


def test_options_at_values_without_effect_are_not_refused(tmp_path):
    values = {"softmax_type": "vanilla", "hybrid_mlp_ratio": 0.0, "rotary_seq_len_interpolation_factor": 1}
    run, _ = imported(model_arguments(tmp_path, **values))
    assert run.model == imported(model_arguments(tmp_path))[0].model


@pytest.mark.parametrize(
    ("changes", "cluster", "fitting"),
    [
        ({"global_batch_size": 12}, "h100-8x4", "h100-6x1"),
        ({"global_batch_size": 16}, "h100-8x8", "h100-8x2"),
        ({"tensor_model_parallel_size": 3}, "h100-8x4", "h100-3x1"),
        ({"tensor_model_parallel_size": 16}, "h100-8x1", "h100-8x2"),
        ({"num_experts": 64, "expert_model_parallel_size": 64, "global_batch_size": 64}, "h100-8x4", "h100-8x8"),
        ({"global_batch_size": 16, "micro_batch_size": 3}, "h100-8x4", None),
        ({"global_batch_size": 8, "num_experts": 16, "expert_model_parallel_size": 16}, "h100-8x2", None),
    ],
)
def test_a_cluster_that_does_not_fit_names_one_that_does(changes, cluster, fitting, tmp_path):
    source = model_arguments(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        imported(source, cluster)
    assert caught.value.hint == (fitting and f"--cluster {fitting} would do")
    if fitting:
        imported(source, fitting)


@pytest.mark.parametrize("mode", ["inference", "rl"])
def test_configurations_of_other_tests_are_refused_with_one_reason(mode, tmp_path):
    path = Path(model_arguments(tmp_path, temperature=1.0))
    path.write_text(f"MODE: {mode}\n{path.read_text()}")
    with pytest.raises(InputError, match=f"does not describe a pretraining: got 'MODE: {mode}', allowed: pretraining$"):
        imported(str(path))
    path.write_text("MODEL_ARGS: {trainer.devices: 8, trainer.num_nodes: 1}\n")
    with pytest.raises(InputError, match="settings of another program, such as NeMo: got 'trainer"):
        imported(str(path))


def test_a_layout_with_repetitions(tmp_path):
    layout = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|(t|)*2,tL"}
    run, _ = imported(model_arguments(tmp_path, **layout))
    assert (run.plan.pipeline, run.plan.virtual_pipeline) == (2, 2)


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        imported(str(tmp_path / "absent.sh"))
    (tmp_path / "run.yaml").write_text("model: llama3.1-8b\n")
    with pytest.raises(InputError, match="is not a configuration of Megatron-LM"):
        imported(str(tmp_path / "run.yaml"))
    for source, words in (("", "no configuration is given"), ('train.sh "NAME', "No closing quotation")):
        with pytest.raises(InputError, match=words):
            imported(source)
    (tmp_path / "a.args").write_text("--swiglu\n")
    with pytest.raises(InputError, match="only scripts and YAML have"):
        imported(f"{tmp_path / 'a.args'} TP=2")
