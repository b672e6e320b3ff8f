"""Python programs that call a trainer: their values as text, and what only a run of them decides."""

from __future__ import annotations

import pytest

from meshwright.answers.run_import import import_configuration
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError

UNSLOTH = """
import os
from unsloth import FastLanguageModel, is_bfloat16_supported

raise SystemExit("programs are read, not run")
LENGTH = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/llama-3-8b-bnb-4bit", max_seq_length=LENGTH, dtype=None, %s)
model = FastLanguageModel.get_peft_model(
    model, r=32, target_modules=["q_proj", "v_proj"], use_gradient_checkpointing="unsloth", loftq_config=None)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=data, dataset_text_field="text", max_seq_length=LENGTH,
    args=TrainingArguments(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60,
        learning_rate=float(os.environ.get("RATE", "2e-4")), fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(), optim="adamw_8bit", weight_decay=0.01, output_dir=f"out/{name}"))
trainer.train()
"""
TRL = """
import argparse
from dataclasses import dataclass

@dataclass
class Choice:
    rank: int = 8
    model: str = "meta-llama/Llama-3.2-1B"

EPOCHS: int = 3
TOKENS = 2 * 1024

def main(args):
    choice = Choice(rank=16)
    model = AutoModelForCausalLM.from_pretrained(choice.model, torch_dtype=torch.bfloat16, device_map="auto")
    peft_config = LoraConfig(r=choice.rank, lora_alpha=choice.rank * 2, target_modules="all-linear")
    trainer = SFTTrainer(model=model, args=SFTConfig(
        max_length=TOKENS, learning_rate=args.lr, num_train_epochs=EPOCHS, per_device_train_batch_size=4,
        bf16=True, report_to="none"), peft_config=%s)
    %s

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    main(args)
"""


@pytest.fixture
def read(tmp_path):
    def run(text: str, *, behind: str = "", cluster: str = "h100-1x1"):
        (tmp_path / "train.py").write_text(text)
        found = import_configuration(f"{tmp_path}/train.py {behind}", engine=None, cluster=cluster)
        run.notes = " ".join(found.notes)
        return found.content

    return run


def test_a_program_with_unsloth_is_read(read):
    found = read(UNSLOTH % "load_in_4bit=True")
    assert (found["model"], found["data"]["sequence_length"]) == ("llama3-8b", 4096)
    assert found["batch"] == {"global_sequences": 8, "micro": 2}
    assert (found["precision"], found["parallel"]["recompute"], found["train"]["steps"]) == ("bf16", "full", 60)
    adapter = {"rank": 32, "alpha": 16.0, "dropout": 0.0, "targets": ["query", "value"], "base_format": "nf4_double"}
    assert found["lora"] == adapter
    optimizer = found["optimizer"]
    assert (optimizer["learning_rate"], optimizer["states"], optimizer["warmup_steps"]) == (2e-4, "int8", 5)
    assert "its own defaults: RATE 2e-4" in read.notes
    assert read(UNSLOTH % "load_in_4bit=True", cluster="h100-8x1")["batch"]["global_sequences"] == 64


def test_unsloth_has_defaults_of_its_own(read):
    text = UNSLOTH.replace('r=32, target_modules=["q_proj", "v_proj"], ', "") % "load_in_8bit=False"
    found = read(text)["lora"]
    assert (found["rank"], len(found["targets"]), found["base_format"]) == (16, 7, "nf4_double")
    assert read(UNSLOTH % "load_in_4bit=False")["lora"]["base_format"] == "full"
    config = UNSLOTH.replace("TrainingArguments(", "SFTConfig(").replace('optim="adamw_8bit", weight_decay=0.01, ', "")
    found = read(config % "")
    assert (found["optimizer"]["states"], found["optimizer"]["weight_decay"]) == ("int8", 0.001)
    assert "defaults of the newest classes" in read.notes


