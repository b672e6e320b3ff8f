"""The servers that a serving plan starts: as many processes, devices and requests as were costed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

import meshwright as mw
from meshwright.errors import InputError

SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
LENGTHS = {"input_tokens": 1024, "output_tokens": 256}
FAKE = """#!/bin/sh
echo "$0|$CUDA_VISIBLE_DEVICES$HIP_VISIBLE_DEVICES|$*" >> "$STARTED"
"""
PLANS = [  # engine, model, cluster, precision
    ("vllm", "llama3.1-70b", "h200-8x2", "fp8"),
    ("vllm", "llama3.1-8b", "mi300x-8x1", None),
    ("vllm", "llama3.1-405b", "h100-8x2", "bf16"),
    ("vllm", "deepseek-v3", "h200-8x2", None),
    ("sglang", "deepseek-v3", "h100-8x4", None),
    ("sglang", "qwen3-30b-a3b", "b200-8x1", "bf16"),
    ("trtllm", "llama3.1-70b", "b200-8x1", "nvfp4"),
    ("trtllm", "gpt-oss-120b", "b200-8x1", None),
    ("llamacpp", "llama3.1-8b", "h100-8x1", "bf16"),
]


def planned(engine, model, cluster, precision, **bounds):
    return mw.inference_plan(model=model, cluster=cluster, engine=engine, precision=precision, **LENGTHS, **bounds)


def started(folder: Path, node: int, **variables: str) -> list[list[str]]:
    """Program, devices and arguments of each process that the script starts on a node."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("vllm", "python3", "trtllm-serve", "llama-server"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    log = folder / "started"
    log.unlink(missing_ok=True)
    paths = {"PATH": f"{programs}:/usr/bin:/bin", "STARTED": str(log), "CUDA_VISIBLE_DEVICES": "", "MODEL": "/a model"}
    done = subprocess.run(
        ["sh", str(folder / "start.sh"), str(node)], env=os.environ | paths | variables, cwd=folder, timeout=60
    )
    assert done.returncode == (0 if log.exists() else 2)
    return [line.split("|") for line in log.read_text().splitlines()] if log.exists() else []


def option(arguments: str, name: str) -> str | None:
    found = re.search(rf"(?:^| ){name} (\S+)", arguments)
    return found and found[1]


@pytest.mark.parametrize(
    ("engine", "cache", "stated"),
    [
        ("vllm", "bf16", "--kv-cache-dtype bfloat16"),
        ("vllm", "fp8", "--kv-cache-dtype fp8"),
        ("sglang", "bf16", "--kv-cache-dtype bfloat16"),
        ("sglang", "fp8", "--kv-cache-dtype fp8_e4m3"),
        ("sglang", "fp16", "--dtype float16"),
        ("llamacpp", "fp16", "--cache-type-k f16 --cache-type-v f16"),
    ],
)
def test_the_cache_of_the_plan_is_stated_where_it_is_a_default_too(engine, cache, stated, tmp_path):
    """vLLM and SGLang keep the cache of DeepSeek-V3.2 in 8 bits where no option says otherwise."""
    model, cluster = ("llama3.1-8b", "h100-1x1") if engine == "llamacpp" else ("deepseek-v3.2", "b200-8x1")
    plan = planned(engine, model, cluster, "bf16" if engine == "llamacpp" else "fp8", kv_precision=cache)
    plan.write(tmp_path)
    assert plan.to_dict()["kv_precision"] == cache
    assert re.search(f"{stated}( |$)", (tmp_path / "start.sh").read_text(), re.MULTILINE)


def test_a_cache_that_no_option_states_is_noted(tmp_path):
    """TensorRT-LLM 1.0 takes fp8, nvfp4 or the checkpoint's."""
    plan = planned("trtllm", "llama3.1-8b", "b200-1x1", "fp8", kv_precision="bf16")
    assert "the checkpoint names a format" in " ".join(plan.write(tmp_path))


