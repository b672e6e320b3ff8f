"""Configurations of NeMo 1.x are read as the options of Megatron-LM that their fields stand for."""

from __future__ import annotations

import pytest
from tests.unit.engines.megatron.test_importing import imported

from meshwright.engines.megatron.megatron_bridge.files import is_bridge_yaml
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError
from meshwright.specs.plan import Schedule, Sharding

NEMO = """
run: {name: small, results_dir: "${base_results_dir}/${.name}"}
trainer:
  num_nodes: 1
  devices: 8
  precision: bf16
  max_steps: 100
  gradient_clip_val: 0.5
  max_epochs: null
  replace_sampler_ddp: False
model:
  micro_batch_size: 2
  global_batch_size: 32
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  encoder_seq_length: 64
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 8
  hidden_size: 64
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  num_query_groups: 2
  normalization: rmsnorm
  activation: fast-swiglu
  bias: False
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  rotary_base: 1.0e6
  sequence_parallel: True
  megatron_amp_O2: True
  fp8: False
  fp8_hybrid: True
  seed: 5
  tokenizer: {library: huggingface, type: mistralai/Mixtral-8x7B-v0.1}
  nsys_profile: {enabled: False, ranks: [0]}
  optim:
    name: mcore_distributed_optim
    lr: 2.0e-4
    weight_decay: 0.1
    betas: [0.9, 0.95]
    overlap_grad_sync: True
    sched: {name: CosineAnnealing, warmup_steps: 5, constant_steps: 20, min_lr: 2.0e-5}
  data:
    seq_length: ${training.model.encoder_seq_length}
    data_prefix: [0.5, "${data_dir}/a_document", 0.5, "${data_dir}/b_document"]
    splits_string: "99,1,0"
"""


def written(tmp_path, text: str = NEMO) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_configuration_of_nemo(tmp_path):
    path = written(tmp_path)
    assert recognised(tmp_path / "small.yaml").project == "NeMo"
    run, notes = imported(path)
    model, plan, optimizer = run.model, run.plan, run.optimizer
    assert (model.hidden, model.num_layers, model.ffn_hidden, model.vocab) == (64, 8, 256, 32_000)
    assert (model.attention.num_kv_heads, model.attention.bias, model.gated_ffn) == (2, False, True)
    assert (model.tied_embeddings, model.norm_bias, model.rope.theta) == (False, False, 1e6)
    assert (plan.tensor, plan.pipeline, plan.virtual_pipeline, plan.schedule) == (2, 2, 2, Schedule.INTERLEAVED)
    assert (plan.sharding, plan.sequence_parallel, run.precision.name) == (Sharding.OPTIMIZER, True, "bf16")
    assert (run.global_batch, run.micro_batch, run.sequence_length, run.train.steps) == (32, 2, 64, 100)
    assert (optimizer.learning_rate, optimizer.betas, optimizer.gradient_clip) == (2e-4, (0.9, 0.95), 0.5)
    assert (optimizer.warmup_steps, optimizer.weight_decay, run.train.seed) == (5, 0.1, 5)
    assert "decays the rate until step 80" in notes
    assert "data of 0.5 <data_dir>/a_document 0.5 <data_dir>/b_document is not carried over" in notes
    assert "fp8" not in notes


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fp8: False", "unheard_of: 3", "no such option: got '--model.unheard_of'"),
        ("megatron_amp_O2: True", "megatron_amp_O2: False", "--model.megatron_amp_O2 has a value that is not read"),
        ("fast-swiglu", "fast-geglu", "--model.activation has a value that is not read: got 'fast-geglu'"),
        ("max_steps: 100", "max_steps: ${steps}", "cannot be expanded, it is not set"),
        ("ffn_hidden_size: ${multiply:4, ${.hidden_size}}", "mcore_gpt: True", "lacks model.ffn_hidden_size"),
        ("name: mcore_distributed_optim", "name: sgd", "--model.optim.name has a value that is not read: got 'sgd'"),
    ],
)  # fmt: skip
def test_what_is_refused_of_nemo(old, new, words, tmp_path):
    assert old in NEMO
    with pytest.raises(InputError) as caught:
        imported(written(tmp_path, NEMO.replace(old, new)))
    assert words in str(caught.value)


def test_defaults_and_variables_of_nemo(tmp_path):
    absent = ("gradient_clip_val: 0.5", "betas: [0.9, 0.95]", "weight_decay: 0.1", "bias: False")
    text = NEMO.replace("max_steps: 100", "max_steps: ${steps}")
    for line in absent:
        text = text.replace(f"{line}\n", "\n")
    run, _ = imported(f"{written(tmp_path, text)} steps=40")
    assert (run.train.steps, run.optimizer.gradient_clip, run.optimizer.weight_decay) == (40, None, 0)
    assert (run.optimizer.betas, run.model.attention.bias) == ((0.9, 0.999), True)


def test_a_rate_that_is_held_longer_than_the_training_is_at_its_end_at_once(tmp_path):
    _, notes = imported(written(tmp_path, NEMO.replace("constant_steps: 20", "constant_steps: 200")))
    assert "decays the rate until step 1, " in notes
    _, notes = imported(written(tmp_path, NEMO.replace("constant_steps: 20", "constant_steps: 0")))
    assert "decays the rate" not in notes


def test_parts_of_other_programs_are_not_of_megatron_bridge(tmp_path):
    for target, is_one in (("nemo.collections.nerf.Renderer", False), ("megatron.bridge.training.config.X", True)):
        path = tmp_path / "part.yaml"
        path.write_text(f"_target_: {target}\nmodel: {{a: 1}}\n", encoding="utf-8")
        assert is_bridge_yaml(str(path)) is is_one


def test_fp8_of_nemo(tmp_path):
    own = "  fp8_e4m3: true\n  tp_only_amax_red: true\n  tp_comm_atomic_ag: false\n"
    text = NEMO.replace("model:\n", f"model:\n{own}", 1)
    run, notes = imported(written(tmp_path, text))
    assert (run.precision.name, "E5M2" in notes) == ("bf16", False)
    assert "--model.tp_only_amax_red true" in notes
    assert "tp_comm_atomic_ag" not in notes
    run, notes = imported(written(tmp_path, text.replace("fp8: False", "fp8: True")))
    assert (run.precision.name, "E5M2" in notes) == ("fp8_delayed", True)