def test_names_options_parameters_and_classes_have_values(read):
    found = read(TRL % ("peft_config", ""))
    assert (found["model"], found["data"]["sequence_length"]) == ("llama3.2-1b", 2048)
    assert (found["optimizer"]["learning_rate"], found["train"]["epochs"]) == (1e-4, 3)
    assert (found["lora"]["rank"], found["lora"]["alpha"], len(found["lora"]["targets"])) == (16, 32.0, 7)
    assert found["parallel"]["recompute"] == "full"  # by default of SFTConfig
    assert "lr 0.0001" in read.notes
    assert read(TRL % ("peft_config", ""), behind="learning_rate=3e-4")["optimizer"]["learning_rate"] == 3e-4


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (UNSLOTH % "", ("max_steps=60", "max_steps=len(data)"), r"computes these values.*max_steps=len\(data\)"),
        (UNSLOTH % "", ("model = Fast", "if len(data):\n    model = Fast"), "behind a condition"),
        (UNSLOTH % "", ("loftq_config=None", 'bias="all"'), "adapters of another kind"),
        (UNSLOTH % "", ("loftq_config=None", "colour=1"), "LoraConfig.colour"),
        (UNSLOTH % "rope_scaling={'factor': 2}", ("", ""), "positions beyond"),
        (UNSLOTH % "", ("train_dataset=data", "optimizers=(AdamW(), None)"), "optimizers"),
        (UNSLOTH % "", ("LENGTH = 4096", "LENGTH = 4096\nLENGTH = 8192"), "max_seq_length=LENGTH"),
        (TRL % ("peft_config", "LoraConfig()"), ("", ""), "more than once"),
        (TRL % ("peft_config if args.lora else None", ""), ("", ""), "peft_config"),
        (
            TRL % ("None", "get_peft_model(model, other)"),
            ("    peft_config = Lora", "    x = made.by"),
            "of another kind",
        ),
        (TRL % ("None", "model.lm_head.requires_grad = False"), ("", ""), "freezes"),
        (TRL % ("peft_config", "args.lr = args.lr * 2"), ("", ""), "learning_rate=args.lr"),
        (TRL % ("peft_config", "peft_config.r = 64"), ("", ""), "changes arguments after"),
    ],
)
def test_what_only_a_run_decides_is_refused(read, text, change, message):
    with pytest.raises(InputError, match=message):
        read(text.replace(*change, 1) if change[0] else text)


def test_a_condition_that_the_text_decides_is_followed(read):
    text = TRL.replace("    peft_config =", "    if EPOCHS > 4:\n        peft_config = LoraConfig()\n    quantised =")
    assert "lora" not in read(text % ("None", ""))


def test_values_behind_the_file_count_before_defaults(read):
    text = UNSLOTH.replace("LENGTH = 4096", "LENGTH = len(data)") % ""
    found = read(text, behind="from_pretrained.max_seq_length=3072 Trainer.max_seq_length=3072 learning_rate=1e-4")
    assert (found["data"]["sequence_length"], found["optimizer"]["learning_rate"]) == (3072, 1e-4)
    text = TRL.replace("max_length=TOKENS, ", "") % ("peft_config", "")
    assert read(text)["data"]["sequence_length"] == 1024
    assert read(text, behind="max_length=512")["data"]["sequence_length"] == 512


def test_arithmetic_of_a_program_stays_small(read):
    for expression in ("9**9**9**9", "'a' * 10**12", "[0] * 10**12", "1 << 10**9"):
        with pytest.raises(InputError, match="computes these values"):
            read(UNSLOTH.replace("LENGTH = 4096", f"LENGTH = {expression}") % "")


def test_attributes_of_other_objects_may_change(read):
    assert (
        read(UNSLOTH % "" + "\nmodel.config.use_cache = False\ntokenizer.padding_side = 'right'")["lora"]["rank"] == 32
    )


def test_an_adapter_that_nothing_takes_is_none(read):
    assert "lora" not in read(TRL % ("None", ""))


@pytest.mark.parametrize(
    "text",
    [
        "SFTConfig(",
        "x = SFTConfig()",
        UNSLOTH.replace("SFTTrainer(", "DPOTrainer("),
        UNSLOTH * 2,
        "def f(SFTConfig): ...",
    ],
)
def test_libraries_and_other_objectives_are_no_configurations(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    assert recognised(tmp_path / "train.py") is None
