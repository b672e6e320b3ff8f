"""Kernels compiled for every architecture, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from meshwright.errors import InputError
from meshwright.kernels import inspection
from meshwright.kernels.architectures import architectures
from meshwright.kernels.inspection import InspectedKernel, compile_kernel, kernel_sources
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.triton_route import is_interpreted

SCRIPT = """
import dataclasses, json, sys
from meshwright.kernels import inspection
sources = inspection.kernel_sources()
names, chosen = json.loads(sys.argv[1])
if chosen:
    sources = [s for s in sources if s.name in chosen]
elif names:
    first = {s.op: s for s in reversed(sources)}.values()
    sources = [dataclasses.replace(s, tiles=s.tiles[:1]) for s in first]
rows = inspection.inspect(sources, names=names)
print(json.dumps([dataclasses.asdict(row) | {"faults": row.faults} for row in rows]))
"""


def inspected(*names: str, kernels: list[str] | None = None) -> list[dict]:
    """Rows of `kernels`, or of all; with `names` of architectures alone: one of each operation, with its first tile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps([names, kernels or []])]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def check(rows):
    for row in rows:
        assert row["faults"] == []
        assert row["registers"] > 0
        assert 0 < row["occupancy"] <= 1, row
        assert row["shared_bytes"] <= architectures()[row["architecture"]].shared_bytes_per_block
        assert row["moved_bytes"] >= row["least_bytes"]


@pytest.mark.when_touched  # the interpreter runs each kernel in the tests of its operation
def test_a_kernel_of_each_operation_compiles_for_nvidia_and_amd():
    rows = inspected("sm90", "gfx942")
    assert {row["architecture"] for row in rows} == {"sm90", "gfx942"}
    modules = {OPERATIONS[row["op"]].kernels for row in rows}
    assert modules == {op.kernels for op in OPERATIONS.values() if op.kernels is not None}
    check(rows)


@pytest.mark.when_touched  # compiles four kernels
def test_the_backward_pass_of_latent_attention_uses_matrix_instructions():
    rows = inspected("sm90", "sm100", kernels=[f"attention_{of}_gradient_192_128_ranges" for of in ("query", "key")])
    assert len(rows) == 4
    for row in rows:
        assert (row["faults"], row["spilled_bytes"], row["matrix_instructions"] > 0) == ([], 0, True), row


@pytest.mark.slow  # the test above compiles one kernel of each operation, for two of the four
def test_all_kernels_compile_with_all_tiles_for_all_architectures():
    rows = inspected()
    assert {row["architecture"] for row in rows} == set(architectures())
    assert {row["kernel"] for row in rows} == {source.name for source in kernel_sources()}
    check(rows)


@pytest.mark.skipif(not is_interpreted(), reason="only under TRITON_INTERPRET=1")
def test_nothing_compiles_in_the_interpreter():
    source, *_ = kernel_sources()
    with pytest.raises(InputError, match="TRITON_INTERPRET"):
        compile_kernel(source, tile=source.tiles[0], architecture=architectures()["sm90"])


def test_occupancy_by_registers_and_by_shared_memory():
    hopper, instinct = architectures()["sm90"], architectures()["gfx942"]
    assert hopper.occupancy(registers_per_thread=32, shared_bytes=0, num_warps=4) == 1.0
    assert hopper.occupancy(registers_per_thread=128, shared_bytes=0, num_warps=8) == 0.25
    assert hopper.occupancy(registers_per_thread=32, shared_bytes=100_000, num_warps=8) == 0.25
    assert instinct.occupancy(registers_per_thread=512, shared_bytes=0, num_warps=4) == 1 / 8
    assert instinct.occupancy(registers_per_thread=64, shared_bytes=40_000, num_warps=4) == 1 / 8


def row_of(**changes):
    values = {"op": "swiglu", "kernel": "k", "tile": "t", "architecture": "sm90", "registers": 32, "spilled_bytes": 0,
              "shared_bytes": 0, "occupancy": 1.0, "matrix_instructions": 0, "moved_bytes": 10, "least_bytes": 10,
              "is_memory_bound": True}  # fmt: skip
    return InspectedKernel(**values | changes)


def test_a_spill_and_needless_traffic_are_faults(monkeypatch):
    assert row_of().faults == ()
    assert "spills 8 bytes" in row_of(spilled_bytes=8).faults[0]
    assert "1.20 times" in row_of(moved_bytes=12).faults[0]
    assert row_of(moved_bytes=12, is_memory_bound=False, matrix_instructions=1).faults == ()
    assert "no matrix instruction (wgmma)" in row_of(is_memory_bound=False).faults[0]
    monkeypatch.setattr(inspection, "_allowed_spills", lambda: {("k", "t", "sm90"): 8})
    assert row_of(spilled_bytes=8).faults == ()
    assert row_of(spilled_bytes=9).faults != ()
    assert row_of(spilled_bytes=8, architecture="sm100").faults != ()


def test_a_spill_may_be_allowed_with_some_versions_of_triton_alone(monkeypatch):
    def allowed(version):
        monkeypatch.setattr(inspection, "version", lambda _: version)
        return inspection._allowed_spills.__wrapped__()

    old, new = allowed("3.4.0"), allowed("3.9.0")
    assert {key for key in old if key not in new} == {
        ("fp8_gemm_blocks_by_squares", "TM=128, TN=128, TK=128, 8 warps, 3 stages", name)
        for name in ("gfx942", "gfx950")
    }
    assert set(new) < set(old)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--op", "swigul"), "swiglu"), (("--architecture", "sm80"), "sm90"), ((), "TRITON_INTERPRET")],
    ids=["operation", "architecture", "interpreter"],
)
def test_bad_input_of_the_command(meshwright, arguments, text):
    done = meshwright("kernels", "inspect", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert text in done.stderr
