"""Records of bench kernels and bench device in reports and comparisons, and damaged ones."""

from __future__ import annotations

import json

import pytest

from meshwright.answers.comparison.sides import KERNEL_TIME, ROOFLINE
from meshwright.answers.comparison.study import compare_items
from meshwright.answers.overview.collect import collect
from meshwright.errors import InputError
from meshwright.records.kernel_routes import read_kernel_routes
from meshwright.report.overview.kernels import drawn_calls, kernels_table
from meshwright.report.overview.page import markdown, record_page

TIME = {"low": 0.9e-3, "median": 1e-3, "high": 1.2e-3, "samples": 9}
ROW = {
    "op": "swiglu", "model": "llama3.1-8b", "shape": "8192 x 14336", "format": "bf16", "route": "triton", "reason": "",
    "forward_s": TIME, "backward_s": {**TIME, "median": 3e-3, "high": 4e-3}, "flops": 0.0, "least_bytes": 8e9,
    "roofline_ratio": 0.5, "peak_bytes": 2**30, "error": 1e-3, "is_default": True, "is_fastest": True,
}  # fmt: skip
GEMM = {**ROW, "op": "fp8_gemm", "flops": 4e12, "roofline_ratio": 0.8, "backward_s": None}
DOCUMENT = {
    "schema": "meshwright kernel routes 1", "device": {"name": "NVIDIA H100", "accelerator": "h100"}, "driver": {},
    "software": {"torch": "2.13.0"}, "command": ["meshwright", "bench", "kernels"], "started": "2026-11-23T00:00:00",
    "git_commit": None, "rows": [ROW, {**ROW, "route": "compile", "is_fastest": False, "is_default": False}, GEMM,
        {**ROW, "route": "liger", "reason": "not installed", "forward_s": None, "backward_s": None}],
}  # fmt: skip


def write(folder, **changes):
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(json.dumps({**DOCUMENT, **changes}), encoding="utf-8")
    return folder


def test_rates_are_work_over_time(tmp_path):
    found = collect([str(write(tmp_path / "k"))])
    first, compiled, gemm = found.entries[0].kernels  # the route that was not measured is not among them
    assert first.seconds == pytest.approx(4e-3)
    assert first.bytes_per_s == pytest.approx(2e12)
    assert first.flops_per_s is None
    assert gemm.flops_per_s == pytest.approx(4e15)
    assert not compiled.is_fastest
    assert [c.roofline_ratio for _, c in drawn_calls(found)] == [0.5, 0.8]
    rows = kernels_table(found).rows
    assert [row[2] for row in rows] == ["triton", "compile", "triton"]
    assert rows[2][5:8] == ("4,000", "8,000", "80.0 %")
    page = record_page(found)
    assert "Kernels by shape" in page
    assert page.count("for-wide") > 1
    assert "Share of the roofline" in markdown(found)


def test_two_records_are_compared_by_call(tmp_path):
    slow = {**ROW, "forward_s": {**TIME, "median": 5e-3}}
    found = compare_items([str(write(tmp_path / "a")), str(write(tmp_path / "b", rows=[slow]))])
    ratios = {r.metric: r.value for mean in found.means for r in [mean]}
    assert ratios[KERNEL_TIME.name] == pytest.approx(4 / 8, rel=1e-6)  # the second is half as fast
    assert ROOFLINE.name in ratios


def test_calls_of_bench_device_have_rates(tmp_path):
    from meshwright.answers.comparison.kernel_sides import device_calls
    from meshwright.records.device import Records, row_of
    from meshwright.records.measurement import Measurement
    from meshwright.records.points import Point, PointFamily

    measured = (
        (PointFamily.GEMM, "forward", {"m": 1024, "n": 1024, "k": 1024}, 2e-3),
        (PointFamily.GEMM, "forward", {"m": 512, "n": 512, "k": 512}, 1e-3),
        (PointFamily.MEMORY, "copy", {"size_bytes": 10**9}, 1.0),
        (PointFamily.LAUNCH, "add", {}, 1e-6),  # is no kernel of a shape
    )
    rows = [
        row_of(
            Point(family=family, kernel=kernel, format="bf16", **shape),
            Measurement(seconds=(seconds,) * 5, calls=1, target_ratio=0.02),
        )
        for family, kernel, shape, seconds in measured
    ]
    found = Records(path=tmp_path, sidecar={}, rows=tuple(rows))
    large, small, copy = device_calls(found)
    assert large.flops_per_s == pytest.approx(2 * 1024**3 / 2e-3)
    assert large.roofline_ratio == pytest.approx(1.57, rel=0.01)  # its bytes take longer than its FLOPs
    assert small.roofline_ratio < large.roofline_ratio
    assert copy.roofline_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"schema": "another"}, "schema"),
        ({"rows": {}}, "rows"),
        ({"rows": [3]}, "rows[0]"),
        ({"rows": [{**ROW, "op": None}]}, "rows[0].op"),
        ({"rows": [ROW, {**ROW, "forward_s": {"median": float("nan")}}]}, "rows[1].forward_s.median"),
        ({"rows": [{**ROW, "forward_s": {**TIME, "median": 0}}]}, "rows[0].forward_s.median"),
        ({"rows": [{**ROW, "roofline_ratio": float("inf")}]}, "rows[0].roofline_ratio"),
        ({"rows": [{**ROW, "flops": "many"}]}, "rows[0].flops"),
        ({"device": None}, "device"),
    ],
    ids=["schema", "rows", "row", "text", "nan", "zero", "inf", "kind", "device"],
)
def test_a_damaged_record_is_named_with_its_field(tmp_path, changes, field):
    folder = write(tmp_path / "k", **changes)
    with pytest.raises(InputError) as refused:
        read_kernel_routes(folder)
    assert "kernels.json" in refused.value.message
    assert field in refused.value.message


def test_a_record_before_the_work_was_written_has_no_rates(tmp_path):
    old = {k: v for k, v in ROW.items() if k not in ("flops", "least_bytes")}
    found = collect([str(write(tmp_path / "k", rows=[old]))])
    assert found.entries[0].kernels[0].bytes_per_s is None
    assert kernels_table(found).rows[0][7] == "50.0 %"


def test_markup_in_names_stays_text(tmp_path):
    page = record_page(collect([str(write(tmp_path / "k", rows=[{**ROW, "shape": "<img src=x>", "route": "<b>"}]))]))
    assert "<img" not in page
    assert "<b>&lt;" not in page
