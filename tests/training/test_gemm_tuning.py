"""A tuning file is honoured on the device it is of, put away afterwards, and refused everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.processors import pretend
from tests.rounding import difference, unit_roundoff
from torch.cuda import tunable

from meshwright import runfile
from meshwright.errors import InputError
from meshwright.kernels import linear as made
from meshwright.kernels.linear import BY_ROUTE, GemmKind, GemmRoute
from meshwright.kernels.processor import Multiplies
from meshwright.specs.plan import Plan
from meshwright.training.gemm_tuning import (
    GemmChoices,
    GemmTuning,
    conditions,
    load,
    require,
    to_text,
    tuned_kernels,
    tuning_kernels,
    using,
)
from meshwright.training.step_gemms import Gemm, count_gemms

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAN = Plan(micro_batch=2)
FORWARD = Gemm(format="bf16", m=32, n=64, k=32, kernel=GemmKind.FORWARD)
LINES = ("Validator,PT_VERSION,2.13.0", "GemmTunableOp_BFloat16_TN,tn_64_32_32_ld_32_32_64,Gemm_Rocblas_7,0.01")


def tuning(**choices: Any) -> GemmTuning:
    return GemmTuning(conditions=conditions(CPU), choices=GemmChoices(**choices))


@pytest.fixture
def saved(tmp_path) -> Callable[[GemmTuning], Path]:
    def save(found: GemmTuning) -> Path:
        path = tmp_path / "tuned.json"
        path.write_text(to_text(found))
        return path

    return save


@pytest.mark.parametrize(
    "choices",
    [
        GemmChoices(),
        GemmChoices(threads=2, routes={FORWARD: GemmRoute.ONEDNN_ROWS}),
        GemmChoices(library="cublaslt"),
        GemmChoices(tunable_op=LINES),
    ],
)
def test_what_is_written_is_read(saved, choices):
    found = replace(tuning(), choices=choices, details={"step": {"before_s": 1.0}})
    assert load(saved(found)) == found


def test_a_file_that_is_cut_short_anywhere_is_refused(saved):
    path = saved(tuning(routes={FORWARD: GemmRoute.ONEDNN}))
    text = path.read_text().rstrip()
    for end in range(0, len(text), 7):
        path.write_text(text[:end])
        with pytest.raises(InputError, match="cut short or no JSON"):
            load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="other 1"), "no file of tuned GEMMs.*other 1"),
        (lambda d: d.pop("conditions"), "'conditions' is missing"),
        (lambda d: d["conditions"].pop("torch"), "torch"),
        (lambda d: d["choices"].update(threads=0), "threads"),
        (lambda d: d["choices"].update(library="mkl"), "library"),
        (lambda d: d["choices"].update(tunable_op=["a\nb"]), "tunable_op"),
        (lambda d: d["choices"].update(routes=[{"m": 1}]), "'n' is missing"),
        (lambda d: d["choices"]["routes"][0].update(m=-1), "GEMM"),
        (lambda d: d["choices"]["routes"][0].update(route="by magic"), "by magic"),
        (lambda d: d["choices"]["routes"][0].update(kernel="sideways"), "sideways"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(saved, change, words):
    path = saved(tuning(routes={FORWARD: GemmRoute.ONEDNN}))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        load(path)


def test_files_that_are_no_documents_are_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "absent.json")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match="no file of tuned GEMMs: got 'list'"):
        load(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00\x01")
    with pytest.raises(InputError, match="no JSON"):
        load(tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("key", "words"), [("device", "another device"), ("torch", "version of PyTorch"), ("toolkit", "CUDA or HIP")]
)
def test_a_file_of_other_conditions_is_refused(key, words):
    found = tuning(threads=1)
    other = replace(found, conditions=replace(found.conditions, **{key: "another"}))
    require(found, device=CPU, plan=PLAN, gemms=[FORWARD], name="f")
    with pytest.raises(InputError, match=words):
        require(other, device=CPU, plan=PLAN, gemms=[FORWARD], name="f")


def test_a_file_that_the_run_cannot_honour_is_refused():
    found = tuning(routes={FORWARD: GemmRoute.TORCH_ROWS})
    with pytest.raises(InputError, match="no GEMM of this run"):
        require(found, device=CPU, plan=PLAN, gemms=[replace(FORWARD, m=64)], name="f")
    with pytest.raises(InputError, match="tensor parallelism"):
        require(found, device=CPU, plan=replace(PLAN, tensor=2), gemms=[FORWARD], name="f")


def test_a_file_with_routes_that_the_processor_lacks_is_refused(monkeypatch):
    pretend(monkeypatch, Multiplies.FP32)
    found = tuning(routes={FORWARD: GemmRoute.ONEDNN})
    with pytest.raises(InputError, match="a route for bf16 that this processor lacks: got 'onednn'"):
        require(found, device=CPU, plan=PLAN, gemms=[FORWARD], name="f")
    require(tuning(routes={FORWARD: GemmRoute.TORCH_ROWS}), device=CPU, plan=PLAN, gemms=[FORWARD], name="f")


@pytest.mark.parametrize(
    ("dtype", "route"), [(dtype, route) for dtype in (torch.float32, torch.bfloat16) for route in made.routes_of(dtype)]
)
def test_every_route_makes_the_same_products_to_rounding(dtype, route):
    x, weight = torch.randn(3, 10, 40).to(dtype), torch.randn(24, 40).to(dtype)
    grad = torch.randn(3, 10, 24).to(dtype)
    format = "fp32" if dtype == torch.float32 else "bf16"
    routes = {Gemm(format=format, m=30, n=24, k=40, kernel=kernel): route for kernel in GemmKind}

    def passes() -> list[Any]:
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = made.linear(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    usual = passes()
    with using(GemmChoices(routes=routes), CPU):
        routed = passes()
    for got, right in zip(routed, usual, strict=True):
        assert got.shape == right.shape
        tolerance = difference(40) + (2 * unit_roundoff(dtype) if dtype == torch.bfloat16 else 0.0)
        assert (got.float() - right.float()).norm() <= tolerance * right.float().norm()


def test_routes_are_taken_by_their_product_alone_and_put_away(monkeypatch):
    taken = []

    def spy(x, y):
        taken.append(tuple(x.shape))
        return x @ y.T

    monkeypatch.setitem(BY_ROUTE, GemmRoute.TORCH_ROWS, spy)
    layer, other = made.Linear(32, 64, bias=False).bfloat16(), made.Linear(32, 16, bias=False).bfloat16()
    x = torch.randn(32, 32).bfloat16()
    with using(GemmChoices(routes={FORWARD: GemmRoute.TORCH_ROWS}), CPU):
        layer(x).sum().backward()
        other(x)
    assert taken == [(32, 32)]
    layer(x)
    assert taken == [(32, 32)]


def test_threads_are_put_back():
    before = torch.get_num_threads()
    within = []

    def fail() -> None:
        with using(GemmChoices(threads=before + 1), CPU):
            within.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within == [before + 1]
    assert torch.get_num_threads() == before


# --- what a GPU would do, told to a stand-in ---


@pytest.fixture
def stand_in(monkeypatch) -> list[Any]:
    """Records what is asked of TunableOp and of the choice of libraries."""
    asked: list[Any] = []

    def read_file(name: str) -> bool:
        asked.append(("read", tuple(Path(name).read_text().splitlines())))
        return True

    def library(name: Any = None) -> Any:
        if name is not None:
            asked.append(("library", name))
        return "the library before"

    for name in ("enable", "tuning_enable", "set_max_tuning_duration", "set_filename"):
        monkeypatch.setattr(tunable, name, lambda value, name=name: asked.append((name, value)))
    monkeypatch.setattr(tunable, "read_file", read_file)
    monkeypatch.setattr(tunable, "get_validators", lambda: (("PT_VERSION", "2.13.0"),))
    results = (("GemmTunableOp_float_NT", "nt_1_2_3", "Gemm_Hipblaslt_5", 0.5), ("Other", "x", "Default", 0.1))
    monkeypatch.setattr(tunable, "get_results", lambda: results)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    return asked


def test_kernels_of_tunable_op_are_read_and_switched_off_again(stand_in):
    with using(GemmChoices(tunable_op=LINES), GPU):
        assert ("read", LINES) in stand_in
        assert ("tuning_enable", False) in stand_in  # nothing is tuned in the middle of a training
        assert stand_in[-1] == ("read", LINES)
    assert stand_in[-1] == ("enable", False)


def test_kernels_that_pytorch_refuses_stop_the_run(stand_in, monkeypatch):
    monkeypatch.setattr(tunable, "read_file", lambda name: False)
    with (
        pytest.raises(InputError, match="PyTorch refuses the tuned kernels"),
        using(GemmChoices(tunable_op=LINES), GPU),
    ):
        pass
    assert stand_in[-1] == ("enable", False)


def test_tuning_is_on_while_it_is_asked_for(stand_in):
    with tuning_kernels(most_ms=30):
        assert stand_in[1:] == [("set_max_tuning_duration", 30), ("enable", True), ("tuning_enable", True)]
        lines = tuned_kernels()
    assert stand_in[-2:] == [("tuning_enable", False), ("enable", False)]
    assert lines == ("Validator,PT_VERSION,2.13.0", "GemmTunableOp_float_NT,nt_1_2_3,Gemm_Hipblaslt_5,0.5")


def test_the_library_is_preferred_and_put_back(stand_in):
    with using(GemmChoices(library="cublaslt"), GPU):
        assert stand_in == [("library", "cublaslt")]
    assert stand_in[-1] == ("library", "the library before")


# --- a training ---


def test_a_training_makes_its_products_as_the_file_says(tiny_run, tmp_path, saved):
    usual = tiny_run(tmp_path / "usual")
    usual.train()
    run = runfile.loads(usual.text)
    routes = dict.fromkeys(count_gemms(run, PLAN), GemmRoute.TORCH_ROWS)
    path = saved(tuning(threads=1, routes=routes))
    tuned = tiny_run(tmp_path / "tuned", gemm_tuning=str(path))
    record = tuned.train()
    assert f"GEMMs as in {path}: 1 thread, {len(routes)} of {len(routes)} GEMMs by another route" in str(
        record["notes"]
    )
    assert record["device"]["threads"] == 1
    assert tuned.losses() == pytest.approx(usual.losses(), rel=1e-3)


def test_a_training_refuses_a_file_of_another_device(meshwright, tiny_run, tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = replace(tuning(threads=1), conditions=replace(conditions(CPU), device="NVIDIA H100"))
    (tmp_path / "run.yaml").write_text(tiny_run(tmp_path, gemm_tuning=str(saved(other))).text)
    outcome = meshwright("train", "run.yaml")
    assert outcome.exit_code == 2
    assert "is of another device: got 'NVIDIA H100'" in outcome.stderr
    assert not (tmp_path / "runs").exists()
