"""Shell scripts that run trainers: arguments, launchers, defaults of programs, and values that only callers know."""

from __future__ import annotations

import json

import pytest

from meshwright.answers.run_import import import_configuration
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError

VICUNA = """#!/bin/bash
LR=2e-5
torchrun --nproc_per_node=4 --master_port=20001 fastchat/train/train_mem.py \\
    --model_name_or_path meta-llama/Llama-2-7b-hf --data_path data.json --bf16 True --output_dir $OUT \\
    --num_train_epochs 3 --per-device-train-batch-size 2 --gradient_accumulation_steps 16 --learning_rate $LR \\
    --warmup_ratio 0.03 --lr_scheduler_type "cosine" --fsdp "full_shard auto_wrap" --model_max_length 2048 \\
    --gradient_checkpointing 1 --lazy_preprocess True %s > >(tee log)
"""
SWIFT = """
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift %s --model Qwen/Qwen2.5-7B --tuner_type full --dataset a b \\
    --torch_dtype bfloat16 --max_length 4096 --per_device_train_batch_size 2 --deepspeed zero3 %s
"""
PROGRAM = """
class Arguments:
    lora_r: int = 64
    lora_alpha: int = field(default=16)
    lora_target_modules: list = field(default_factory=lambda: ["q_proj", "v_proj"])
    model_max_length: int = field(default=512)

parser.add_argument("--adam_beta2", type=float, default=0.95)
"""


@pytest.fixture
def read(tmp_path):
    def run(text: str, *, behind: str = "", cluster: str = "h100-4x1", ignore=()):
        (tmp_path / "train.sh").write_text(text)
        found = import_configuration(f"{tmp_path}/train.sh {behind}", engine=None, cluster=cluster, ignore=ignore)
        run.notes = " ".join(found.notes)
        return found.content

    return run


def test_arguments_and_launcher_are_read(read):
    found = read(VICUNA % "")
    assert found["model"] == "llama2-7b"
    assert found["data"] == {"sequence_length": 2048}
    assert found["batch"] == {"global_sequences": 128, "micro": 2}
    assert (found["optimizer"]["learning_rate"], found["optimizer"]["warmup_ratio"]) == (2e-5, 0.03)
    assert (found["precision"], found["parallel"]["sharding"], found["parallel"]["recompute"]) == (
        "bf16", "parameters", "full",
    )  # fmt: skip
    assert found["stack"]["framework"] == "transformers-fp32"  # where no type is named, weights have 32 bits
    assert "assumed: fastchat/train/train_mem.py trains all weights" in read.notes


def test_a_launcher_decides_the_devices(read):
    with pytest.raises(InputError, match="the cluster has 8 devices"):
        read(VICUNA % "", cluster="h100-8x1")
    one_process = VICUNA.replace("torchrun --nproc_per_node=4 --master_port=20001", "python")
    assert read(one_process % "", cluster="h100-1x1")["batch"]["global_sequences"] == 32
    with pytest.raises(InputError, match="one process on 2 devices"):
        read(f"export CUDA_VISIBLE_DEVICES=0,1\n{one_process % ''}", cluster="h100-1x1")
    of_node = VICUNA.replace("--nproc_per_node=4", "--nproc_per_node=$GPUS --nnodes=2")
    with pytest.raises(InputError, match="the cluster has 1 nodes"):
        read(of_node % "")
    assert read(of_node % "", cluster="h100-8x2")["batch"]["global_sequences"] == 512
    include = VICUNA.replace("torchrun --nproc_per_node=4", "deepspeed --include localhost:0,1@other:0,1")
    assert read(include % "")["batch"]["global_sequences"] == 128


