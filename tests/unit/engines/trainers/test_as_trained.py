"""Runs of trainers' configurations are what the trainers do: rates, modules, optimizers; files."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from ruamel.yaml import YAML

from meshwright.answers.run_import import import_configuration
from meshwright.engines.trainers.tables import table
from meshwright.errors import InputError
from meshwright.training.optimizer import learning_rate

ARGUMENTS = {
    "model_name_or_path": "Qwen/Qwen3-8B", "max_length": 1024, "output_dir": "out", "per_device_train_batch_size": 2,
    "max_steps": 60, "learning_rate": 1e-4, "bf16": True,
}  # fmt: skip
ADAPTED = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "dataset_name": "x", "use_peft": True, "max_steps": 10}
OF_DEEPSPEED = {
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}  # fmt: skip
BEHIND = "model=llama3.1-8b data.sequence_length=2048"


@pytest.mark.parametrize(
    ("schedule", "keys", "warmup"),
    [
        ("linear", {}, 7), ("cosine", {}, 7), ("cosine_with_restarts", {"num_cycles": 3}, 7), ("inverse_sqrt", {}, 7),
        ("polynomial", {"power": 2.0, "lr_end": 1e-6}, 7), ("polynomial", {"lr_end": 0.0, "power": 2.0}, 0),
        ("cosine_with_min_lr", {"min_lr": 1e-5}, 7), ("warmup_stable_decay", {"num_decay_steps": 20}, 7),
        ("constant_with_warmup", {}, 7),
    ],
)  # fmt: skip
def test_rates_are_those_of_transformers(read, schedule, keys, warmup):
    """Of every step; those of transformers begin with a rate of 0, which trains nothing."""
    transformers = pytest.importorskip("transformers")
    more = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": keys, "warmup_steps": warmup}
    run = read(ARGUMENTS | more)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=60, scheduler_specific_kwargs=keys or None
    )
    for step in range(60):
        optimizer.step()
        theirs.step()
        found = learning_rate(run.optimizer, step=step, num_steps=60)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-16), step


@pytest.mark.parametrize(("decay", "warmup", "is_noted"), [(50, 10, False), (50, 11, True), (60, 0, False)])
def test_a_decay_that_begins_within_the_warm_up_is_noted(read, decay, warmup, is_noted):
    """`_get_wsd_scheduler_lambda` of transformers takes up its curve where the warm-up ends."""
    more = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": decay}}
    read(ARGUMENTS | more | {"warmup_steps": warmup})
    assert any("begins within the warm-up" in note for note in read.notes) is is_noted


def test_keys_that_json_has_twice_are_noted(read, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1, "stage": 3}, "bf16": {"enabled": true}}')
    run = read(ARGUMENTS | {"deepspeed": "ds.json"})
    assert run.plan.sharding.name == "PARAMETERS"
    assert any(note == "ds.json has keys twice, of which the last counts: stage" for note in read.notes)


def test_files_of_deepspeed_that_a_trainer_ships_need_not_lie_there(read):
    axolotl = {"base_model": "NousResearch/Meta-Llama-3-8B", "sequence_len": 512, "micro_batch_size": 1,
               "learning_rate": 1e-4, "max_steps": 10}  # fmt: skip
    run = read(axolotl | {"deepspeed": "axolotl/deepspeed_configs/zero3_bf16_cpuoffload_all.json"})
    assert (run.plan.sharding.name, run.plan.offload.value) == ("PARAMETERS", "optimizer")
    assert any("is the file of axolotl's own repository" in note for note in read.notes)
    with pytest.raises(InputError, match="names a file that is not here"):
        read(axolotl | {"deepspeed": "my_deepspeed_configs/zero3_bf16.json"})


def test_a_warm_up_that_does_not_begin_at_0_is_noted(read):
    more = {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    read(ARGUMENTS | more | {"warmup_steps": 5})
    assert any("does not begin at 0" in note for note in read.notes)


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("meta-llama/Llama-3.1-8B", ("query", "value")), ("microsoft/phi-2", ("query", "value", "up", "down")),
        ("EleutherAI/pythia-12b", ("qkv",)), ("tiiuae/falcon-7b", ("qkv",)), ("openai-community/gpt2", ("qkv",)),
    ],
)  # fmt: skip
def test_modules_that_peft_chooses_where_none_are_named(read, model, targets):
    assert read(ADAPTED | {"model_name_or_path": model}).lora.targets == targets


def test_families_for_which_peft_has_no_modules_name_them(read):
    """PEFT: "Please specify `target_modules` in `peft_config`"."""
    phi3 = ADAPTED | {"model_name_or_path": "microsoft/Phi-3-mini-4k-instruct"}
    with pytest.raises(InputError, match="lora_target_modules: names no module"):
        read(phi3)
    assert read(phi3 | {"lora_target_modules": ["o_proj"]}).lora.targets == ("output",)


def test_modules_that_the_model_lacks_are_passed_over_as_in_peft(read):
    """Of Phi-3 attention's three matrices are one."""
    phi3 = ADAPTED | {"model_name_or_path": "microsoft/Phi-3-mini-4k-instruct"}
    assert read(phi3 | {"lora_target_modules": ["q_proj", "v_proj", "o_proj"]}).lora.targets == ("output",)
    assert len([note for note in read.notes if "PEFT passes it over" in note]) == 2
    with pytest.raises(InputError, match="names no module to adapt"):
        read(phi3 | {"lora_target_modules": ["q_proj"]})
    assert read(phi3 | {"lora_target_modules": "all-linear"}).lora.targets == ("output", "qkv", "gate", "up", "down")
    assert any("gate_up_proj is read as one of gate and one of up" in note for note in read.notes)


