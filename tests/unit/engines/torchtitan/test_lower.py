"""A run as a configuration module of torchtitan: what stands where. Torchtitan is not needed."""

from __future__ import annotations

import ast
import builtins
import sys
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.engines.torchtitan.lower import stage_modules

TOY = """
model: {name: toy, hidden: 64, num_layers: 7, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: notes.txt, tokenizer: bytes, sequence_length: 256}
batch: {global_sequences: 16, micro: 2}
optimizer: {learning_rate: 1.0e-3, schedule: wsd, warmup_steps: 2, gradient_clip: null}
cluster: here
engine: torchtitan
train: {steps: 10, seed: 7, checkpoint: {folder: saved, every_steps: 5, keep: 3}}
"""


def module(*overrides: str) -> ast.Module:
    run = runfile.loads(TOY, overrides=overrides)
    launch = find_engine("torchtitan").lower(run, folder=Path("out"))
    assert launch.num_processes == run.plan.num_devices
    return ast.parse(launch.files["meshwright_run.py"])


def arguments(tree: ast.Module, function: str) -> dict[str, str]:
    """Named arguments of the first call of `function`, as they stand in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            return {word.arg or "": ast.unparse(word.value) for word in node.keywords}
    raise AssertionError(function)


FSDP = "parallel={data_shard: 2, sharding: parameters}"
PIPELINE = "parallel={data_shard: 1, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, sharding: gradients}"


def test_degrees_and_batches():
    tree = module(FSDP)
    parallel, training = arguments(tree, "ParallelismConfig"), arguments(tree, "TrainingConfig")
    assert parallel["data_parallel_shard_degree"] == "2"
    assert parallel["fsdp_reshard_after_forward"] == "'always'"
    assert (training["local_batch_size"], training["global_batch_size"]) == ("2", "16")
    assert training["max_norm"] == "float('inf')"
    assert training["mixed_precision_param"] == "'bfloat16'"


def test_a_loss_in_chunks_has_as_many_as_the_tokens_of_a_rank():
    assert arguments(module(FSDP), "Trainer.Config")["loss"].startswith("CrossEntropyLoss.Config(")
    chunked = arguments(module(FSDP, "kernels.loss_chunk=64"), "ChunkedLossWrapper.Config")
    assert chunked["num_chunks"] == "8"  # of 2 x 256 tokens
    assert chunked["loss_fn"] == "CrossEntropyLoss.Config(global_vocab_size=512)"


def test_micro_batches_of_a_pipeline_are_one_local_batch():
    tree = module(PIPELINE)
    parallel = arguments(tree, "ParallelismConfig")
    assert arguments(tree, "TrainingConfig")["local_batch_size"] == "16"
    assert parallel["pipeline_parallel_microbatch_size"] == "2"
    assert parallel["pipeline_parallel_schedule"] == "'Interleaved1F1B'"
    assert parallel["fsdp_reshard_after_forward"] == "'never'"


def test_layers_lie_on_stages_as_the_planner_costs_them():
    run = runfile.loads(TOY, overrides=[PIPELINE])
    stages = stage_modules(run, run.plan)
    assert [len([m for m in stage if m.startswith("layers.")]) for stage in stages] == [1, 2, 2, 2]
    assert stages[0] == ["tok_embeddings", "layers.0"]
    assert stages[-1] == ["layers.5", "layers.6", "norm", "lm_head"]


def test_replicas_without_sharding():
    parallel = arguments(module("parallel={data_shard: 4, sharding: none}"), "ParallelismConfig")
    assert parallel["data_parallel_replicate_degree"] == "4"
    assert parallel["data_parallel_shard_degree"] == "1"


def test_checkpoints_and_weights():
    saves = arguments(module(FSDP, "weights=start"), "CheckpointManager.Config")
    assert (saves["interval"], saves["keep_latest_k"], saves["async_mode"]) == ("5", "3", "'async'")
    assert saves["initial_load_path"] == "weights_folder('start')"
    alone = arguments(module(FSDP, "train.checkpoint=null"), "CheckpointManager.Config")
    assert alone == {"enable": "False"}
    reads = arguments(module(FSDP, "weights=start", "train.checkpoint=null"), "CheckpointManager.Config")
    assert reads["load_only"] == "True"


def test_recomputation():
    full = module("parallel={data_shard: 2, sharding: parameters, recompute: full}")
    assert arguments(full, "Trainer.Config")["activation_checkpoint"] == "FullAC.Config()"
    selective = "parallel={data_shard: 2, sharding: parameters, recompute: {modules: [alternate_matmuls]}}"
    assert arguments(module(selective), "Trainer.Config")["activation_checkpoint"] == "SelectiveAC.Config()"
    assert arguments(module(FSDP), "Trainer.Config")["activation_checkpoint"] == "None"


def test_adapters_stand_beside_torchtitans_names():
    tree = module(FSDP, "task=lora", "lora={rank: 4, alpha: 8, targets: [query, key, value, down]}")
    lora = arguments(tree, "LoRAConverter.Config")
    assert lora == {"rank": "4", "alpha": "8.0", "target_modules": "['wq', 'wkv', 'w2']"}


def test_every_name_is_defined_or_imported():
    for overrides in ((FSDP,), (FSDP, "task=lora"), (FSDP, "precision=fp8_rowwise")):
        tree = module(*overrides)
        known = {"index", "converter", "model", *dir(builtins)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef):
                known.add(node.name)
            elif isinstance(node, ast.Assign):
                known |= {ast.unparse(target) for target in node.targets}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert used - known - {"__file__"} == set()


def test_lowering_is_pure_and_imports_no_framework():
    run = runfile.loads(TOY, overrides=[FSDP])
    engine = find_engine("torchtitan")
    assert engine.lower(run, folder=Path("out")) == engine.lower(run, folder=Path("out"))
    assert not Path("out").exists()
    assert "torchtitan" not in sys.modules


@pytest.mark.parametrize("degree", ["tensor", "context"])
def test_model_parallel_degrees(degree):
    tree = module(f"parallel={{data_shard: 1, {degree}: 2, sharding: parameters}}")
    assert arguments(tree, "ParallelismConfig")[f"{degree}_parallel_degree"] == "2"


@pytest.mark.parametrize(("dispatcher", "backend"), [("all-to-all", "standard"), ("hybridep", "hybridep")])
def test_the_dispatcher_of_a_mixture(dispatcher, backend):
    model = "model=qwen3-30b-a3b"
    found = arguments(module(FSDP, model, f"stack.dispatcher={dispatcher}"), "make_token_dispatcher_config")
    assert found["comm_backend"] == repr(backend)
    assert ("hidden_dim" in found) == (backend != "standard")