def test_devices_behind_a_variable_are_those_of_the_variable(read):
    text = f"n=4\nNPROC_PER_NODE=$n \\\n{SWIFT.lstrip().partition(' ')[2]}"
    assert read(text % ("sft", ""))["batch"]["global_sequences"] == 16
    with pytest.raises(InputError, match="the cluster has 8 devices"):
        read(text % ("sft", ""), cluster="h100-8x1")
    of_caller = text.replace("n=4\n", "")
    assert read(of_caller % ("sft", ""), cluster="h100-8x1")["parallel"]["data_shard"] == 8  # of one node


def test_accelerate_is_read_with_its_file_and_its_options(read, tmp_path):
    launch = "accelerate launch --config_file conf/fsdp.yaml --num_processes 4 --fsdp_reshard_after_forward false"
    text = VICUNA.replace("torchrun --nproc_per_node=4 --master_port=20001", launch).replace(
        '--fsdp "full_shard auto_wrap"', ""
    )
    with pytest.raises(InputError, match=r"names a file that is not here.*conf/fsdp.yaml"):
        read(text % "")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
    )
    assert read(text % "")["parallel"]["sharding"] == "gradients"
    stated = text.replace("--config_file conf/fsdp.yaml", "--use_deepspeed --zero_stage 1").replace(
        "--fsdp_reshard_after_forward false", ""
    )
    assert read(stated % "")["parallel"]["sharding"] == "optimizer"


def test_what_only_the_caller_knows_is_asked_for(read):
    with pytest.raises(InputError, match=r"the caller of the script sets these values.*--weight_decay \$WD") as caught:
        read(VICUNA % "--weight_decay $WD --adam_beta2 $B2")
    assert "--adam_beta2 $B2" in caught.value.message
    assert read(VICUNA % "--weight_decay $WD", behind="WD=0.1")["optimizer"]["weight_decay"] == 0.1
    assert read(VICUNA % "--weight_decay $WD", behind="weight_decay=0.2")["optimizer"]["weight_decay"] == 0.2
    assert read(VICUNA % "$EXTRA")["precision"] == "bf16"  # empty, as in the shell
    model = VICUNA.replace("meta-llama/Llama-2-7b-hf", "$MODEL")
    with pytest.raises(InputError, match="needs model_name_or_path=NAME"):
        read(model % "")
    assert read(model % "", behind="model=phi-2")["model"] == "phi-2"
    assert read(model % "", behind="MODEL=phi-2")["model"] == "phi-2"


def test_unknown_keys_and_other_objectives_are_refused(read):
    with pytest.raises(InputError, match=r"no such key: got 'vision_tower, mm_x'"):
        read(VICUNA % "--vision_tower a --mm_x 1")
    read(VICUNA % "--vision_tower a", ignore=("vision_tower",))
    assert "--ignore left out vision_tower" in read.notes
    with pytest.raises(InputError, match="a program of another objective"):
        read(VICUNA.replace("train_mem.py", "train_dpo.py") % "")
    with pytest.raises(InputError, match="the program that trains is not known"):
        read(VICUNA.replace("fastchat/train/train_mem.py", "$PROGRAM") % "")


def test_defaults_of_a_program_are_read_from_its_text(read, tmp_path):
    text = VICUNA.replace("--model_max_length 2048", "")
    with pytest.raises(InputError, match="needs model_max_length=TOKENS"):
        read(text % "")
    with pytest.raises(InputError, match="needs lora_r=NUMBER, lora_alpha=NUMBER"):
        read(VICUNA % "--use_lora True")
    (tmp_path / "fastchat" / "train").mkdir(parents=True)
    (tmp_path / "fastchat" / "train" / "train_mem.py").write_text(PROGRAM)
    found = read(text % "--use_lora True --lora_r 8")
    assert found["data"] == {"sequence_length": 512}
    assert found["lora"]["rank"] == 8
    assert (found["lora"]["alpha"], found["lora"]["targets"]) == (16.0, ["query", "value"])
    assert found["optimizer"]["betas"] == [0.9, 0.95]
    assert "defaults of fastchat/train/train_mem.py: " in read.notes
    called = "config = LoraConfig(r=args.lora_r, lora_dropout=0.05, target_modules=args.modules)\n"
    for calls, dropout in ((called, 0.05), (called + called.replace("0.05", "0.1"), 0.0)):
        (tmp_path / "fastchat" / "train" / "train_mem.py").write_text(PROGRAM + calls)
        assert read(text % "--use_lora True --lora_r 8")["lora"]["dropout"] == dropout
    assert "lora" not in read(text % "")
    assert "task" not in read(text % "")  # an adapter that nothing switches on