def test_our_table_of_modules_is_that_of_peft():
    peft = pytest.importorskip("peft.utils.constants")
    modules = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = {family: model_type for model_type, family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()} | {
        "Gemma3ForCausalLM": "gemma3_text"
    }
    for family, targets in table("trl").values["targets"].items():
        assert targets.split(",") == modules[names[family]], family


@pytest.mark.parametrize("name", ["layers.3.self_attn.q_proj", "model.layers.0.mlp.up_proj", "3.q_proj", "mlp.q_proj"])
def test_modules_of_single_layers_are_refused(read, name):
    with pytest.raises(InputError, match="a module that run files do not adapt"):
        read(ADAPTED | {"lora_target_modules": [name]})
    assert read(ADAPTED | {"lora_target_modules": ["self_attn.k_proj"]}).lora.targets == ("key",)


def test_the_optimizer_of_deepspeed_has_its_own_defaults(read):
    optimizer = read(OF_DEEPSPEED, behind=BEHIND).optimizer
    assert (optimizer.betas, optimizer.epsilon, optimizer.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)


def test_the_rate_of_deepspeed_is_that_of_its_scheduler(read):
    params = {"warmup_max_lr": 1e-5, "warmup_num_steps": 10, "total_num_steps": 100, "warmup_min_lr": 1e-7}
    scheduled = OF_DEEPSPEED | {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    with pytest.raises(InputError, match="contradict each other: learning_rate"):
        read(scheduled, behind=BEHIND)
    scheduled["optimizer"] = {"type": "AdamW", "params": {}}
    run = read(scheduled, behind=BEHIND)
    assert (run.optimizer.learning_rate, run.optimizer.warmup_steps, run.num_steps) == (1e-5, 10, 100)
    assert any("logarithm" in note for note in read.notes)
    assert any("warmup_min_lr: 1e-07 is not carried over" in note for note in read.notes)


@pytest.mark.parametrize(
    ("kind", "rate", "warmup", "final"),
    [("WarmupLR", 1e-3, 1000, 0.1), ("WarmupDecayLR", 1e-3, 1000, 0.0), ("WarmupCosineLR", 1e-4, 1000, 1e-4)],
)
def test_schedulers_of_deepspeed_have_its_defaults(read, kind, rate, warmup, final):
    """deepspeed/runtime/lr_schedules.py: 1,000 steps of warm-up, up to 0.001 where the optimizer's rate is not used."""
    params = {"lr": 1e-4} if rate == 1e-4 else {}
    optimizer = {"optimizer": {"type": "Lion", "params": params}}
    of_all = {"total_num_steps": 5000} if kind != "WarmupLR" else {}
    run = read(OF_DEEPSPEED | optimizer | {"scheduler": {"type": kind, "params": of_all}}, behind=BEHIND).optimizer
    assert (run.learning_rate, run.warmup_steps, run.final_ratio, run.betas) == (rate, warmup, final, (0.9, 0.99))


def test_a_trainer_does_not_change_the_defaults_of_a_scheduler_of_deepspeed(read):
    """Its values are those of keys that the file has as "auto"."""
    scheduled = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(InputError, match=r"learning_rate: 0.0001 in .*warmup_max_lr by default: 0.001"):
        read(ARGUMENTS, scheduled)
    scheduled["scheduler"]["params"] = {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    optimizer = read(ARGUMENTS | {"warmup_steps": 7}, scheduled).optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-4, 7)


def test_what_deepspeed_changes_of_the_batch_and_the_states_is_not_lost(read):
    with pytest.raises(InputError, match=r"follows the number of devices: elasticity\.enabled"):
        read(OF_DEEPSPEED | {"elasticity": {"enabled": True, "max_train_batch_size": 64}}, behind=BEHIND)
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    read(OF_DEEPSPEED | {"zero_optimization": offload}, behind=BEHIND)
    assert any("offload_optimizer.ratio: 0.3" in note for note in read.notes)


@pytest.mark.parametrize(
    ("params", "words"),
    [({"betas": "[0.9, 0.95]"}, "betas: must be two numbers"), ({"betas": [0.9]}, "betas: must be two numbers"),
     ({"adam_w_mode": False, "weight_decay": 0.1}, "no weight decay within the gradient")],
)  # fmt: skip
def test_settings_of_the_optimizer_are_not_dropped(read, params, words):
    with pytest.raises(InputError, match=words):
        read(OF_DEEPSPEED | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4} | params}}, behind=BEHIND)


