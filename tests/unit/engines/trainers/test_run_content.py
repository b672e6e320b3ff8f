"""Configurations of trainers as run files: small files of each project, what is refused, and hostile ones."""

from __future__ import annotations

import json

import pytest

from meshwright.answers.run_estimate import estimate_run
from meshwright.answers.run_import import import_configuration
from meshwright.catalog import huggingface
from meshwright.engines.native.check import check
from meshwright.engines.recognition import recognised
from meshwright.engines.trainers.run_content import import_trainer
from meshwright.errors import InputError
from meshwright.specs.run import Preference, PreferenceLoss

TRAINING_ARGUMENTS = {
    "model_name_or_path": "Qwen/Qwen3-8B", "max_length": 4096, "output_dir": "out", "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4, "max_steps": 1000, "warmup_ratio": 0.03, "bf16": True, "learning_rate": "2e-5",
    "gradient_checkpointing": True, "logging_steps": 5, "report_to": "wandb", "neftune_noise_alpha": None,
}  # fmt: skip
TRL = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "dataset_name": "trl-lib/Capybara", "use_peft": True, "lora_r": 32,
    "lora_alpha": 64, "lora_target_modules": "all-linear", "load_in_4bit": True, "learning_rate": 2.0e-4,
    "num_train_epochs": 1, "packing": True, "max_length": 2048,
}  # fmt: skip
AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3-8B", "sequence_len": 8192, "sample_packing": True, "micro_batch_size": 1,
    "gradient_accumulation_steps": 8, "optimizer": "paged_adamw_8bit", "lr_scheduler": "cosine", "learning_rate": 2e-5,
    "bf16": "auto", "tf32": False, "gradient_checkpointing": True, "attn_implementation": "flash_attention_2",
    "max_steps": 200, "warmup_ratio": 0.1, "fsdp_version": 2, "cosine_min_lr_ratio": 0.1, "datasets": [{"path": "x"}],
    "fsdp_config": {"offload_params": False, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"},
}  # fmt: skip
PATTERNED = AXOLOTL | {
    "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj", "up_proj"],
    "lora_rank_pattern": {"up_proj": 4}, "lora_alpha_pattern": {"q_proj": 8}, "peft_layers_to_transform": [0, 2],
    "lora_modules_to_save": ["lm_head", "embed_tokens"],
}  # fmt: skip
LLAMA_FACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "stage": "sft", "do_train": True, "template": "llama3",
    "finetuning_type": "lora", "lora_target": "q_proj,v_proj", "cutoff_len": 1024, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
    "quantization_bit": 4, "fp16": True, "dataset": "identity", "save_only_model": False,
}  # fmt: skip
TORCHTUNE = {
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 8192},
    "model": {
        "_component_": "torchtune.models.llama3_1.qlora_llama3_1_70b", "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": True, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0,
    },
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/models/llama"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4, "fused": True},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                     "num_warmup_steps": 100},
    "batch_size": 2, "gradient_accumulation_steps": 4, "epochs": 2, "max_steps_per_epoch": 500, "dtype": "bf16",
    "compile": True, "enable_activation_checkpointing": True, "clip_grad_norm": None, "seed": None, "device": "cuda",
    "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
}  # fmt: skip
LITGPT = {
    "checkpoint_dir": "checkpoints/meta-llama/Llama-2-7b-hf", "out_dir": "out", "precision": "bf16-true", "devices": 4,
    "num_nodes": 1, "lora_r": 32, "lora_alpha": 16, "lora_query": True, "lora_key": False, "lora_mlp": True,
    "train": {"global_batch_size": 32, "micro_batch_size": 2, "lr_warmup_steps": 10, "epochs": 2, "max_steps": 400,
              "max_seq_length": 512, "max_norm": None, "min_lr": 6e-5},
    "eval": {"interval": 100}, "data": {"class_path": "litgpt.data.Alpaca2k"},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4, "betas": [0.9, 0.95]}},
}  # fmt: skip
LITGPT_PRETRAIN = {
    "model_name": "pythia-12b", "train": {"global_batch_size": 512, "micro_batch_size": 4, "max_seq_length": 2048},
    "optimizer": "AdamW", "devices": 8, "num_nodes": 2,
}  # fmt: skip
SMALL = LITGPT_PRETRAIN | {"num_nodes": 1, "train": LITGPT_PRETRAIN["train"] | {"global_batch_size": 24}}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1,
    "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": False},
}  # fmt: skip
DEEPSPEED = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
}  # fmt: skip
PAIRS = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "dataset_mixer": {"a": 1.0}, "beta": 2.0, "max_length": 2048,
    "max_prompt_length": 1800, "learning_rate": 6e-7, "per_device_train_batch_size": 2, "loss_type": "sigmoid",
}  # fmt: skip
TORCHTUNE_DPO = TORCHTUNE | {
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2, "label_smoothing": 0.1},
    "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
}


