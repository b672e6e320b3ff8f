"""Files for TRL: read back they are the run, and TRL's own parser takes each key."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright import estimate, runfile
from meshwright.accuracy.shapes import total_parameters
from meshwright.engines.base import find_engine, refuse
from meshwright.engines.trainers.run_content import import_trainer
from meshwright.engines.trl.lower import CONFIGURATION, lower
from meshwright.errors import InputError
from meshwright.specs.run import Run
from meshwright.training.optimizer import learning_rate

PLAIN = {
    "model": "llama3.1-8b", "cluster": "h100-8x2", "engine": "trl", "batch": {"global_sequences": 64, "micro": 2},
    "data": {"sequence_length": 4096}, "train": {"steps": 40},
    "parallel": {"data_shard": 16, "sharding": "parameters", "recompute": "full"},
}  # fmt: skip
QLORA = {
    "task": "lora", "parallel": {"data_shard": 16, "sharding": "none"},
    "lora": {"rank": 8, "targets": ["query", "down"], "base_format": "nf4_double", "modules_to_save": ["head"]},
}  # fmt: skip


def made(**changes) -> Run:
    return runfile.from_mapping(json.loads(json.dumps(PLAIN | changes)))


def written(run: Run, folder: Path) -> Path:
    path = folder / CONFIGURATION
    path.write_text(lower(run, folder=folder).files[CONFIGURATION])
    return path


def read_back(run: Run, folder: Path) -> Run:
    found = import_trainer(str(written(run, folder)), cluster=run.cluster_name)
    return runfile.from_mapping(found.content)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"schedule": "cosine", "warmup_steps": 4}, {"schedule": "cosine", "final_ratio": 0.0},
        {"schedule": "linear", "final_ratio": 0.0}, {"schedule": "linear", "final_ratio": 0.2, "learning_rate": 1e-5},
        {"schedule": "constant"}, {"schedule": "constant", "warmup_ratio": 0.2},
        {"schedule": "wsd", "decay_ratio": 0.25, "decay_shape": "sqrt"}, {"schedule": "wsd", "final_ratio": 0.0},
        {"schedule": "cosine_with_restarts", "cycles": 3, "final_ratio": 0.0},
        {"schedule": "polynomial", "power": 2.0, "final_ratio": 0.01},
        {"schedule": "inverse_sqrt", "warmup_steps": 3, "final_ratio": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_rates_are_read_back(optimizer, tmp_path):
    run = made(optimizer=optimizer)
    again = read_back(run, tmp_path)
    for step in range(40):
        rates = [learning_rate(one.optimizer, step=step, num_steps=40) for one in (run, again)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9, abs=1e-16), step


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "polynomial", "inverse_sqrt"])
@pytest.mark.parametrize("warm_up", [{}, {"warmup_steps": 4}, {"warmup_ratio": 0.13}], ids=str)
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_rates_are_those_of_transformers_one_step_later(schedule, warm_up, final, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run = made(optimizer={"schedule": schedule, "final_ratio": final, "learning_rate": 1e-3, **warm_up})
    if find_engine("trl").check(run):
        return  # refused: test_what_trl_lacks_is_refused
    settings = YAML(typ="safe", pure=True).load(written(run, tmp_path))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings["learning_rate"])
    steps = settings["warmup_steps"]  # below 1: a share, which TrainingArguments.get_warmup_steps rounds up
    schedule = transformers.get_scheduler(
        settings["lr_scheduler_type"], optimizer, num_warmup_steps=steps if steps >= 1 else math.ceil(40 * steps),
        num_training_steps=40, scheduler_specific_kwargs=settings.get("lr_scheduler_kwargs"),
    )  # fmt: skip
    for step in range(40):
        optimizer.step()
        schedule.step()
        expected = learning_rate(run.optimizer, step=step, num_steps=40)
        assert schedule.get_last_lr()[0] == pytest.approx(expected, rel=1e-9, abs=1e-15), step


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"parallel": {"data_shard": 16, "sharding": "gradients", "recompute": "none"}},
        {"parallel": {"data_shard": 16, "sharding": "none", "recompute": "full"}}, QLORA,
        {"train": {"epochs": 2, "label_smoothing": 0.1, "neftune_alpha": 5.0, "seed": 7, "compile": True}},
        {"optimizer": {"gradient_clip": None, "betas": [0.8, 0.9], "epsilon": 1e-6, "weight_decay": 0.0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_is_read_back(changes, tmp_path):
    run = made(**changes)
    again = read_back(run, tmp_path)
    assert (again.model, again.lora, again.global_batch, again.sequence_length) == (
        run.model, run.lora, run.global_batch, run.sequence_length,
    )  # fmt: skip
    assert replace(again.plan, sequence_parallel=True) == run.plan  # of one tensor rank
    assert again.optimizer == run.optimizer
    of_train = ("steps", "epochs", "seed", "compile", "label_smoothing", "neftune_alpha")
    assert [getattr(again.train, name) for name in of_train] == [getattr(run.train, name) for name in of_train]


@pytest.mark.parametrize(
    ("sharding", "bytes_of_weights"),  # fp32 weights, gradients, two states; of DDP 16-bit copies and buckets too
    [("none", 4 + 4 + 8 + 2 + 4), ("gradients", (4 + 4 + 8) / 16 + 2), ("parameters", (4 + 4 + 8) / 16)],
)
def test_weights_gradients_and_states_are_in_32_bits(sharding, bytes_of_weights, tmp_path):
    run = made(model="llama3.2-1b", parallel={"data_shard": 16, "sharding": sharding, "recompute": "full"})
    held = estimate(run).memory
    of_weights = total_parameters(run.model) * bytes_of_weights
    gathered = 2.0e9 if sharding == "parameters" else 0.0  # embedding, two layers, and gradients of one
    states = held.weights_bytes + held.gradients_bytes + held.optimizer_bytes
    assert of_weights * 0.99 < states < of_weights * 1.01 + gathered
    again = estimate(read_back(run, tmp_path))
    assert again.memory == held
    assert again.step == estimate(run).step
    settings = YAML(typ="safe").load(written(run, tmp_path))
    assert ("accelerator_config" in settings) == (sharding != "none")  # else FSDP2 adds up unsharded gradients


@pytest.mark.parametrize("sharding", ["none", "gradients", "parameters"])
def test_shards_are_reduced_in_bf16_and_copies_in_fp32(sharding):
    """As accelerate's policy of FSDP2 and DDP's buckets, whether a run of TRL or an imported file is estimated."""
    plan = {"parallel": {"data_shard": 16, "sharding": sharding, "recompute": "full"}}
    known = {"model": "llama3.2-1b", "engine": "native", "precision": "bf16", **plan}

    def of_format(**stack):
        found = estimate(made(**known, stack={"framework": "transformers-fp32", **stack}))
        return found.step, found.memory

    ran = estimate(made(model="llama3.2-1b", **plan))
    assert (ran.step, ran.memory) == of_format()
    assert of_format() == of_format(gradient_format="fp32" if sharding == "none" else "bf16")
    assert of_format() != of_format(gradient_format="bf16" if sharding == "none" else "fp32")


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # earlier transformers lack the later name
@pytest.mark.parametrize("changes", [{}, QLORA, {"data": {"sequence_length": 4096, "source": "a.jsonl?text=body"}}])
def test_trl_takes_every_key(changes, tmp_path):
    trl = pytest.importorskip("trl")
    path = written(made(**changes, optimizer={"schedule": "linear", "final_ratio": 1e-4}), tmp_path)
    kinds = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    words = ["--config", str(path), "--use_cpu", "true", "--dataset_name", "NAME"]
    *found, unknown = trl.TrlParser(kinds).parse_args_and_config(words, return_remaining_strings=True)
    assert unknown == []
    _, settings, model, _ = found
    assert settings.save_strategy == "no"
    assert settings.lr_scheduler_kwargs == {"power": 1.0, "lr_end": pytest.approx(3e-8)}
    assert (settings.max_steps, settings.per_device_train_batch_size, settings.adam_epsilon) == (40, 2, 1e-8)
    if not changes.get("task"):
        assert settings.fsdp_plugin_args["reshard_after_forward"] is True
        assert settings.fsdp_plugin_args["fsdp_version"] == 2
    else:
        assert (model.load_in_4bit, model.lora_target_modules) == (True, ["q_proj", "down_proj"])


def test_data_are_named_in_the_words_of_its_script(tmp_path):
    def keys(source):
        run = made(data={"sequence_length": 4096, "source": source})
        return lower(run, folder=tmp_path).files[CONFIGURATION]

    assert "path: json" in (text := keys("talks.jsonl?format=messages"))
    assert "assistant_only_loss: true" in text
    assert "path: me/v1.5\n  name: en\n  split: train[:10%]" in keys("me/v1.5?config=en&split=train[:10%]")
    assert "data_files: talks-?.jsonl" in keys("talks-?.jsonl")
    assert f"data_files: {Path.home()}/a.parquet" in keys("~/a.parquet")
    assert "DATASET" in lower(made(), folder=tmp_path).argv


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": "qwen3-30b-a3b"}, "model.experts"), ({"model": {"base": "llama3.1-8b", "num_layers": 8}}, "model"),
        ({"precision": "fp32"}, "precision"), ({"optimizer": {"states": "int8"}}, "optimizer.states"),
        ({"optimizer": {"schedule": "cosine_with_restarts"}}, "optimizer.final_ratio"),
        ({"optimizer": {"schedule": "wsd", "warmup_steps": 4, "final_ratio": 0.1}}, "optimizer.final_ratio"),
        ({"optimizer": {"schedule": "inverse_sqrt", "final_ratio": 0.0}}, "optimizer.schedule"),
        ({"optimizer": {"schedule": "wsd", "decay_shape": "exponential"}}, "optimizer.decay_shape"),
        ({"optimizer": {"schedule": "wsd"}, "train": {"epochs": 1}}, "optimizer.schedule"),
        ({"train": {}}, "train"), ({"train": {"steps": 4, "z_loss": 1e-4}}, "train.z_loss"),
        ({"data": {"sequence_length": 4096, "source": "python-stdlib"}}, "data.source"),
        ({"data": {"sequence_length": 4096, "source": "a/b/c.bin"}}, "data.source"),
        *(
            ({"data": {"sequence_length": 4096, "source": source}}, "data.source")
            for source in (
                "a.txt", "./folder", "a/b.zst", "a.jsonl?bogus=1", "a.jsonl?split=test", "me/d?revision=abc",
                "me/d?format=preference",
            )
        ),
        ({"weights": "Qwen/Qwen3-8B"}, "weights"), ({"model": "qwen-7b"}, "model"),
        ({"model": "phi3-mini-128k"}, "model"),
        ({"data": {"sequence_length": 4096, "source": {"a": "a.jsonl", "b": "b.jsonl"}}}, "data.source"),
        ({"data": {"sequence_length": 4096, "source": "a.json?format=alpaca"}}, "data.source"),
        ({"data": {"sequence_length": 4096, "tokenizer": "bytes"}}, "data.tokenizer"),
        (QLORA | {"parallel": {"data_shard": 16, "sharding": "gradients"}}, "parallel.sharding"),
        (QLORA | {"lora": {"ranks": {"query": 4}}}, "lora.ranks"),
        (QLORA | {"lora": {"targets": ["qkv"]}}, "lora.targets"),
        (QLORA | {"model": "llama3.2-1b", "lora": {"modules_to_save": ["embedding"]}}, "lora.modules_to_save"),
        ({"parallel": {"tensor": 2, "data_shard": 8, "sharding": "none"}}, "parallel"),
        ({"parallel": {"data_replicate": 2, "data_shard": 8}}, "parallel.data_replicate"),
    ],
    ids=str,
)  # fmt: skip
def test_what_trl_lacks_is_refused(changes, key, tmp_path):
    assert key in {problem.key for problem in find_engine("trl").check(made(**changes))}


def test_a_launch_needs_data_and_does_not_promise_to_resume(meshwright, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(PLAIN | {"train": {"steps": 40, "checkpoint": {"folder": "saves", "every_steps": 4}}}))
    start = ("launch", str(run), "--on", "slurm", "--dry-run")
    assert ((done := meshwright(*start)).exit_code, "no data set" in done.stderr) == (2, True)
    assert "begins at the first step" in meshwright(*start, "--set", "data.source=me/talks").stderr


def test_nothing_is_started():
    engine, run = find_engine("trl"), made()
    refuse("trl", engine.check(run))
    with pytest.raises(InputError, match="started by hand") as error:
        engine.prepare(run, options=None)
    assert "export" in error.value.hint