@pytest.mark.parametrize(
    "more",
    [
        {"model_name_or_path": "9" * 5000},
        {"lora_modules_to_save": [[]]},
        {"deepspeed": "x" * 5000},
        {"fsdp": {"a": 1}},
        {"fsdp": 9},
        {"fsdp": "false"},
        {"bf16": True, "fp16": True},
    ],
    ids=["model", "modules", "file", "mapping", "number", "text", "formats"],
)
def test_hostile_values_are_one_error(read, more):
    with pytest.raises(InputError):
        read(ADAPTED | more)


@pytest.mark.parametrize("folder", ["of two words", "lr=1e-4"])
def test_paths_with_spaces_and_equal_signs(tmp_path, folder):
    place = tmp_path / folder / "train.yaml"
    place.parent.mkdir()
    YAML(typ="safe").dump(ARGUMENTS, place)
    assert import_configuration(str(place), engine=None, cluster="h100-8x1").run.num_steps == 60


def test_the_folder_of_the_shell_and_lines_of_settings(tmp_path, monkeypatch):
    (tmp_path / "train.json").write_text(json.dumps(ARGUMENTS))
    monkeypatch.chdir(tmp_path)
    for source, steps in itertools.product([".", "train.json"], [60, 7]):
        given = source if steps == 60 else f"{source}\nmax_steps=7"
        assert import_configuration(given, engine=None, cluster="h100-8x1").run.num_steps == steps


def test_all_that_is_missing_is_asked_for_at_once(read):
    """A model that only the hub has, the length of sequences and the sizes of adapters."""
    bare = {"base_model": "nobody/unheard-7b", "adapter": "lora", "lora_target_linear": True,
            "micro_batch_size": 1}  # fmt: skip
    with pytest.raises(InputError) as caught:
        read(bare)
    asked = "model=NAME learning_rate=RATE lora_r=NUMBER lora_alpha=NUMBER"
    assert f'behind the file: "part0.yaml {asked}"' in str(caught.value.hint)
    run = read(bare, behind="model=llama3.1-8b sequence_len=512 learning_rate=1e-4 lora_r=4 lora_alpha=8")
    assert (run.model.name, run.sequence_length, run.lora.rank) == ("llama3.1-8b", 512, 4)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_of_experts_are_refused_with_the_way_on(read, model, targets):
    """PEFT adapts experts, which are parameters of all experts in transformers 5, under both names."""
    mixture = ADAPTED | {"model_name_or_path": model, "lora_target_modules": targets, "packing": True}
    with pytest.raises(InputError, match=r"run files have no adapters of experts.* down of") as caught:
        read(mixture)
    behind = str(caught.value.hint).partition("part0.yaml ")[2].partition('"')[0]
    run = read(mixture, behind=behind)
    assert "output" in run.lora.targets
    assert {*run.lora.targets} <= {"query", "key", "value", "output"}


def test_fsdp_in_a_file_that_a_configuration_names(read, tmp_path):
    named = ARGUMENTS | {"fsdp": "full_shard auto_wrap", "fsdp_config": "conf/fsdp.json"}
    with pytest.raises(InputError, match=r"names a file that is not here: got 'fsdp_config: conf/fsdp.json'"):
        read(named)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "fsdp.json").write_text('{"fsdp_offload_params": true, "xla": false}')
    assert read(named) == read(named | {"fsdp_config": {"offload_params": True}})
    assert read(named | {"fsdp_config": ""}) == read(named | {"fsdp_config": {}})
    (tmp_path / "conf" / "fsdp.json").write_text('{"fsdp_lazy": true}')
    with pytest.raises(InputError, match=r"no such key: got 'fsdp_config.fsdp_lazy'"):
        read(named)
