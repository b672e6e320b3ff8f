"""The review of an imported run: each finding is there in a run that has the fault, and absent in one that has not."""

from __future__ import annotations

import json

import pytest
from ruamel.yaml import YAML

from meshwright.answers.run_import import import_configuration
from meshwright.answers.run_lint import review
from meshwright.cli import main

AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3-8B", "sequence_len": 2048, "micro_batch_size": 1, "max_steps": 100,
    "gradient_accumulation_steps": 4, "learning_rate": 2e-4, "gradient_checkpointing": True, "sample_packing": True,
    "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "warmup_steps": 10,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def run(**changes):
        path = tmp_path / "run.yaml"
        YAML(typ="safe").dump(AXOLOTL | changes, path)
        return path

    return run


@pytest.fixture
def reviewed(write):
    def run(**changes):
        return review(import_configuration(str(write(**changes)), engine=None, cluster="h100-8x1"))

    return run


def test_a_sound_run_gets_the_plan_of_the_planner_alone(reviewed):
    ((level, text),) = reviewed()

    assert level == "advice"
    assert "recompute full → " in text
    assert "%) shorter" in text


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"flash_attention": True}, "warning", "deprecated: flash_attention, now attn_implementation"),
        ({"warmup_steps": 100}, "warning", "100 steps of warm-up are not fewer than the run's 100"),
        ({"micro_batch_size": 13}, "warning", "the plan may fit ("),
        ({"micro_batch_size": 64, "sequence_len": 8192}, "error", "device memory: "),
    ],
)
def test_a_fault_is_found(reviewed, changes, level, text):
    assert [weight for weight, found in reviewed(**changes) if text in found] == [level]
    assert not any(text in found for _, found in reviewed())


def test_a_gain_below_one_percent_is_no_advice(reviewed):
    """Eight devices of adapters: the planner's plan is a tenth of a millisecond ahead."""
    found = reviewed(lora_target_linear=None, lora_target_modules=["q_proj", "v_proj"], lora_r=16, sequence_len=4096,
                     micro_batch_size=2, gradient_checkpointing=False)  # fmt: skip
    assert not any("`plan` takes" in text for _, text in found)


def test_errors_come_first(reviewed):
    found = reviewed(micro_batch_size=64, sequence_len=8192, flash_attention=True)

    assert [level for level, _ in found] == ["error", "warning", "advice"]


def test_where_no_plan_fits_the_review_says_so(reviewed):
    found = reviewed(base_model="llama3.1-405b", adapter=None, lora_r=None, lora_alpha=None, lora_target_linear=None)

    assert "error" in [level for level, _ in found]
    assert not any("`plan` takes" in text for _, text in found)


def test_the_command_prints_the_review_and_exits_with_1_where_the_run_cannot_start(write, capsys):
    command = ["import", str(write()), "--cluster", "h100-8x1", "--lint"]
    assert main.run(command) == 0
    assert "advice: `plan` takes" in capsys.readouterr().out
    write(micro_batch_size=64, sequence_len=8192)
    assert main.run([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["level"] == "error"
    assert main.run(["import", "--survey", ".", "--lint"]) == 2
