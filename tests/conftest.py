"""Fixtures of all tests, and one deterministic Hypothesis profile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from meshwright.catalog import engines
from meshwright.cli import main

# Deterministic, and without a deadline: two busy cores must not turn a law into a flaky test.
settings.register_profile(
    "meshwright",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("meshwright")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the terminal or pytest-xdist says."""
    monkeypatch.delenv("COLUMNS", raising=False)


TINY = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4, micro: 2}
precision: bf16
cluster: here
train: {steps: 4, checkpoint: {folder: saved, every_steps: 2}}
"""


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """A run file that trains in a second; one section a line, so that a test can change one."""
    return TINY


@pytest.fixture
def install_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make engines the only installed ones: `install_engines(native="meshwright.engines.native.contract")`."""

    def install(**contracts: str) -> None:
        points = EntryPoints(
            EntryPoint(name, value, engines.ENTRY_POINTS) for name, value in contracts.items()
        )
        monkeypatch.setattr(engines, "entry_points", lambda **which: points.select(**which))
        engines._installed.cache_clear()

    yield install
    engines._installed.cache_clear()


@pytest.fixture
def engine_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`engine_package("mine", facts="FACTS = 1")`: a package of these modules, importable until the test ends."""
    names = []

    def make(name: str, **modules: str) -> None:
        names.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        for module, text in modules.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one command line did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def meshwright(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the whole command line in this process: `meshwright("catalog", "models", "--json").json`."""

    def run(*args: object) -> Outcome:
        capsys.readouterr()  # what the test itself printed before
        exit_code = main.run([str(a) for a in args])
        captured = capsys.readouterr()
        return Outcome(exit_code=exit_code, stdout=captured.out, stderr=captured.err)

    return run