def test_training_arguments(read):
    run = read(TRAINING_ARGUMENTS)

    assert (run.model.name, run.weights, run.sequence_length, run.global_batch) == (
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        4096,
        64,
    )
    assert (run.plan.micro_batch, run.plan.sharding.name, str(run.plan.recompute)) == (2, "NONE", "full")
    assert (run.optimizer.learning_rate, run.optimizer.schedule, run.optimizer.warmup_steps) == (2e-5, "linear", 30)
    assert (run.optimizer.betas, run.optimizer.weight_decay, run.optimizer.final_ratio) == ((0.9, 0.999), 0.0, 0.0)
    assert (run.num_steps, run.precision.name, run.stack.framework) == (1000, "bf16", "transformers")


@pytest.mark.parametrize(("given", "shape"), [({}, "cosine"), ({"decay_type": "1-sqrt"}, "sqrt")])
def test_the_decay_of_transformers_wsd(read, given, shape):
    """The curve is a cosine unless it is stated (transformers, `get_wsd_schedule`)."""
    kwargs = {"num_decay_steps": 200, "min_lr_ratio": 0.05} | given
    run = read(TRAINING_ARGUMENTS | {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs})
    o = run.optimizer
    assert (o.schedule, o.decay_ratio, o.decay_shape, o.final_ratio) == ("wsd", 0.2, shape, 0.05)


def test_trl(read):
    run = read(TRL)

    assert (run.lora.rank, run.lora.alpha, run.lora.dropout, run.lora.base_format) == (32, 64.0, 0.05, "nf4")
    assert len(run.lora.targets) == 7
    assert str(run.plan.recompute) == "full"  # TRL's own default
    assert run.num_steps is None
    assert run.train.epochs == 1
    assert any("`train` counts the steps of 1, once data.source names the data" in note for note in read.notes)
    assert not any("not packed" in note for note in read.notes)
    mixture = {"dataset_mixture": {"datasets": [{"id": "a"}]}, "chat_template": "{{ x }}"}
    read({key: value for key, value in TRL.items() if key != "dataset_name"} | mixture)
    assert not any("chat_template" in note for note in read.notes)


@pytest.mark.parametrize(
    ("content", "preference"),
    [
        (AXOLOTL | {"rl": "dpo", "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1,
                    "lora_target_linear": True, "rl_beta": 0.2}, Preference(beta=0.2)),
        (LLAMA_FACTORY | {"stage": "dpo", "lora_dropout": 0.1, "dpo_label_smoothing": 0.1},
         Preference(label_smoothing=0.1)),
        (LLAMA_FACTORY | {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0},
         Preference(loss=PreferenceLoss.SIMPO, beta=2.0, margin=1.0)),
        (LLAMA_FACTORY | {"stage": "dpo", "pref_loss": "orpo", "simpo_gamma": 1.0},
         Preference(loss=PreferenceLoss.ORPO)),
    ],
)  # fmt: skip
def test_losses_of_pairs(read, content, preference):
    """Both answers of a pair are one sequence here, and trainers give each their whole length."""
    plain = read(content | {"stage": "sft"} if "stage" in content else AXOLOTL)
    run = read(content)

    assert run.train.preference == preference
    assert run.sequence_length == 2 * plain.sequence_length
    assert run.global_batch == plain.global_batch
    assert run.lora.dropout == 0.0
    assert not [problem for problem in check(run) if problem.key.startswith("train.preference")]
    assert any("dropout is read as 0" in note for note in read.notes) == ("lora_dropout" in content)


def test_the_reference_of_all_weights_is_not_estimated(read):
    read(AXOLOTL | {"rl": "dpo"})
    assert any("a copy of the model as the reference" in note for note in read.notes)
    read(AXOLOTL | {"rl": "dpo", "precompute_ref_log_probs": True})
    assert not any("reference" in note for note in read.notes)


