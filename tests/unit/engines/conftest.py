"""A small run, and what an engine has against variants of it: for the tests of every engine's `check`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.specs.run import Run

BASE = """
model: {hidden: 64, num_layers: 4, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {sequence_length: 256}
batch: {global_sequences: 16}
cluster: here
train: {steps: 10}
"""
MIXTURE = """model={hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}"""

Load = Callable[..., Run]


@pytest.fixture
def small_run() -> Load:
    """`small_run(engine, *overrides)`: the run with overrides as on a command line.

    `mixture` stands for a model with experts; `plan: tensor: 2` for a plan of one data rank, not sharded, and, for
    MaxText, which has nothing else, recomputed, where the words do not say otherwise.
    """

    def load(engine: str, *overrides: str) -> Run:
        given = [_written_out(override, engine) for override in overrides]
        return runfile.loads(BASE, overrides=[f"engine={engine}", *given])

    return load


@pytest.fixture
def refused(small_run, request) -> Callable[..., list[str]]:
    """`refused(*overrides)`: what the engine that the test module names as ENGINE has against such a run."""
    engine = request.module.ENGINE

    def ask(*overrides: str) -> list[str]:
        return [str(problem) for problem in find_engine(engine).check(small_run(engine, *overrides))]

    return ask


def _written_out(override: str, engine: str) -> str:
    if override == "mixture":
        return MIXTURE
    if not override.startswith("plan: "):
        return override
    words = override.removeprefix("plan: ")
    usual = {"data_shard": "1", "sharding": "none"} | ({"recompute": "full"} if engine == "maxtext" else {})
    said = [f"{key}: {value}" for key, value in usual.items() if f"{key}:" not in words]
    return f"parallel={{{', '.join([*said, words])}}}"
