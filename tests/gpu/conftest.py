"""The GPU lane: everything in this folder carries the mark `gpu` and is skipped where there is no GPU.

    python -m pytest -m gpu

Written on machines without one: a test of this folder that fails on a GPU is as likely wrong as what it tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.toy_training import multiplication

HERE = Path(__file__).parent
SMALL = """
model: {name: small, family: LlamaForCausalLM, hidden: 512, num_layers: 4, vocab: 1024, ffn_hidden: 1024,
  attention: {num_heads: 8, num_kv_heads: 4}}
data: {source: text.txt, tokenizer: bytes, sequence_length: 256}
batch: {global_sequences: 16, micro: 4}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 4, schedule: constant}
precision: bf16
cluster: here
parallel: {data_shard: 1, sharding: none}
train: {steps: 20}
"""
"""Dimensions that bf16, fp8 (multiples of 16) and flash attention take."""
TEXT = multiplication(200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def num_gpus() -> int:
    """Number of GPUs that PyTorch sees; 0 without PyTorch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(autouse=True)
def _needs_gpus(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("num_gpus")
    needed = marker.args[0] if marker else 1
    if num_gpus() < needed:
        pytest.skip(f"needs {needed} GPU(s), found {num_gpus()}")


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command("train", "run.yaml", ...)`: that command in a folder with `run.yaml` and its text."""
    (tmp_path / "run.yaml").write_text(SMALL)
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshwright", *arguments],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    return run


@pytest.fixture
def train(command: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., dict[str, Any]]:
    """`train("out", "precision=fp8")`: the record of the run with these settings, results in `out`."""

    def run(out: str, *settings: str, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
        laid = [f"--set={setting}" for setting in settings]
        done = command("train", "run.yaml", "--json", "--only-steps", f"--out={out}", *laid, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def losses(tmp_path: Path) -> Callable[[str], list[float]]:
    """`losses("out")`: the loss of every step."""
    return lambda out: [json.loads(line)["loss"] for line in (tmp_path / out / "steps.jsonl").read_text().splitlines()]