@pytest.mark.parametrize(
    ("repository", "name", "words"),
    [
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1", ""),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b", ""),
        ("Qwen/Qwen2-7B", "qwen2.5-7b", "Qwen/Qwen2-7B is read as qwen2.5-7b of the catalogue, which has its shapes"),
        ("unsloth/Qwen2.5-14B-bnb-4bit", "qwen2.5-14b", "is read as qwen2.5-14b of the catalogue, by its name"),
        ("google/gemma-3-12b-it", "gemma3-12b", "its vision encoder is left out"),
    ],
)
def test_a_model_of_the_hub_is_read_without_it(read, monkeypatch, repository, name, words):
    monkeypatch.setattr(huggingface, "hub_folder", lambda _: pytest.fail("the hub was asked"))
    run = read(AXOLOTL | {"base_model": repository}, cluster="h100-8x2")
    about = [note for note in read.notes if repository in note]
    assert run.model.name == name
    assert [words in note for note in about] == ([True] if words else [])


def test_axolotl(read):
    run = read(AXOLOTL, cluster="h100-8x2")

    assert (run.model.name, run.weights) == ("llama3-8b", "NousResearch/Meta-Llama-3-8B")
    assert any("is read as llama3-8b of the catalogue, by its name" in note for note in read.notes)
    assert (run.global_batch, run.plan.data_shard, run.plan.sharding.name) == (128, 16, "PARAMETERS")
    assert (run.optimizer.name, run.optimizer.states, run.optimizer.final_ratio) == ("adamw", "int8", 0.1)
    assert any("moves to host memory" in note or "move to host memory" in note for note in read.notes)
    assert (run.optimizer.warmup_steps, run.stack.features.attention) == (20, "fa2")


@pytest.mark.parametrize(("given", "steps"), [({"warmup_ratio": None}, 6), ({"warmup_steps": 0.05}, 10),
                                              ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.005}, 2)])  # fmt: skip
def test_warm_up_of_axolotl(read, given, steps):
    """Its builder takes 3 % of the steps where a configuration has none, and 2 in place of 1."""
    assert read(AXOLOTL | given).optimizer.warmup_steps == steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 4}}, {"cycles": 4}),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 2e-6}},
         {"power": 2.0, "final_ratio": pytest.approx(0.1)}),
        ({"lr_scheduler_type": "inverse_sqrt"}, {"warmup_steps": 30, "final_ratio": 0.0}),
        ({"max_steps": None, "num_train_epochs": 2}, {"warmup_steps": 0, "warmup_ratio": 0.03}),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.5}}, {"cycles": 1}),
    ],
)  # fmt: skip
def test_schedules_of_transformers(read, given, expected):
    optimizer = read(TRAINING_ARGUMENTS | given).optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected
    assert optimizer.schedule == given.get("lr_scheduler_type", "linear")


def test_llama_factory(read):
    run = read(LLAMA_FACTORY)

    assert (run.lora.rank, run.lora.alpha, run.lora.targets) == (8, 16.0, ("query", "value"))
    assert (run.lora.base_format, run.precision.name, str(run.plan.recompute)) == ("nf4_double", "fp16", "full")
    assert run.global_batch == 64
    assert read(LLAMA_FACTORY | {"loraplus_lr_ratio": 16.0}).optimizer.rate_factors == {"lora_b": 16.0}


def test_torchtune(read):
    run = read(TORCHTUNE)

    assert (run.model.name, run.weights, run.global_batch) == ("llama3.1-70b", "/models/llama", 64)
    assert (run.lora.targets, run.lora.base_format) == (("query", "output", "gate", "up", "down"), "nf4_double")
    assert (run.plan.sharding.name, run.num_steps, run.train.compile) == ("PARAMETERS", 1000, True)
    assert (run.optimizer.weight_decay, run.optimizer.gradient_clip, run.stack.framework) == (0.01, None, "torchtune")


def test_litgpt(read):
    run = read(LITGPT, cluster="h100-4x1")

    assert (run.model.name, run.global_batch, run.plan.micro_batch) == ("llama2-7b", 32, 2)
    assert run.lora.targets == ("query", "value", "gate", "up", "down")
    assert (run.plan.sharding.name, str(run.plan.recompute)) == ("PARAMETERS", "full")
    assert (run.optimizer.betas, run.optimizer.warmup_steps, run.num_steps) == ((0.9, 0.95), 10, 400)


