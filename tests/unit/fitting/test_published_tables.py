"""Kernel tables of others: what a package of known rates holds is what its calibration says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.device import load, to_document
from meshwright.calibration.parameters import MeasuredParameter, fitted, prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.compute import gemm_s
from meshwright.cost.unit_ports import unit_pace
from meshwright.errors import InputError, MissingDependencyError
from meshwright.fitting import aiconfigurator
from meshwright.fitting.published_tables import calibrate_from_tables
from meshwright.programs import install_command

REAL = find_spec(aiconfigurator.MODULE) is not None
H100 = catalog.accelerator("h100")
COPIED = prior().parameters["memory_ratio"].prior
STREAMING = H100.memory_bytes_per_s * COPIED / (1 + COPIED * unit_pace(H100))
KERNEL_S = prior().parameters["kernel_s"].prior
LEVEL = 0.6  # of the peak, of large products
SHALLOW = 2.0  # times slower than modelled: products of depth SHALLOW_K or less
SHALLOW_K = 1024

SIZES = (512, 1024, 2048, 4096, 8192)
SHAPES = [(m, n, k) for m, n, k in product(SIZES, SIZES, SIZES)]

Rows = Mapping[str, Sequence[Any]]


def seconds_of(m: int, n: int, k: int, *, number_format: str) -> float:
    """Seconds on the machine of these tests."""
    modelled_gemm_s = gemm_s(
        float(m), float(n), float(k), flops_per_s=H100.peak_flops_per_s[number_format] * LEVEL,
        bytes_per_s=STREAMING, kernel_s=KERNEL_S, num_units=H100.num_compute_units,
        element_bytes=2.0 if number_format == "bf16" else 1.0,
    )  # fmt: skip
    quantising_s = 0.0 if number_format == "bf16" else 3 * m * k / STREAMING + KERNEL_S
    return float(modelled_gemm_s) * (SHALLOW if k <= SHALLOW_K else 1.0) + quantising_s


def gemm_rows(shapes: Sequence[tuple[int, int, int]] = SHAPES) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in ("gemm_dtype", "m", "n", "k", "latency")}
    for theirs, ours in (("bfloat16", "bf16"), ("fp8", "fp8"), ("fp8_block", "fp8")):
        for shape in shapes:
            values = (theirs, *shape, 1e3 * seconds_of(*shape, number_format=ours))
            for name, value in zip(rows, values, strict=True):
                rows[name].append(value)
    return rows


def attention_rows() -> dict[str, list[Any]]:
    names = ("batch_size", "num_heads", "isl", "head_dim", "window_size", "attn_dtype", "kv_cache_dtype", "latency")
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for batch, heads, keys, window in product((1, 4, 16, 64), (8, 16, 32, 64), (512, 1024, 2048, 4096, 8192), (0, 128)):
        flops = 4.0 * batch * heads * keys * (keys + 1) / 2 * 128
        slower = 3.0 if keys == 512 else 1.0
        seconds = slower * (flops / (0.5 * H100.peak_flops_per_s["bf16"]) + KERNEL_S) / (10 if window else 1)
        for name, value in zip(
            names, (batch, heads, keys, 128, window, "bfloat16", "bfloat16", 1e3 * seconds), strict=True
        ):
            rows[name].append(value)
    return rows


def collective_rows() -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {"op_name": [], "nccl_dtype": [], "num_gpus": [], "message_size": [], "latency": []}
    for op, devices, power in product(("all_reduce", "alltoall"), (4, 8), range(8, 29)):
        milliseconds = 1e3 * (20e-6 + 2 * 2**power / 200e9) * (8 / devices)
        for name, value in zip(rows, (op, "half", devices, 2**power, milliseconds), strict=True):
            rows[name].append(value)
    return rows


@dataclass(frozen=True, kw_only=True)
class Package:
    data: Path

    def write(self, file: str, rows: Rows) -> None:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = self.data / file
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(dict(rows)), path)


GEMM_FILE = "h100_sxm/gemm/trtllm/1.3.0rc20/gemm_perf.parquet"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Package:
    """A package in the format of the real one, of a machine whose rates are known."""
    base = tmp_path / "site"
    data = base / aiconfigurator.MODULE / "systems" / "data"
    data.mkdir(parents=True)
    (base / aiconfigurator.MODULE / "__init__.py").write_text('raise ImportError("never imported")\n')
    about = base / "aiconfigurator_core-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: aiconfigurator-core\nVersion: 9.9\nLicense-Expression: Apache-2.0\n"
    )
    monkeypatch.syspath_prepend(str(base))
    made = Package(data=data)
    slower = {**gemm_rows(), "latency": [3 * t for t in gemm_rows()["latency"]]}
    made.write("h100_sxm/gemm/trtllm/1.3.0rc9/gemm_perf.parquet", slower)  # older
    made.write(GEMM_FILE, gemm_rows())
    made.write("h100_sxm/attention/trtllm/1.3.0rc20/context_attention_perf.parquet", attention_rows())
    made.write("h100_sxm/comm/nccl/2.29.2/nccl_perf.parquet", collective_rows())
    return made


def test_shape_is_learned_and_level_is_not(package):
    found = calibrate_from_tables("h100", framework="trtllm")
    for name in ("gemm/forward/bf16", "gemm/weight_gradient/bf16", "gemm/forward/fp8"):
        correction = found.corrections[name]
        assert correction.factor(8192, 8192, 8192) == pytest.approx(1.0, abs=0.05), name
        assert correction.factor(8192, 8192, 512) == pytest.approx(SHALLOW, rel=0.1), name
    assert found.parameters == {}
    used = found.details["tables"]["corrections"]
    assert used["gemm/bf16"]["utilisation"] == pytest.approx(LEVEL, rel=0.1)
    assert found.calibration().offsets == fitted().offsets


def test_attention_is_only_forward_and_without_a_window(package):
    found = calibrate_from_tables("h100", framework="trtllm")
    correction = found.corrections["attention/forward/bf16"]
    assert correction.factor(512, 8192, 128) == pytest.approx(1.0, abs=0.1)
    assert correction.factor(512, 512, 128) == pytest.approx(3.0, rel=0.2)
    assert "attention/backward/bf16" not in found.corrections


def test_whose_measurements_they_are_is_kept(package):
    found = calibrate_from_tables("H100-SXM", framework="trtllm")
    tables = found.details["tables"]
    assert (tables["package"], tables["version"], tables["licence"]) == ("aiconfigurator-core", "9.9", "Apache-2.0")
    source = tables["corrections"]["gemm/bf16"]
    assert source["file"] == GEMM_FILE
    assert source["framework"] == "trtllm 1.3.0rc20"
    assert len(source["sha256"]) == 64
    assert "trtllm 1.3.0rc20 on h100" in found.made


def test_errors_are_those_of_leave_one_out(package):
    errors = calibrate_from_tables("h100", framework="trtllm").details["errors"]
    assert errors["gemm/bf16"]["num_points"] == len(SHAPES)
    assert errors["gemm/bf16"]["p90"] < 0.5 * errors["gemm/bf16"]["formula_p90"]


def test_collectives_by_size_of_the_message(package):
    classes = calibrate_from_tables("h100", framework="trtllm").details["collectives"]
    assert sorted(classes) == ["all_reduce", "all_to_all"]
    for curve in classes["all_reduce"].values():
        assert len(curve) > 2
        assert [s for _, s in curve] == pytest.approx([20e-6 + b / 200e9 for b, _ in curve], rel=0.01)


def change(rows: dict[str, list[Any]], index: int, latency: float) -> dict[str, list[Any]]:
    return {**rows, "latency": [latency if i == index else t for i, t in enumerate(rows["latency"])]}


@pytest.mark.parametrize(
    ("latency", "note"),
    [(1e-9, "faster than the peak"), (1e9, "a stall"), (float("nan"), "no time"), (-1.0, "no time")],
)
def test_a_row_that_cannot_be_is_refused_and_named(package, latency, note):
    index = SHAPES.index((4096, 4096, 4096))
    package.write(GEMM_FILE, change(gemm_rows(), index, latency))
    source = calibrate_from_tables("h100", framework="trtllm").details["tables"]["corrections"]["gemm/bf16"]
    assert source["num_rows"] == len(SHAPES) - 1
    assert any("1 row" in n and note in n for n in source["notes"]), source["notes"]


def test_less_time_for_more_work_is_named_and_kept(package):
    index = SHAPES.index((4096, 4096, 4096))
    rows = gemm_rows()
    package.write(GEMM_FILE, change(rows, index, rows["latency"][index] * 3))
    source = calibrate_from_tables("h100", framework="trtllm").details["tables"]["corrections"]["gemm/bf16"]
    assert source["num_rows"] == len(SHAPES)
    assert any("8192 x 4096 x 4096" in n for n in source["notes"]), source["notes"]


def test_sizes_of_serving_do_not_count(package):
    odd = [(m + 1, n, k) for m, n, k in SHAPES] + [(16, n, k) for m, n, k in SHAPES if m == 512]
    package.write(GEMM_FILE, gemm_rows([*SHAPES, *odd]))
    source = calibrate_from_tables("h100", framework="trtllm").details["tables"]["corrections"]["gemm/bf16"]
    assert source["num_rows"] == len(SHAPES)


def test_tables_of_another_accelerator_are_refused(package):
    rows = gemm_rows()
    package.write(GEMM_FILE, {**rows, "latency": [t / 3 for t in rows["latency"]]})
    with pytest.raises(InputError, match="faster than the peak"):
        calibrate_from_tables("h100", framework="trtllm")


@pytest.mark.parametrize(
    ("device", "framework", "words"),
    [("mi300x", "trtllm", "no tables of this accelerator"), ("h100", "vllm", "no GEMM tables of h100")],
)
def test_what_the_package_lacks(package, device, framework, words):
    with pytest.raises(InputError, match=words) as caught:
        calibrate_from_tables(device, framework=framework)
    assert str(caught.value).endswith(("allowed: h100", "allowed: trtllm"))


def test_other_columns_and_broken_files(package):
    rows = gemm_rows()
    package.write(GEMM_FILE, {"ms" if name == "latency" else name: v for name, v in rows.items()})
    with pytest.raises(InputError, match="not a table"):
        calibrate_from_tables("h100", framework="trtllm")
    (package.data / GEMM_FILE).write_bytes(b"no Parquet")
    with pytest.raises(InputError, match="cannot be read"):
        calibrate_from_tables("h100", framework="trtllm")


def test_without_the_package(monkeypatch, meshwright, tmp_path):
    monkeypatch.setattr(aiconfigurator, "MODULE", "a_package_that_nobody_has")
    with pytest.raises(MissingDependencyError):
        calibrate_from_tables("h100", framework="trtllm")
    outcome = meshwright("calibrate", "--from-tables", "aiconfigurator", "--device", "h100")
    assert outcome.exit_code == 3
    assert install_command("tables") in outcome.stderr


RUN = """\
model: llama3.1-8b
cluster: h100-8x1
data: {sequence_length: 8192}
batch: {global_sequences: 128}
"""


@pytest.fixture
def run_file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_the_command_writes_what_the_planner_reads(package, meshwright, tmp_path, run_file):
    out = tmp_path / "h100.json"
    made = meshwright("calibrate", "--from-tables", "aiconfigurator", "--device", "h100", "--out", out)
    assert made.exit_code == 0, made.stderr
    assert "Apache-2.0" in made.stdout
    assert load(out).corrections.keys() == calibrate_from_tables("h100", framework="trtllm").corrections.keys()
    pinned = "parallel={tensor: 8, sequence_parallel: true}"
    plain = meshwright("estimate", run_file, "--set", pinned, "--json")
    shaped = meshwright("estimate", run_file, "--set", pinned, "--calibration", out, "--json")
    assert shaped.exit_code == 0, shaped.stderr
    seconds = [r.json["estimate"]["step"]["value"] for r in (plain, shaped)]
    assert seconds[1] != seconds[0]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)


def test_accuracy_judges_it(package, meshwright, tmp_path):
    out, runs = tmp_path / "h100.json", tmp_path / "runs.csv"
    meshwright("calibrate", "--from-tables", "aiconfigurator", "--device", "h100", "--out", out)
    lines = measured_runs_path().read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines[1:] if line.startswith("nemo_24_07") and "H100" in line]
    runs.write_text("\n".join([lines[0], *chosen]) + "\n", encoding="utf-8")
    plain = meshwright("accuracy", "--runs", runs, "--json")
    shaped = meshwright("accuracy", "--runs", runs, "--calibration", out, "--json")
    assert shaped.exit_code == 0, shaped.stderr
    bias = [r.json["summary"]["bias"] for r in (plain, shaped)]
    assert bias[0] != bias[1]
    assert bias[0] == pytest.approx(bias[1], abs=0.1)


def test_accuracy_takes_no_calibration_of_one_machine(package, meshwright, tmp_path):
    found = calibrate_from_tables("h100", framework="trtllm")
    measured = replace(found, parameters={"gemm_ratio": MeasuredParameter(value=0.5, sd=0.1)})
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_document(measured)))
    outcome = meshwright("accuracy", "--calibration", path)
    assert outcome.exit_code == 2
    assert "a calibration of one machine" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to calibrate from"),
        (("--from-tables", "aiconfigurator"), "needs --device"),
        (("records", "--from-tables", "aiconfigurator", "--device", "h100"), "takes no records"),
    ],
)
def test_what_is_asked_must_be_one_thing(meshwright, arguments, words):
    outcome = meshwright("calibrate", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.stderr


def test_installing_is_for_devices_without_a_catalogue(package, meshwright):
    outcome = meshwright("calibrate", "--from-tables", "aiconfigurator", "--device", "h100", "--install")
    assert outcome.exit_code == 2
    assert "the catalogue lacks" in outcome.stderr


@pytest.mark.skipif(not REAL, reason="aiconfigurator-core is not installed: pip install '.[tables]'")
@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_the_real_tables(device):
    found = calibrate_from_tables(device, framework="trtllm")
    gemm = found.details["errors"]["gemm/bf16"]
    assert gemm["num_points"] > 1000
    assert gemm["median"] < 0.07
    assert gemm["median"] < 0.6 * gemm["formula_median"]
    assert 0.5 < found.details["tables"]["corrections"]["gemm/bf16"]["utilisation"] < 0.95
    assert json.loads(json.dumps(to_document(found)))["tables"]["licence"] == "Apache-2.0"
    assert all(np.isfinite(s.y).all() for s in found.corrections.values())
