"""Configurations of oumi and NeMo AutoModel, whose keys are nested in sections."""

from __future__ import annotations

import pytest

from meshwright.answers.run_survey import survey
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError
from meshwright.specs.plan import Recompute, Schedule, Sharding
from meshwright.specs.run import PreferenceLoss

OUMI = """
model:
  model_name: "meta-llama/Llama-3.1-70B-Instruct"
  model_max_length: 2048
  torch_dtype_str: "bfloat16"
  attn_implementation: "sdpa"
  load_pretrained_weights: True
data:
  train:
    datasets: [{dataset_name: "yahma/alpaca-cleaned"}]
    pack: True
training:
  trainer_type: "TRL_SFT"
  use_peft: True
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  enable_gradient_checkpointing: True
  optimizer: "adamw_torch_fused"
  learning_rate: 3.0e-04
  lr_scheduler_type: "cosine_with_min_lr"
  lr_scheduler_kwargs: {min_lr_rate: 0.1}
  max_steps: 500
  warmup_steps: 100
  weight_decay: 0.01
  dataloader_num_workers: "auto"
  output_dir: "output"
peft:
  q_lora: True
  bnb_4bit_quant_type: "nf4"
  lora_r: 16
  lora_alpha: 32
  lora_target_modules: [q_proj, v_proj]
fsdp:
  enable_fsdp: True
  sharding_strategy: "SHARD_GRAD_OP"
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, max_steps: 1000, ckpt_every_steps: 50, num_epochs: 1}
dist_env: {backend: nccl, timeout_minutes: 1}
rng: {_target_: nemo_automodel.components.training.rng.StatefulRNG, seed: 1111}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.3-70B-Instruct
  torch_dtype: bf16
  attn_implementation: eager
  backend: {attn: te, linear: te}
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 4
  cp_size: 1
  pp_size: 2
  activation_checkpointing: true
  pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 2, layers_per_stage: 3,
             round_virtual_stages_to_pp_multiple: up}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, seq_length: 512}
packed_sequence: {packed_sequence_size: 1024}
optimizer: {_target_: torch.optim.AdamW, betas: [0.9, 0.95], lr: 1.0e-5, weight_decay: 0.1}
lr_scheduler: {lr_decay_style: cosine, min_lr: 2.0e-6}
clip_grad_norm: {max_norm: 0.5}
ci: {recipe_owner: somebody}
"""
MOE = """
recipe: BenchmarkingRecipeForNextTokenPrediction
benchmark: {warmup_steps: 10, num_nodes: 2}
step_scheduler: {global_batch_size: 256, local_batch_size: 4, max_steps: 30}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config: {_target_: transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}
  backend: {attn: te, experts: torch_mm, dispatcher: deepep, fake_balanced_gate: true}
distributed: {strategy: fsdp2, tp_size: 1, cp_size: 1, pp_size: 1, ep_size: 8}
packed_sequence: {packed_sequence_size: 0}
dataset: {_target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset, seq_len: 4096}
optimizer: {_target_: torch.optim.Adam, lr: 0.0001, weight_decay: 0}
"""


def test_a_run_of_oumi(read):
    run = read(OUMI)
    assert run.model.name == "llama3.1-70b"
    assert (run.sequence_length, run.global_batch, run.plan.micro_batch) == (2048, 64, 2)
    assert run.plan.sharding is Sharding.GRADIENTS
    assert run.plan.recompute is Recompute.FULL
    assert run.lora.rank == 16
    assert run.lora.targets == ("query", "value")
    assert run.lora.base_format == "nf4"
    assert run.precision.name == "bf16"
    optimizer = run.optimizer
    assert (optimizer.learning_rate, optimizer.final_ratio, optimizer.warmup_steps) == (3e-4, 0.1, 100)
    assert run.num_steps == 500
    assert not any("not packed" in note for note in read.notes)


@pytest.mark.parametrize(
    ("changed", "to", "precision", "framework"),
    [
        ('torch_dtype_str: "bfloat16"', "trust_remote_code: true", "bf16", "transformers"),
        ('torch_dtype_str: "bfloat16"', "torch_dtype_str: float32", "fp32", "transformers"),
        ("  output_dir:", "  mixed_precision_dtype: BF16\n  output_dir:", "bf16", "transformers"),
    ],
)
def test_formats_of_oumi(read, changed, to, precision, framework):
    run = read(OUMI.replace("use_peft: True", "use_peft: False").replace("q_lora: True", "").replace(changed, to))
    assert (run.precision.name, run.stack.framework) == (precision, framework)