def test_litgpt_recomputes_nothing_on_one_device(read):
    assert str(read(LITGPT | {"devices": 1}, cluster="h100-1x1").plan.recompute) == "none"


def test_pretraining_of_litgpt(read):
    run = read(LITGPT_PRETRAIN, cluster="h100-8x2")

    assert (run.plan.data_shard, run.plan.data_replicate, run.global_batch) == (8, 2, 512)
    assert (run.weights, run.train.compile, str(run.plan.recompute)) == (None, True, "none")
    assert run.optimizer.final_ratio == pytest.approx(0.04)


def test_accelerate_and_deepspeed_beside_a_trainer(read):
    run = read(TRAINING_ARGUMENTS, ACCELERATE)
    assert run.plan.sharding.name == "GRADIENTS"

    run = read(TRAINING_ARGUMENTS, DEEPSPEED)
    assert (run.plan.sharding.name, str(run.plan.offload)) == ("GRADIENTS", "optimizer")
    assert run.stack.features.gradient_format == "bf16"


def test_a_file_names_another(read, tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps(DEEPSPEED))

    assert read(LLAMA_FACTORY | {"deepspeed": "zero.json"}).plan.sharding.name == "GRADIENTS"
    assert read(LLAMA_FACTORY | {"deepspeed": DEEPSPEED}).plan.sharding.name == "GRADIENTS"
    with pytest.raises(InputError, match="names a file that is not here"):
        read(LLAMA_FACTORY | {"deepspeed": "gone.json"})


def test_a_folder_is_one_run(read, tmp_path):
    read(AXOLOTL, ACCELERATE)

    assert recognised(tmp_path).project == "axolotl"
    found = import_trainer(str(tmp_path), cluster="h100-8x1")
    assert found.program == "axolotl"
    assert found.content["batch"]["global_sequences"] == 64


