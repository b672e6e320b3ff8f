"""Toys that torchtitan trains on this CPU, through the test-only shim, and the native engine's steps beside them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.toy_training import MODEL, REST, multiplication
from tests.warm import Server, WarmProcess
from tests.warm_workers import WORKERS

SHIM = Path(__file__).parent / "shim"
TOLERANCE = 2e-6  # relative; 5e-7 was the most on 20 steps of one and two processes
ONE_TOKEN = 1e-4  # what a token does that goes to another expert, because two scores are equal but for the last digit
TRAINING = """
engine: torchtitan
train: {steps: 20}
"""
EXPERTS = """
model: {name: toy, family: Qwen3MoeForCausalLM, hidden: 64, num_layers: 2, vocab: 257,
  attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}
"""
TEXTS = {
    name: f"{model}weights: start-{name}{REST}{TRAINING}"
    for name, model in {"dense": MODEL, "experts": EXPERTS}.items()
}

Steps = list[dict[str, float]]


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense.yaml`, `experts.yaml`, their text and the weights that they start from."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    from meshwright import runfile
    from meshwright.training.models import build_model, init_weights, materialize
    from meshwright.training.weights import save_weights

    folder = tmp_path_factory.mktemp("toys")
    (folder / "notes.txt").write_text(multiplication(60))
    for name, text in TEXTS.items():
        (folder / f"{name}.yaml").write_text(text)
        model = build_model(runfile.loads(text).model)
        materialize(model, device=torch.device("cpu"))
        init_weights(model, seed=1)
        save_weights(model, folder / f"start-{name}", dtype=torch.float32)
    return folder


LOADED = ("torchtitan.train", "meshwright.cli.train", "meshwright.cli.commands.checkpoint", "tests.warm")


def environment_of(*, with_shim: bool) -> dict[str, str]:
    path = os.pathsep.join([*([str(SHIM)] if with_shim else []), *filter(None, sys.path)])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@cache
def server() -> Server:
    """A server that has torchtitan and the shim loaded."""
    return Server(LOADED, environment=environment_of(with_shim=True) | {"PYTHONWARNINGS": "ignore"})


def run_in(folder: Path, *arguments: str, with_shim: bool) -> subprocess.CompletedProcess[str]:
    """`meshwright ARGUMENTS` in a process of its own, which forks its workers; without the shim all start anew."""
    process = WarmProcess(
        arguments,
        folder=folder,
        environment=os.environ | environment_of(with_shim=with_shim),
        script=WORKERS if with_shim else None,
        server=server() if with_shim else None,
    )
    stdout, stderr = process.communicate(timeout=500)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout=stdout, stderr=stderr)


@pytest.fixture(scope="session")
def train(toys: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`train("dense", "out", "train.steps=4", ...)`: that run file with these settings."""

    def start(
        name: str, out: str, *settings: str, arguments: tuple[str, ...] = (), with_shim: bool = True, page: bool = False
    ) -> subprocess.CompletedProcess[str]:
        laid = [f"--set={setting}" for setting in settings]
        steps = () if page else ("--only-steps",)
        words = ("train", f"{name}.yaml", "--json", f"--out={out}", *laid, *steps, *arguments)
        return run_in(toys, *words, with_shim=with_shim)

    return start


@pytest.fixture(scope="session")
def to_hf(toys: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`to_hf("dense", "weights", "engine=native", ...)`: the newest checkpoint of that run as fp32 weights."""

    def export(name: str, out: str, *settings: str) -> subprocess.CompletedProcess[str]:
        content = YAML().load((toys / f"{name}.yaml").read_text())
        for setting in settings:
            key, _, value = setting.partition("=")
            section, _, inner = key.rpartition(".")
            (content[section] if section else content)[inner] = YAML().load(value)
        with (toys / f"{out}.yaml").open("w") as stream:
            YAML().dump(content, stream)
        return run_in(toys, "checkpoint", "to-hf", f"{out}.yaml", out, "--dtype=fp32", with_shim=True)

    return export


@pytest.fixture(scope="session")
def bench(toys: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`bench("dense.yaml", "--runs=1", ...)`: `meshwright bench train` of these."""
    return lambda *arguments: run_in(toys, "bench", "train", *arguments, with_shim=True)


@pytest.fixture(scope="session")
def steps(toys: Path) -> Callable[[str], Steps]:
    """`steps("out")`: the lines of a training's step log."""

    def read(out: str) -> Steps:
        return [json.loads(line) for line in (toys / out / "steps.jsonl").read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def native(toys: Path, steps: Callable[[str], Steps]) -> Callable[..., Steps]:
    """`native("dense", "task=lora", ...)`: the native engine's steps in one process, each run taken once."""

    @cache
    def taken(name: str, *settings: str) -> Steps:
        out = "-".join(["native", name, *("".join(c for c in s if c.isalnum()) for s in settings)])[:100]
        laid = [f"--set={setting}" for setting in ("engine=native", *settings)]
        words = ["train", f"{name}.yaml", "--json", "--only-steps", f"--out={out}", *laid]
        process = WarmProcess(words, folder=toys, environment=dict(os.environ))
        _, stderr = process.communicate(timeout=500)
        assert process.returncode == 0, stderr
        return steps(out)

    return taken


@pytest.fixture(scope="session")
def assert_equal() -> Callable[..., None]:
    """`assert_equal(taken, native)`: step by step to the last digits; `may_flip`: where tokens choose experts."""

    def compare(taken: Steps, theirs: Steps, *, may_flip: bool = False) -> None:
        assert [line["step"] for line in taken] == [line["step"] for line in theirs]
        for mine, other in zip(taken, theirs, strict=True):
            assert mine["learning_rate"] == pytest.approx(other["learning_rate"], rel=1e-12)
        for key in ("loss", "gradient_norm"):
            off = [abs(mine[key] / other[key] - 1) for mine, other in zip(taken, theirs, strict=True)]
            assert max(off) < (ONE_TOKEN if may_flip else TOLERANCE), (key, off)
            assert statistics.median(off) < TOLERANCE, (key, off)

    return compare