def test_scripts_of_ms_swift_are_read(read):
    found = read(SWIFT % ("sft", ""))
    assert found["model"] == "qwen2.5-7b"
    assert found["batch"] == {
        "global_sequences": 16,
        "micro": 2,
    }  # 16 sequences a step, where no accumulation is stated
    assert found["parallel"]["sharding"] == "parameters"
    assert (found["optimizer"]["learning_rate"], found["optimizer"]["weight_decay"]) == (1e-5, 0.1)
    adapters = read(SWIFT.replace("--tuner_type full", "") % ("pt", "--gradient_accumulation_steps 4"))
    assert adapters["batch"]["global_sequences"] == 32
    assert (adapters["lora"]["rank"], adapters["lora"]["alpha"], adapters["optimizer"]["learning_rate"]) == (
        8,
        32.0,
        1e-4,
    )
    assert read(SWIFT.replace("bfloat16", "float16") % ("sft", ""))["precision"] == "fp16"
    pairs = read(SWIFT % ("rlhf --rlhf_type dpo", "--beta 0.2"))
    assert pairs["train"]["preference"]["loss"] == "dpo"
    for more in ("--rlhf_type grpo", "--sequence_parallel_size 2", "--task_type seq_cls", "--freeze_llm true"):
        with pytest.raises(InputError):
            read(SWIFT % ("rlhf", more))


def test_deepspeeds_own_schedule_counts(read, tmp_path):
    conf = {
        "zero_optimization": {"stage": 2},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": "auto"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(conf))
    found = read(VICUNA.replace('--fsdp "full_shard auto_wrap"', "--deepspeed ./ds.json") % "")
    assert found["optimizer"]["schedule"] == "constant"
    assert "lr_scheduler_type cosine has no effect" in read.notes


def test_deepspeed_chat_is_read(read):
    text = "deepspeed main.py --data_split 2,4,4 --model_name_or_path facebook/opt-1.3b --zero_stage 2 --deepspeed \\\n"
    found = read(f"{text} --per_device_train_batch_size 8 --max_seq_len 512 --learning_rate 1e-5")
    assert (found["precision"], found["optimizer"]["betas"]) == ("fp16", [0.9, 0.95])
    assert found["batch"] == {"global_sequences": 32, "micro": 8}
    with pytest.raises(InputError, match="rewards are not there"):
        read(f"{text} --per_device_train_batch_size 8 --max_seq_len 512 --num_padding_at_beginning 1")


def test_a_folder_of_another_objective_is_refused(tmp_path):
    (tmp_path / "step2_reward_model").mkdir()
    script = tmp_path / "step2_reward_model" / "run.sh"
    script.write_text(
        "deepspeed main.py --model_name_or_path m --zero_stage 2 --max_seq_len 9 --per_device_train_batch_size 8"
    )
    with pytest.raises(InputError, match="another objective"):
        import_configuration(str(script), engine=None, cluster="h100-4x1")


def test_a_script_that_names_a_file_is_read_with_it(read, tmp_path):
    text = "FORCE_TORCHRUN=1 llamafactory-cli train conf/sft.yaml learning_rate=1e-5\n"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sft.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\n"
        "per_device_train_batch_size: 1\nlearning_rate: 1.0e-4\n"
    )
    found = read(text)
    assert found["data"] == {"sequence_length": 1024}
    assert found["optimizer"]["learning_rate"] == 1e-5
    assert recognised(tmp_path / "train.sh").engine == "native"