@pytest.mark.parametrize(
    ("stated", "expected"),
    [({"fsdp": "full_shard auto_wrap"}, ("parameters", 16, 1)), ({"fsdp": ["hybrid_shard"]}, ("parameters", 8, 2)),
     ({"fsdp": "shard_grad_op offload"}, ("gradients", 16, 1)), ({"fsdp": True}, ("parameters", 16, 1)),
     ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, ("gradients", 16, 1)), ({}, ("none", 16, 1))],
)  # fmt: skip
def test_strategies_of_fsdp(read, tmp_path, stated, expected):
    read(TRAINING_ARGUMENTS | stated, cluster="h100-8x2")
    parallel = import_trainer(str(tmp_path / "part0.yaml"), cluster="h100-8x2").content["parallel"]

    assert (parallel["sharding"], parallel["data_shard"], parallel["data_replicate"]) == expected
    assert parallel["offload"] == ("optimizer" if "offload" in str(stated.get("fsdp")) else "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (AXOLOTL | {"rl": "grpo"}, "rl: run files do not have it"),
        (AXOLOTL | {"rl": "dpo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing: 0.1"),
        (LLAMA_FACTORY | {"stage": "rm"}, "stage: run files do not have it"),
        (PAIRS | {"loss_type": "apo_zero"}, "loss of another objective: loss_type: \"apo_zero\""),
        (PAIRS, "does not name the loss of its pairs: allowed: dpo, kto, orpo, simpo"),
        (PAIRS | {"run_name": "a-dpo-of-an-orpo"}, "does not name the loss of its pairs"),
        (TORCHTUNE_DPO | {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}, "loss._component_: run files do"),
        (TORCHTUNE_DPO | {"model": TORCHTUNE["model"] | {"lora_dropout": 0.1}}, "lora_dropout: run files have no"),
        (LLAMA_FACTORY | {"stage": "dpo", "pref_loss": "ipo"}, "pref_loss: run files do not have it"),
        (LLAMA_FACTORY | {"stage": "dpo", "pref_ftx": 1.0}, "pref_ftx: 1.0"),
        (LLAMA_FACTORY | {"finetuning_type": "oft"}, "finetuning_type: run files do not have it"),
        (TRL | {"num_generations": 8}, "num_generations: 8"),
        (TRL | {"lora_modules_to_save": ["norm"]}, "lora_modules_to_save: run files train embedding and head"),
        (AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_target_linear": True}, "needs lora_alpha=NUMBER"),
        (AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_modules": "Wqkv"}, "got .Wqkv"),
        (PATTERNED | {"lora_rank_pattern": {"0.mlp.up_proj": 4}}, "ranks and alphas of modules.*up_proj"),
        (PATTERNED | {"peft_use_rslora": True}, "peft_use_rslora: run files do not have it beside"),
        (AXOLOTL | {"lr_scheduler": "one_cycle"}, "lr_scheduler: run files do not have it"),
        (AXOLOTL | {"optimizer": "ao_adamw_fp8"}, "optimizer: run files do not have it"),
        (AXOLOTL | {"sequence_lem": 4}, "no such key: got 'sequence_lem'"),
        (AXOLOTL | {"base_model": 3}, "base_model: must be a model's name"),
        (AXOLOTL | {"base_model": "llama9-8b"}, "llama9-8b is no model that is known, .*needs model=NAME: "),
        (AXOLOTL | {"micro_batch_size": True}, "micro_batch_size: must be a number"),
        (AXOLOTL | {"micro_batch_size": 1.5}, "micro_batch_size: must be a whole number"),
        (AXOLOTL | {"micro_batch_size": 10**400}, "micro_batch_size: number is too large"),
        (AXOLOTL | {"sequence_len": [1]}, "sequence_len: must be a number"),
        (AXOLOTL | {"gradient_checkpointing": "maybe"}, "gradient_checkpointing: must be true or false"),
        (AXOLOTL | {"dp_shard_size": 2}, "data-parallel ranks are not the 8"),
        (AXOLOTL | {"tensor_parallel_size": 3}, "do not divide the 8 devices"),
        (AXOLOTL | {"bfloat16": True, "deepspeed": {"zero_optimization": {"stage": 7}}}, "no stage of ZeRO"),
        (AXOLOTL | {"deepspeed": "part0.yaml"}, "is no configuration of DeepSpeed"),
        (AXOLOTL | {"warmup_ratio": -3}, "warmup_ratio: must be a share"),
        (AXOLOTL | {"warmup_steps": -4}, "warmup_steps: must be a whole number"),
        (AXOLOTL | {"deepspeed": 4}, "deepspeed: must be the path of a file"),
        (SMALL, "be split over 8 data-parallel ranks"),
        (LITGPT | {"devices": 2}, "the cluster has 8 devices"),
        (TRAINING_ARGUMENTS | {"fsdp": "full"}, "no strategy of FSDP"),
        (TRAINING_ARGUMENTS | {"activation_checkpointing": False}, "contradict each other"),
        (ACCELERATE, "needs model=NAME, data.sequence_length=TOKENS, batch.micro=SEQUENCES, optimizer.learning_rate="),
        ("base_model: &a {x: *a}\nmicro_batch_size: 1\n", "itself|alias|recursive|anchor"),
        ("base_model: x\nmicro_batch_size: !!python/object:os.system 1\n", "tag"),
        ("base_model: " + "[" * 200, "nested|YAML|deep"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused(read, content, message):
    with pytest.raises(InputError, match=message):
        read(content)


@pytest.mark.parametrize("content", [TRAINING_ARGUMENTS, TRL, AXOLOTL, LLAMA_FACTORY, TORCHTUNE])
def test_an_unknown_key_is_left_out_on_request(read, content):
    given = content | {"my_own_key": 3}
    with pytest.raises(InputError, match="my_own_key") as caught:
        read(given)
    assert "--ignore my_own_key" in caught.value.hint

    read(given, ignore=["my_own_key"])
    assert any("my_own_key" in note for note in read.notes)


def test_a_key_at_its_default_refuses_nothing(read):
    off = {"rl": None, "neftune_noise_alpha": 0, "peft_use_dora": False, "unfrozen_parameters": [], "qat": None}
    read(AXOLOTL | off)
    read(AXOLOTL | {"model_quantization_config": "Mxfp4Config"})
    read(LLAMA_FACTORY | {"stage": "pt", "use_galore": False, "quantization_method": "bnb"})


@pytest.mark.parametrize(
    ("content", "behind", "expected"),
    [
        (PAIRS | {"output_dir": "data/zephyr-7b-dpo-full"}, "", Preference(beta=2.0)),
        (PAIRS | {"hub_model_id": "lab/zephyr-ORPO"}, "", Preference(loss=PreferenceLoss.ORPO, beta=2.0)),
        (PAIRS | {"label_smoothing": 0.1}, "train.preference=dpo", Preference(beta=2.0, label_smoothing=0.1)),
        (PAIRS | {"undesirable_weight": 1.5}, "train.preference=kto",
         Preference(loss=PreferenceLoss.KTO, beta=2.0, undesirable_weight=1.5)),
        (PAIRS | {"gamma_beta_ratio": 0.5}, "", Preference(loss=PreferenceLoss.SIMPO, beta=2.0, margin=1.0)),
        (TORCHTUNE_DPO, "", Preference(beta=0.2, label_smoothing=0.1)),
        (AXOLOTL | {"rl": "kto", "rl_beta": 0.5, "kto_desirable_weight": 0.2}, "",
         Preference(loss=PreferenceLoss.KTO, beta=0.5, desirable_weight=0.2)),
        (AXOLOTL | {"rl": "orpo", "orpo_alpha": 0.3}, "", Preference(loss=PreferenceLoss.ORPO, beta=0.3)),
        (LLAMA_FACTORY | {"stage": "kto", "pref_loss": "sigmoid", "kto_rejected_weight": 2}, "",
         Preference(loss=PreferenceLoss.KTO, undesirable_weight=2)),
    ],
)  # fmt: skip
def test_the_loss_of_pairs_and_its_arguments(read, content, behind, expected):
    run = read(content, behind=behind)
    length = next(content[key] for key in ("max_length", "sequence_len", "cutoff_len", "tokenizer") if key in content)

    assert run.train.preference == expected
    assert run.sequence_length == 2 * (length["max_seq_len"] if isinstance(length, dict) else length)
    is_assumed = "output_dir" in content or "hub_model_id" in content
    assert read.notes[0].startswith("assumed: ") == is_assumed


def test_a_length_that_the_data_have_is_assumed_to_be_the_longest(read, tmp_path):
    content = TORCHTUNE | {"tokenizer": {"max_seq_len": None}, "dataset": {"packed": False}}
    run = read(content)

    assert run.sequence_length == 131072
    assert "assumed: sequences of 131072 tokens" in read.notes[0]
    assert "tokenizer.max_seq_len=TOKENS" in read.notes[0]
    written = import_configuration(str(tmp_path / "part0.yaml"), engine="native", cluster="h100-8x1")
    assert f"\n# {read.notes[0]}\n" in written.text
    assert read(content, behind="data.sequence_length=2048").sequence_length == 2048
    assert not any("assumed" in note for note in read.notes)


def test_adapters_of_torchtune_with_magnitudes(read):
    model = {"_component_": "torchtune.models.llama3.lora_llama3_8b", "use_dora": True, "lora_attn_modules": ["q_proj"]}
    run = read(TORCHTUNE | {"model": model})

    assert run.lora.use_dora
    assert (run.lora.rank, run.lora.targets) == (8, ("query",))


def test_what_is_missing_is_given_behind_the_file(read):
    without = TORCHTUNE | {"tokenizer": {"max_seq_len": None}}
    with pytest.raises(InputError, match=r"needs tokenizer.max_seq_len=TOKENS"):
        read(without)
    run = read(without, behind="tokenizer.max_seq_len=4096 model=qwen3-0.6b train.steps=700 epochs=1")

    assert (run.sequence_length, run.model.name, run.num_steps) == (4096, "qwen3-0.6b", 700)
    assert run.lora.base_format == "nf4_double"


def test_json_of_any_depth_is_refused(tmp_path, meshwright):
    (tmp_path / "deep.json").write_text('{"base_model": ' + "[" * 5000 + "]" * 5000 + "}")
    result = meshwright("import", str(tmp_path / "deep.json"), "--cluster", "h100-8x1")

    assert result.exit_code == 2
    assert "internal error" not in result.stderr


def test_contradicting_files_are_refused(read):
    accumulated = ACCELERATE | {"distributed_type": "DEEPSPEED", "fsdp_config": {},
                                "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1}}  # fmt: skip
    with pytest.raises(InputError, match="accumulation: got 'gradient_accumulation_steps: 4"):
        read(TRAINING_ARGUMENTS, accumulated)
    with pytest.raises(InputError, match="several trainers"):
        read(AXOLOTL, TRL)


def test_attention_of_older_llama_factory_is_a_switch(read):
    assert read(LLAMA_FACTORY | {"flash_attn": True}).stack.features.attention == "fa2"
    assert read(LLAMA_FACTORY | {"flash_attn": False}) == read(LLAMA_FACTORY)


def test_experts_that_stay_wide_are_noted(read):
    mixture = AXOLOTL | {"base_model": "mistralai/Mixtral-8x7B-v0.1", "adapter": "qlora", "lora_r": 8, "lora_alpha": 8,
                         "load_in_4bit": True, "lora_target_modules": ["q_proj"], "fsdp_config": None}  # fmt: skip
    read(mixture)
    assert any("experts in 16 bits" in note for note in read.notes)
    read(mixture | {"quantize_moe_experts": True})
    assert not any("experts in 16 bits" in note for note in read.notes)


@pytest.mark.parametrize(
    ("given", "targets"),
    [("model.layers.[\\d]+.(mlp|self_attn).(up|q|o)_proj", ("query", "output", "up")),
     ("model.language_model.layers.[\\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|q)_proj", ("query", "up")),
     ("q_proj, k_proj", ("query", "key")), (["self_attn.v_proj", "down_proj"], ("value", "down")), ("all-linear", 7)],
)  # fmt: skip
def test_targets_of_adapters(read, given, targets):
    found = read(TRL | {"lora_target_modules": given}).lora.targets
    assert found == targets or len(found) == targets


def test_a_feed_forward_block_without_a_gate_has_no_adapter_of_one(read):
    """Modules of Phi-1.5: q_proj, k_proj, v_proj, dense, fc1, fc2."""
    adapted = AXOLOTL | {"base_model": "microsoft/phi-1_5", "adapter": "lora", "lora_r": 8, "lora_alpha": 16}
    run = read(adapted | {"lora_target_linear": True})
    assert run.lora.targets == ("query", "key", "value", "output", "up", "down")
    assert estimate_run(run).memory.reserved_bytes > 0
    named = read(adapted | {"lora_target_modules": ["q_proj", "gate_proj"]})
    assert named.lora.targets == ("query",)
    assert any("phi-1.5 has no gate_proj" in note for note in read.notes)


def test_ranks_by_module_and_chosen_layers(read):
    lora = read(PATTERNED).lora
    assert (lora.ranks, lora.alphas, lora.layers) == ({"up": 4}, {"query": 8.0}, (0, 2))
    assert [read(one).lora.use_dora for one in (TRL, TRL | {"use_dora": True})] == [False, True]
    assert lora.modules_to_save == ("embedding", "head")


@pytest.mark.parametrize(
    "content", [AXOLOTL | {"neftune_noise_alpha": 5}, TRL | {"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1}]
)
def test_noise_and_smoothed_labels_are_carried_over(read, content):
    train = read(content).train
    assert (train.neftune_alpha, train.label_smoothing) == (5.0, content.get("label_smoothing_factor", 0.0))


def test_adapters_that_begin_in_their_base(read):
    factory = LLAMA_FACTORY | {"quantization_bit": None, "pissa_init": True}
    adapted = AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    found = [read(factory), read(factory | {"pissa_iter": 4}), read(factory | {"pissa_iter": -1})]
    found += [read(adapted | {"peft_init_lora_weights": name}) for name in ("olora", "pissa_niter_8", True)]
    inits = ["pissa_niter_16", "pissa_niter_4", "pissa", "olora", "pissa_niter_8", "standard"]
    assert [run.lora.init for run in found] == inits
    with pytest.raises(InputError, match=r"peft_init_lora_weights: run files do not have it: got 'loftq'"):
        read(adapted | {"peft_init_lora_weights": "loftq"})


def test_rank_stabilised_adapters_have_the_same_scale(read):
    assert read(TRL | {"use_rslora": True}).lora.alpha == pytest.approx(64 * 32**0.5)


def test_weights_in_32_bits_are_estimated(read):
    full = {"finetuning_type": "full", "quantization_bit": None, "fp16": None, "bf16": True}
    assert read(LLAMA_FACTORY | full).stack.framework == "transformers-fp32"
    assert read(LLAMA_FACTORY | full | {"pure_bf16": True}).stack.framework == "transformers"
    assert not any("in 32 bits" in note for note in read.notes)


def test_a_base_that_trl_loads_in_32_bits_takes_twice_the_memory(read):
    without = {key: value for key, value in TRL.items() if key != "load_in_4bit"}
    wide, narrow = (read(without | {"dtype": dtype}) for dtype in ("float32", "bfloat16"))
    assert [run.stack.framework for run in (wide, narrow)] == ["transformers-fp32-base", "transformers-fp32"]
    weights = [estimate_run(run).memory_of_ranks[0].parts_bytes["weights"] for run in (wide, narrow)]
    assert 1.9 < weights[0] / weights[1] < 2.0  # adapters have 32 bits in both
    assert read(LLAMA_FACTORY | {"quantization_bit": None}).stack.framework == "transformers-fp32"


def test_gradients_are_whole_between_micro_batches_under_fsdp(read):
    full = AXOLOTL | {"accelerator_config": {}}
    each = AXOLOTL | {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    lora = AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    for content, is_noted in (
        (full, True), (each, False), (full | {"gradient_accumulation_steps": 1}, False), (lora, False),
    ):  # fmt: skip
        run = read(content)
        assert bool(run.stack.features.reduces_once) == is_noted
        assert any("gradients are whole until the last micro-batch" in note for note in read.notes) == is_noted


def test_names_of_weights_in_other_formats_are_noted(read):
    """Their base is smaller than the one that is read, unless the file says so itself."""
    of_4_bits = LLAMA_FACTORY | {"model_name_or_path": "TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ"}
    for content, is_noted in ((of_4_bits, False), (of_4_bits | {"quantization_bit": None}, True)):
        read(content)
        assert any("weights as they are stored (gptq), not in bf16" in note for note in read.notes) == is_noted


def test_open_instruct(read):
    content = {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "tokenizer_name": "meta-llama/Meta-Llama-3-8B",
        "use_slow_tokenizer": True, "max_seq_length": 4096, "per_device_train_batch_size": 1, "learning_rate": 5e-6,
        "gradient_accumulation_steps": 4, "lr_scheduler_type": "linear", "warmup_ratio": 0.03, "weight_decay": 0.0,
        "num_train_epochs": 2, "with_tracking": True, "checkpointing_steps": "epoch", "output_dir": "out",
    }  # fmt: skip
    run = read(content, DEEPSPEED | {"zero_optimization": {"stage": 3}})
    assert (run.model.name, run.sequence_length, run.global_batch, run.plan.micro_batch) == ("llama3-8b", 4096, 32, 1)
    assert (run.plan.sharding.name, str(run.plan.recompute)) == ("PARAMETERS", "none")
    assert (run.precision.name, run.lora, run.optimizer.gradient_clip) == ("bf16", None, None)
    assert (run.optimizer.schedule, run.optimizer.warmup_ratio, run.optimizer.learning_rate) == ("linear", 0.03, 5e-6)
    lora = read(content | {"use_lora": True, "use_qlora": True}).lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.base_format, len(lora.targets)) == (
        64,
        16.0,
        0.1,
        "nf4_double",
        7,
    )
    with pytest.raises(InputError, match="of another program of open-instruct: beta"):
        read(content | {"beta": 0.1})


def test_each_project_is_recognised_by_its_keys(read, tmp_path):
    for content, project in [
        (TRAINING_ARGUMENTS, "transformers"), (TRL, "TRL"), (AXOLOTL, "axolotl"), (LLAMA_FACTORY, "LLaMA-Factory"),
        (TORCHTUNE, "torchtune"), (LITGPT, "litgpt"), (ACCELERATE, "accelerate"), (DEEPSPEED, "DeepSpeed"),
    ]:  # fmt: skip
        (tmp_path / "one.json").write_text(json.dumps(content))
        found = recognised(tmp_path / "one.json")
        assert (found.project, found.engine) == (project, "native")
        assert found.is_part is (project in ("accelerate", "DeepSpeed"))


def test_files_of_firefly_train_adapters_of_codes_unless_they_say_otherwise(read):
    given = {
        "model_name_or_path": "meta-llama/Llama-2-7b-hf", "train_file": "x", "template_name": "llama2", "fp16": True,
        "max_seq_length": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16,
        "learning_rate": 2e-4,
    }  # fmt: skip
    run = read(given)
    assert (run.lora.rank, run.lora.alpha, run.lora.base_format) == (64, 16.0, "nf4_double")
    assert len(run.lora.targets) == 7
    assert read(given | {"train_mode": "lora", "lora_rank": 8}).lora.base_format == "full"
    assert read(given | {"train_mode": "full"}).lora is None
    with pytest.raises(InputError, match="pairs of answers are not read"):
        read(given | {"task_type": "dpo"})