def test_pairs_of_oumi(read):
    run = read(
        OUMI.replace("TRL_SFT", "TRL_DPO").replace("  output_dir", "  trainer_kwargs: {beta: 0.3}\n  output_dir")
    )
    assert run.train.preference.loss is PreferenceLoss.DPO
    assert run.train.preference.beta == 0.3
    assert run.sequence_length == 4096


@pytest.mark.parametrize(
    ("changed", "to", "reason"),
    [
        ("TRL_SFT", "TRL_GRPO", "trainer_type"),
        ('"nf4"', '"fp4"', "codes of another kind"),
        ("  q_lora: True", "  q_lora: True\n  q_lora_bits: 8", "bits or codes"),
        ("  attn_implementation", "  freeze_layers: [vision_model]\n  attn_implementation", "frozen"),
        ("  attn_implementation", "  attn_implementatoin: x\n  attn_implementation", "no such key"),
    ],
)
def test_what_is_not_read_of_oumi_is_refused(read, changed, to, reason):
    with pytest.raises(InputError, match=reason):
        read(OUMI.replace(changed, to))


def test_a_pipeline_of_automodel(read):
    run = read(AUTOMODEL, cluster="h100-8x2")
    plan = run.plan
    assert (plan.tensor, plan.pipeline, plan.data_shard, plan.micro_batch) == (4, 2, 2, 2)
    assert plan.schedule is Schedule.INTERLEAVED
    assert plan.virtual_pipeline == 14  # 27 stages of 3 layers, rounded up to 28
    assert plan.sharding is Sharding.GRADIENTS  # each micro-batch of a pipeline would gather again
    assert (run.global_batch, run.sequence_length) == (32, 1024)
    assert (run.optimizer.final_ratio, run.optimizer.gradient_clip) == (pytest.approx(0.2), 0.5)
    assert run.optimizer.warmup_steps == 100
    assert run.stack.framework == "nemo-automodel"
    assert run.stack.features.attention.value == "cudnn"
    assert any("the pipeline empties after each 4 sequences" in note for note in read.notes)


def test_experts_of_automodel(read):
    run = read(MOE, cluster="h100-8x2")
    assert (run.plan.expert, run.global_batch, run.plan.micro_batch) == (8, 256, 4)
    assert run.stack.features.dispatcher.value == "deepep"
    assert run.stack.features.reduces_once  # of four micro-batches
    reduced = MOE.replace("ep_size: 8", "ep_size: 8, defer_fsdp_grad_sync: false")
    assert not read(reduced, cluster="h100-8x2").stack.features.reduces_once
    assert run.weights is None
    assert run.optimizer.schedule.value == "constant"
    with pytest.raises(InputError, match="the cluster has 1 nodes") as refused:
        read(MOE)
    assert refused.value.hint == "--cluster h100-8x2"


@pytest.mark.parametrize(
    ("changed", "to", "reason"),
    [
        ("NextTokenPrediction", "VLM", "recipe of another kind"),
        ("layers_per_stage: 3", "layers_per_stage: 40", "two or more on each of 2 ranks"),
        ("  cp_size: 1", "  cp_size: 1\n  dp_size_of: 2", "no such key"),
        ("torch.optim.AdamW", "flashoptim.FlashAdamW", "run files do not have it"),
        ("dp_size: none", "dp_size: 8", "ranks are not the 2"),
        ("pp_microbatch_size: 2", "pp_microbatch_size: 3", "does not divide the batch of a rank"),
    ],
)
def test_what_is_not_read_of_automodel_is_refused(read, changed, to, reason):
    with pytest.raises(InputError, match=reason):
        read(AUTOMODEL.replace(changed, to), cluster="h100-8x2")


def test_both_are_recognised_and_read_on_the_cluster_that_they_name(tmp_path):
    for name, text in (("oumi", OUMI), ("automodel", MOE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    found = {file.path.stem: (file.project, file.cluster) for file in survey(tmp_path, cluster=None).files}
    assert found == {"oumi": ("oumi", "h100-8x64"), "automodel": ("NeMo AutoModel", "h100-8x2")}
    assert recognised(tmp_path / "oumi.yaml").engine == "native"
