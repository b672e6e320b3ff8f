"""Tests that depend on the processor pass on every kind that this machine can play (`tests/processors.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from tests.processors import current, playable
from tests.profiles import LIMITS, PROFILES

from meshwright.kernels import processor
from meshwright.kernels.processor import Multiplies

ROOT = Path(__file__).parents[2]
HERE = str(Path(__file__).relative_to(ROOT))
OTHERS = [name for name in playable() if name != current()]
UNLIKE = [name for name in OTHERS if PROFILES[name].onednn != processor.HERE.onednn.name] or OTHERS
"""Other profiles, with other routes if there are any."""
CORE = (
    f"{HERE}::test_this_process_has_the_instructions_of_its_profile",
    "tests/unit/kernels/test_linear.py::test_a_linear_layer_is_exact_to_fp32",
    "tests/unit/kernels/test_linear.py::test_the_layer_takes_one_vector_and_other_formats",
    "tests/training/models/test_models.py::test_padding_counts_neither_as_load_nor_in_the_losses_of_routers",
)
"""The profile itself, GEMMs, and a mixture of experts with its gradients."""
DEPENDENT = (
    "tests/unit/kernels",
    "tests/training/models",
    "tests/training/test_gemm_tuning.py",
    "tests/training/data/test_packed_gradients.py",
    "tests/parity/test_huggingface.py",
    "tests/parity/test_multi_token_prediction.py",
    "tests/engines/native/test_recompute.py",
    "tests/engines/native/test_lora_training.py",
)
"""Files that compare sums in another order, or choose a route by the processor."""


def run_under(profile: str, *tests: str) -> None:
    """Run tests in a process whose libraries have the instructions of `profile` alone."""
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment | PROFILES[profile].environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(current() is None, reason="limits of no profile, or no x86")
def test_this_process_has_the_instructions_of_its_profile():
    profile = PROFILES[current()]
    assert processor.HERE.onednn.name == profile.onednn
    assert torch.backends.cpu.get_cpu_capability().lower() == profile.environment["ATEN_CPU_CAPABILITY"]


@pytest.mark.parametrize("name", UNLIKE[-1:])
def test_another_processor_computes_the_same(name):
    run_under(name, *CORE)


@pytest.mark.slow  # the core of it runs by default, under one profile
@pytest.mark.parametrize("tests", DEPENDENT)
@pytest.mark.parametrize("name", OTHERS)
def test_what_depends_on_the_processor_holds_on_others(name, tests):
    run_under(name, tests)


@pytest.mark.parametrize(("limit", "has_amx"), [("", True), ("ALL", True), ("AVX512_CORE_AMX", True),
                                                ("avx512_core_bf16", False), ("AVX2", False)])  # fmt: skip
def test_amx_is_used_as_far_as_onednn_may(monkeypatch, limit, has_amx):
    chip = {"avx512_f": True, "amx_tile": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: chip)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert (processor._onednn() == Multiplies.AMX) == has_amx