def test_a_script_without_a_trainer_is_not_one(tmp_path):
    (tmp_path / "x.sh").write_text("# swift sft --model x\npython infer.py --model_name_or_path x\n")
    assert recognised(tmp_path / "x.sh") is None


def test_arguments_over_a_file_count(read, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8}\n"
        "tokenizer: {max_seq_len: 2048}\nbatch_size: 2\noptimizer: {_component_: torch.optim.AdamW, lr: 3.0e-4}\n"
        "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\ngradient_accumulation_steps: 8\n"
    )
    launcher = "tune run --nnodes 1 --nproc_per_node 4 lora_finetune_distributed --config"
    found = read(f"{launcher} ./c.yaml batch_size=4 optimizer.lr=1e-4 model.lora_rank=32\n")
    assert found["batch"] == {"global_sequences": 128, "micro": 4}
    assert (found["optimizer"]["learning_rate"], found["lora"]["rank"]) == (1e-4, 32)
    assert read(f"{launcher} c.yaml model.lora_rank=32\n", behind="model.lora_rank=64")["lora"]["rank"] == 64
    with pytest.raises(InputError, match=r"(?s)not here: got .llama3_1/8B_lora.*tune cp llama3_1/8B_lora"):
        read(f"{launcher} llama3_1/8B_lora\n")


def test_the_command_line_of_axolotl_names_a_file(read, tmp_path):
    (tmp_path / "c.yml").write_text(
        "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nsample_packing: true\nmicro_batch_size: 2\n"
        "datasets: [{path: a, type: alpaca}]\n"
    )
    for call in ("axolotl train c.yml", "accelerate launch --num_processes 4 -m axolotl.cli.train c.yml"):
        found = read(f"{call} --learning-rate 1e-4 --gradient-accumulation-steps 4\n")
        assert (found["data"]["sequence_length"], found["batch"]["micro"]) == (4096, 2)
        assert found["optimizer"]["learning_rate"] == 1e-4
    assert found["batch"]["global_sequences"] == 32


def test_the_command_line_of_litgpt_is_read(read):
    command = "--data Alpaca --data.num_workers 2 --train.max_seq_length 1024 --train.micro_batch_size 2 --devices 4"
    call = f"litgpt finetune_lora meta-llama/Llama-3.2-1B {command} --optimizer AdamW --optimizer.lr 0.005 --lora_r 16"
    found = read(f"{call} --precision bf16-mixed\n")
    assert (found["model"], found["batch"]["micro"], found["parallel"]["data_shard"]) == ("llama3.2-1b", 2, 4)
    assert (found["optimizer"]["learning_rate"], found["lora"]["rank"]) == (0.005, 16)
    with pytest.raises(InputError, match=r"train\.max_seq_length=TOKENS"):
        read("litgpt pretrain pythia-14m --data TextFiles --data.train_data_path x --train.micro_batch_size 2\n")


QLORA = """
torchrun --nproc_per_node 4 train.py --model_name meta-llama/Llama-2-7b-hf --max_length 2048 --learning_rate 1e-4 \\
    --per_device_train_batch_size 2 --bf16 True --splits train,test --lora_r 8 --lora_alpha 16 --use_peft_lora %s \\
    --lora_target_modules all-linear --use_4bit_quantization True --use_nested_quant True \\
    --bnb_4bit_compute_dtype bfloat16 --bnb_4bit_quant_storage_dtype %s
"""


def test_arguments_of_the_example_of_peft_are_read(read):
    found = read(QLORA % (True, "bfloat16"))
    assert (found["model"], found["lora"]["rank"], found["lora"]["base_format"]) == ("llama2-7b", 8, "nf4_double")
    assert found["stack"]["framework"] == "transformers-fp32"
    assert read(QLORA % (True, "uint8"))["stack"]["framework"] == "transformers-fp32-base"
    with pytest.raises(InputError, match="only adapters train on a quantised base"):
        read(QLORA % (False, "uint8"))