@pytest.mark.parametrize(
    ("arrivals", "measured"),
    [("poisson", "gamma --shape {}"), ("gamma:2", "gamma --shape {}"), ("constant", "constant")],
)
def test_servers_of_a_rate_have_the_places_of_its_simulation_and_are_measured_under_it(arrivals, measured, tmp_path):
    """A cap of the mean number in flight would let half of the requests wait that the simulation serves."""
    plan = planned("vllm", "llama3.1-8b", "h100-8x1", "bf16", requests_per_s=60.0, itl_s=0.02, arrivals=arrivals)
    plan.write(tmp_path)
    replicas, sequences = plan.best.layout.replicas, int(option((tmp_path / "start.sh").read_text(), "--max-num-seqs"))
    assert replicas > 1
    assert sequences == int(plan.estimate.most_in_flight / replicas) > 2 * plan.best.concurrency / replicas
    shape = replicas * (0.25 if arrivals == "gamma:2" else 1)
    assert (
        f"--rate {60 / replicas:.6g} --arrivals {measured.format(f'{shape:g}')} "
        in (tmp_path / "README.md").read_text()
    )


@pytest.mark.parametrize(("engine", "model", "cluster", "precision"), PLANS)
def test_every_device_of_the_plan_is_in_one_server(engine, model, cluster, precision, tmp_path):
    plan = planned(engine, model, cluster, precision)
    plan.write(tmp_path)
    place, layout = plan.question.cluster, plan.best.layout
    hosts = " ".join(f"host{i}" for i in range(place.num_nodes))
    by_node = [started(tmp_path, node, HOSTS=hosts) for node in range(place.num_nodes)]
    used = Counter((node, d) for node, all_ in enumerate(by_node) for _, ids, _ in all_ for d in ids.split(","))
    assert sum(used.values()) == layout.num_devices
    assert set(used.values()) == {1}
    spans = -(-layout.replica_devices // place.devices_per_node)
    servers = [arguments for all_ in by_node for _, _, arguments in all_]
    assert len(servers) == layout.replicas * spans
    ports = Counter((node, option(a, "--port")) for node, all_ in enumerate(by_node) for _, _, a in all_)
    assert set(ports.values()) == {1}
    assert all("/a model" in arguments for arguments in servers)


@pytest.mark.parametrize(
    ("engine", "sequences", "context", "groups"),
    [
        ("vllm", "--max-num-seqs", "--max-model-len", "--data-parallel-size"),
        ("sglang", "--max-running-requests", "--context-length", "--attn-dp-size"),
        ("trtllm", "--max_batch_size", "--max_seq_len", None),
    ],
)
def test_a_server_takes_the_requests_that_were_costed(engine, sequences, context, groups, tmp_path):
    plan = planned(engine, "deepseek-v3", "b200-8x1", "fp8" if engine != "trtllm" else "nvfp4", itl_s=0.05)
    plan.write(tmp_path)
    point = plan.best
    (_, _, arguments), *others = started(tmp_path, 0)
    assert len(others) == point.layout.replicas - 1
    replica = point.concurrency / point.layout.replicas
    each = replica if engine == "sglang" else replica / point.layout.attention_data
    allowed = int(option(arguments, sequences) or 0)
    assert each <= allowed < each + point.layout.attention_data + 1
    assert option(arguments, context) == "1280"
    if point.layout.attention_data > 1 and groups:
        assert option(arguments, groups) == str(point.layout.attention_data)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["best"]["concurrency"] == point.concurrency


def test_a_replica_over_nodes_knows_its_first_node(tmp_path):
    plan = planned("vllm", "llama3.1-405b", "h100-8x2", "bf16")
    assert plan.best.layout.replica_devices == 16
    plan.write(tmp_path)
    (head,) = started(tmp_path, 0, HOSTS="one two")
    (worker,) = started(tmp_path, 1, HOSTS="one two")
    for rank, (_, _, arguments) in enumerate((head, worker)):
        assert option(arguments, "--master-addr") == "one"
        assert option(arguments, "--node-rank") == str(rank)
    assert worker[2].endswith("--headless")
    assert "--headless" not in head[2]
    assert not (tmp_path / "kubernetes.yaml").exists()
    assert not started(tmp_path, 2, HOSTS="one two")


def test_prefill_and_decode_are_servers_of_their_own(tmp_path):
    plan = mw.inference_plan(
        model="llama3.1-70b", cluster="h100-8x1", precision="fp8", engine="sglang", input_tokens=8000, output_tokens=64,
        ttft_s=2.0, itl_s=0.02, disaggregated=True,
    )  # fmt: skip
    assert plan.best.prefill_replicas
    plan.write(tmp_path)
    modes = Counter(option(arguments, "--disaggregation-mode") for _, _, arguments in started(tmp_path, 0))
    assert modes["prefill"] == plan.best.prefill_replicas
    assert modes["decode"] == plan.best.layout.replicas - plan.best.prefill_replicas
    page = (tmp_path / "README.md").read_text()
    assert page.count(" --prefill http") == modes["prefill"]
    assert page.count(" --decode http") == modes["decode"]


@pytest.mark.parametrize(("engine", "model", "cluster", "precision"), PLANS)
def test_the_manifest_is_what_kubernetes_takes(engine, model, cluster, precision, tmp_path):
    plan = planned(engine, model, cluster, precision)
    plan.write(tmp_path)
    manifest = tmp_path / "kubernetes.yaml"
    if plan.best.layout.replica_devices > plan.question.cluster.devices_per_node:
        assert not manifest.exists()
        return
    documents = list(YAML(typ="safe").load_all(manifest.read_text()))
    for document in documents:
        jsonschema.validate(document, SCHEMA)
    served = next(d for d in documents if d["kind"] == "Deployment")["spec"]
    (limit,) = served["template"]["spec"]["containers"][0]["resources"]["limits"].values()
    assert served["replicas"] * limit == plan.best.layout.num_devices
    assert (engine == "trtllm") == any(d["kind"] == "ConfigMap" for d in documents)


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ({"engine": "vllm-v0", "model": "llama3.1-8b", "cluster": "h100-8x1"}, "vllm-v0"),
        ({"engine": "generic", "model": "llama3.1-8b", "cluster": "h100-8x1"}, "generic"),
        ({"engine": "llamacpp", "model": "llama3.1-70b", "cluster": "h100-8x1", "precision": "bf16"}, "TP"),
        ({"engine": "vllm", "model": "llama3.1-8b", "cluster": "b200-8x1", "kv_precision": "nvfp4"}, "nvfp4"),
    ],
)
def test_a_layout_that_no_command_line_has_is_refused(question, named, tmp_path):
    plan = mw.inference_plan(**question, **LENGTHS)
    with pytest.raises(InputError, match=named):
        plan.write(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_format_that_no_option_makes_wants_a_checkpoint(tmp_path):
    notes = planned("vllm", "llama3.1-70b", "b200-8x1", "nvfp4").write(tmp_path)
    assert any("MODEL has to be a checkpoint in nvfp4" in note for note in notes)
    done = subprocess.run(["sh", str(tmp_path / "start.sh")], capture_output=True, text=True, env={"PATH": "/bin"})
    assert done.returncode == 2
    assert "a checkpoint in nvfp4" in done.stderr


def test_the_name_of_a_folder_is_no_command(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    model = tmp_path / 'it\'s $(touch made) `touch made`\ntouch made; } "quoted"'
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "servers"
    planned("vllm", str(model), "h100-8x1", None).write(folder)
    servers = started(folder, 0, MODEL="")
    assert len(servers) > 1
    assert not list(tmp_path.rglob("made"))
    assert str(model).partition("\n")[0] in (folder / "started").read_text()
