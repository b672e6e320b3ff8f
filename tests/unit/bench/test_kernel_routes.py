"""`bench kernels`: rows of all routes, the fastest one, the tuned table, records that `calibrate` reads."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from meshwright.bench import kernel_routes
from meshwright.bench.kernel_cases import MAKERS, cases_of
from meshwright.bench.kernel_routes import RouteRow, _fastest
from meshwright.catalog import lookup as catalog
from meshwright.kernels import tuned
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.routes import routes_of
from meshwright.records.device import read
from meshwright.records.measurement import Measurement

CPU = torch.device("cpu")
SMALL = "qwen2.5-0.5b"


def row(route, seconds, error):
    measured = Measurement(seconds=(seconds,) * 8, calls=1, target_ratio=0.1)
    common = {"op": "swiglu", "model": "m", "shape": "s", "format": "bf16"}
    return RouteRow(**common, route=route, forward_s=measured, error=error)


def test_the_fastest_route_rounds_as_the_reference_does():
    reference, coarse, fine = row("reference", 3.0, 1e-3), row("triton", 1.0, 1e-2), row("liger", 2.0, 1.9e-3)
    assert _fastest([reference, coarse, fine]) is fine
    assert _fastest([reference, row("compile", 0.1, 1e-3)]) is reference  # no route of the dispatcher
    assert _fastest([RouteRow(op="swiglu", model="m", shape="s", format="bf16", route="triton", reason="none")]) is None


def test_every_operation_of_the_table_is_timed():
    assert set(MAKERS) == set(OPERATIONS)


def small_mixture():
    model = catalog.model("gpt-oss-20b")
    assert model.experts is not None
    return replace(model, hidden=64, experts=replace(model.experts, num_experts=4, top_k=2, ffn_hidden=32))


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_a_case_of_each_operation_runs_and_calls_it(op):
    model = replace(catalog.model(SMALL), vocab=64)
    cases = list(cases_of(op, model, tokens=2, format="fp32", device=CPU))
    if not cases:
        cases = list(cases_of(op, small_mixture(), tokens=2, format="fp32", device=CPU))
    assert cases
    for case in cases:
        with using(KernelRouting()) as routing:
            out = case.run(*case.tensors)
        assert op in {choice.call.op for choice in routing.choices.values()}
        assert all(torch.isfinite(x.float()).all() for x in (out if isinstance(out, tuple) else (out,)))
        assert case.bytes > 0


def test_the_cast_of_a_stack_of_experts_is_timed():
    """Each matrix has scales of its own; a model without experts has no stack."""
    model = small_mixture()
    shapes = [case.shape for case in cases_of("fp8_cast", model, tokens=2, format="fp32", device=CPU)]
    assert [s for s in shapes if "experts" in s] == [
        f"4 experts of 32 x 64, scales of {scaling}" for scaling in ("tensor", "row", "square")
    ]
    cases = cases_of("fp8_cast", model, tokens=2, format="fp32", device=CPU)
    (stack,) = [case for case in cases if case.shape.endswith("experts of 32 x 64, scales of row")]
    by_rows, by_columns = stack.run(*stack.tensors)
    assert by_rows.shape == (4, 32, 64)
    assert by_columns.shape == (4, 64, 32)
    assert stack.bytes == 4 * 32 * 64 * (4 + 2)


def test_the_folder_of_a_measurement(meshwright, tmp_path, monkeypatch):
    """Without Triton's interpreter: test_determinism.py runs these cases by our kernels, test_libraries.py Liger's."""
    few = {op: [route for route in routes_of(op) if route not in ("triton", "liger")] for op in OPERATIONS}
    monkeypatch.setattr(kernel_routes, "routes_of", few.get)
    given = ("bench", "kernels", "--ops", "swiglu,attention", "--models", SMALL, "--tokens", "8", "--budget", "1s")
    found = meshwright(*given, "--out", str(tmp_path), "--json")
    assert found.exit_code == 0
    document = found.json
    rows = {(r["op"], r["route"]): r for r in document["rows"]}
    assert rows["swiglu", "reference"]["forward_s"]["median"] > 0
    assert rows["swiglu", "reference"]["error"] < 1e-5
    assert rows["attention", "flash"]["reason"] == "a kernel of GPUs"
    assert sum(r["is_fastest"] for r in document["rows"]) == 2
    kept = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [(r["op"], r["route"]) for r in kept] == list(rows)
    table = tuned.load(tmp_path / "tuned.json")
    assert {call.op for call in table.routes} == {"swiglu", "attention"}
    (case,) = cases_of("swiglu", catalog.model(SMALL), tokens=8, format="fp32", device=CPU)
    with using(KernelRouting(tuned=table)) as routing:
        case.run(*case.tensors)
    assert [choice.why for choice in routing.choices.values()] == ["tuned"]
    assert {(r.point.family.value, r.point.kernel) for r in read(tmp_path).measured} == {
        ("elementwise", "swiglu"), ("attention", "forward"), ("attention", "backward"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [("--ops", "swigul"), ("--ops", ","), ("--models", "llama9"), ("--formats", "fp7"), ("--tokens", "0")],
    ids=["operation", "none", "model", "format", "tokens"],
)
def test_bad_input(meshwright, tmp_path, options):
    found = meshwright("bench", "kernels", "--out", str(tmp_path / "x"), *options)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "x").exists()
