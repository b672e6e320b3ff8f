"""Configuration modules in torchtitan's own hands: they build, and the model that they build has the right shape.

One process that never trains: the models are built without memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: pip install '.[torchtitan]'", allow_module_level=True)

from meshwright import runfile
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.base import find_engine
from meshwright.engines.local import write_files

SHIM = Path(__file__).parent / "shim"
LATENT = """{hidden: 256, num_layers: 6, vocab: 1024, ffn_hidden: 512, family: DeepseekV3ForCausalLM,
attention: {kind: mla, num_heads: 4, head_dim: 96, value_head_dim: 64, query_lora_rank: 64, kv_lora_rank: 32,
rope_head_dim: 32}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 128, num_shared: 1, num_dense_layers: 1,
router: sigmoid, num_groups: 4, groups_per_token: 2, routed_scale: 2.5}}"""
RUNS = {
    "llama3.1-8b": {},
    "llama3-8b": {"task": "lora", "lora": "{rank: 4, targets: [query, key, value, output, up]}"},
    "qwen3-0.6b": {"precision": "bf16"},
    "qwen3-30b-a3b": {"parallel": "{data_shard: 8, expert: 4, sharding: parameters}"},
    "deepseek-v2-lite": {},
    "latent": {"model": LATENT, "batch.micro": "2", "parallel": "{pipeline: 4, tensor: 2, sharding: gradients}"},
    "gpt-oss-20b": {},
}
COUNT = """
import importlib.util, json, sys
import torch
sizes = {}
for name in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("run", f"{name}/meshwright_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.train()
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    parameters = {id(p): p for p in model.parameters()}.values()
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    sizes[name] = [sum(p.numel() for p in parameters), trained]
print(json.dumps(sizes))
"""


def loaded(name: str) -> runfile.Run:
    sections = {
        "model": name, "cluster": "h100-8x1", "engine": "torchtitan", "data.sequence_length": 4096,
        "batch.global_sequences": 8, "train.steps": 3, "parallel": "{data_shard: 8, sharding: parameters}",
    } | RUNS[name]  # fmt: skip
    text = "model: llama3-8b\ndata: {sequence_length: 4096}\nbatch: {global_sequences: 8}\ncluster: h100-8x1\n"
    return runfile.loads(text, overrides=[f"{key}={value}" for key, value in sections.items()])


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("configurations")
    for name in RUNS:
        launch = find_engine("torchtitan").lower(loaded(name), folder=folder / name)
        write_files(launch, folder / name)
    path = os.pathsep.join([str(SHIM), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *RUNS], cwd=folder, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("llama3-8b", "gpt-oss-20b")])
def test_the_model_has_as_many_parameters_as_the_planner_counts(sizes, name):
    model, (total, trained) = loaded(name).model, sizes[name]
    assert total == trained == int(count_parameters(model_row(model)).total)


def test_gpt_oss_has_biases_and_sinks_beside_what_the_planner_counts(sizes):
    run = loaded("gpt-oss-20b")
    model, x = run.model, run.model.experts
    counted = int(count_parameters(model_row(model)).total)
    assert 0 <= sizes["gpt-oss-20b"][0] - counted < 2e-3 * counted, (sizes, counted, x)


def test_adapters_alone_are_trained(sizes):
    run = loaded("llama3-8b")
    a, m = run.model.attention, run.model
    kv = a.num_kv_heads * a.head_dim
    per_layer = 4 * (2 * (m.hidden + m.hidden) + 2 * (m.hidden + kv) + (m.hidden + m.ffn_hidden))
    total, trained = sizes["llama3-8b"]
    assert trained == m.num_layers * per_layer
    assert total - trained == int(count_parameters(model_row(m)).total)
