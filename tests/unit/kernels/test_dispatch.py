"""Choices of routes, with their reasons."""

import tomllib

import pytest

torch = pytest.importorskip("torch")

from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels import architectures as kernel_architectures
from meshwright.kernels import dispatch, triton_route, tuned
from meshwright.kernels.architectures import DATA, architectures, expected_routes, is_measured
from meshwright.kernels.dispatch import KernelRouting, choose, default_routes, summary, using
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.routes import ANY, KernelCall, Refusal, routes_of
from meshwright.kernels.triton_route import interpreter_fault
from meshwright.kernels.tuned import TunedCall, TunedTable


def call(op="swiglu", **changes):
    values = {"op": op, "shapes": ((4, 8), (4, 8)), "dtypes": ("float32", "float32"), "device": "cpu",
              "architecture": "cpu", "flags": frozenset({"silu"})}  # fmt: skip
    return KernelCall(**values | changes)


def table(route="reference", **changes):
    key = TunedCall(op="swiglu", shapes=((4, 8), (4, 8)), dtypes=("float32", "float32"))
    return TunedTable(**{"device": "x", "torch": "2", "triton": None, "routes": {key: route}} | changes)


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_operation_has_the_routes_of_its_row(op):
    assert tuple(routes_of(op)) == OPERATIONS[op].routes
    assert next(iter(routes_of(op))) == "reference"
    assert routes_of(op)["reference"].serves(call(op)) is None


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_architecture_states_its_routes_of_every_operation(op):
    rows = tomllib.loads((DATA / "defaults.toml").read_text(encoding="utf-8"))
    assert set(rows) == {"cpu", "other", *architectures()}
    for row in rows.values():
        assert set(row) <= {"basis", "measured", "compiled", *OPERATIONS}
        assert {*row.get("measured", ()), *row.get("compiled", ())} <= set(OPERATIONS)
        assert row[op]
        assert set(row[op]) <= set(OPERATIONS[op].routes)


def test_the_default_serves_what_no_file_names():
    choice = KernelRouting().choice(call())
    assert (choice.route, choice.why, choice.refused) == ("reference", "default", ())


def test_the_tuned_table_goes_before_the_default_and_the_run_file_before_both(monkeypatch):
    monkeypatch.setattr(dispatch, "default_routes", lambda op, architecture: ("liger", "reference"))
    assert KernelRouting(tuned=table("reference")).choice(call()).why == "tuned"
    assert KernelRouting(tuned=table("liger"), demanded={"swiglu": "reference"}).choice(call()).why == "run file"
    other = KernelRouting(tuned=table("reference")).choice(call(shapes=((5, 8), (5, 8))))
    assert other.why == "default"


def test_until_a_device_has_measured_the_default_is_a_library_s_and_the_planner_expects_the_fastest():
    for architecture in architectures():
        for op in OPERATIONS:
            if not is_measured(op, architecture=architecture):
                assert "triton" not in default_routes(op, architecture=architecture)
    assert expected_routes("swiglu", architecture="sm90")[0] == "triton"
    assert default_routes("swiglu", architecture="sm90") == ("reference",)
    assert default_routes("fp8_gemm", architecture="sm90") == ("scaled_mm", "reference")
    assert not is_measured("swiglu", architecture="sm75")
    assert is_measured("swiglu", architecture="cpu")


def test_a_device_that_measured_some_operations_has_their_order(monkeypatch):
    table = {"basis": "predicted", "measured": ["swiglu"], "swiglu": ["triton"], "rotary": ["triton", "reference"]}
    monkeypatch.setattr(kernel_architectures, "_defaults", lambda: {"sm90": table})
    assert default_routes("swiglu", architecture="sm90") == ("triton", "reference")
    assert default_routes("rotary", architecture="sm90") == ("reference",)


def test_a_measured_route_goes_before_the_default_and_stays_out_of_compiled_graphs():
    routing = KernelRouting(measured={"attention": "sdpa"})
    plain = call("attention", flags=frozenset({"causal"}), shapes=((1, 4, 2, 8),) * 3, dtypes=("float32",) * 3)
    assert (routing.choice(plain).route, routing.choice(plain).why) == ("sdpa", "measured")
    assert routing.choice(call("attention", shapes=())).route == "blockwise"
    assert routing.fresh().measured == routing.measured
    refused = KernelRouting(measured={"attention": "flash"}).choice(plain)
    assert (refused.why, refused.refused[0][0]) == ("default", "flash")
    named = KernelRouting(measured={"attention": "sdpa"}, demanded={"attention": "reference"})
    assert named.choice(plain).why == "run file"


def test_a_preferred_route_that_cannot_serve_leaves_its_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "default_routes", lambda op, architecture: ("triton", "reference"))
    choice = KernelRouting().choice(call(flags=frozenset({"subclass", "silu"})))
    ((name, refusal),) = choice.refused
    assert (choice.route, name) == ("reference", "triton")
    assert isinstance(refusal, Refusal)
    assert refusal.reason


def test_a_demanded_route_that_cannot_serve_is_an_error():
    with pytest.raises(InputError, match=r"kernels\.swiglu: route triton cannot serve.*float64"):
        KernelRouting(demanded={"swiglu": "triton"}).choice(call(device="cuda", dtypes=("float64", "float64")))


@pytest.mark.parametrize("demanded", [{"swigul": "triton"}, {"swiglu": "tritn"}])
def test_unknown_names_are_errors(demanded):
    with pytest.raises(UnknownNameError):
        KernelRouting(demanded=demanded)


def test_choices_are_collected_once_for_each_distinct_call():
    with using(KernelRouting()) as routing:
        for _ in range(3):
            gated_activation(torch.ones(2, 3), torch.ones(2, 3))
        gated_activation(torch.ones(4, 3), torch.ones(4, 3))
    (row,) = summary(routing)
    assert (row["op"], row["route"], row["why"], row["calls"]) == ("swiglu", "reference", "default", 2)


def test_shapes_that_never_return_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_CHOICES", 4)
    routing = KernelRouting()
    with using(routing):
        for rows in range(1, 11):
            gated_activation(torch.ones(rows, 3), torch.ones(rows, 3))
    (row,) = summary(routing)
    assert row["calls"] == 10
    assert len(routing.choices) <= 4


def test_a_sharded_tensor_is_no_plain_one():
    class Other(torch.Tensor):
        pass

    with using(KernelRouting()) as routing:
        choose("swiglu", torch.ones(2).as_subclass(Other))
    assert "subclass" in next(iter(routing.choices)).flags


def test_an_unknown_architecture_has_the_reference():
    assert default_routes("swiglu", architecture="sm75")[-1] == "reference"


def test_a_tuned_table_returns_from_its_file(tmp_path):
    written = table("liger")
    written.write(tmp_path / "t.json")
    assert tuned.load(tmp_path / "t.json") == written


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "meshwright kernel tuning 1"}', "\x00", '{"schema": 3}'],
    ids=["empty", "list", "object", "no fields", "binary", "other schema"],
)  # fmt: skip
def test_a_file_that_is_no_table_is_an_error(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match="no table of tuned kernels"):
        tuned.load(tmp_path / "t.json")


def test_a_table_with_an_unknown_route_is_an_error(tmp_path):
    table("nothing").write(tmp_path / "t.json")
    with pytest.raises(InputError, match="this version has not"):
        tuned.load(tmp_path / "t.json")


@pytest.mark.parametrize(("device", "architecture"), [("cpu", "cpu"), ("cuda", "sm90"), ("cuda", "gfx942")])
@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_whether_a_route_serves_any_call_is_answered_without_its_shapes(op, device, architecture):
    asked = call(op, shapes=((1, 1), (1, 1)), dtypes=("bfloat16",), device=device, architecture=architecture,
                 flags=frozenset({"silu", ANY}))  # fmt: skip
    for name, route in routes_of(op).items():
        refusal = route.serves(asked)
        assert refusal is None or refusal.reason
        # Triton runs on a CPU in the interpreter; the formats of optimizer states are not known before the first step
        interpreted = name == "triton" and interpreter_fault() is None
        if interpreted or (op, name) == ("adamw", "fused"):
            assert refusal is None, name


@pytest.mark.parametrize(
    ("triton", "numpy", "fault"),
    [
        ("3.6.0", "2.4.0", "the interpreter of Triton 3.6 needs a NumPy older than 2.4: pip install 'numpy<2.4'"),
        ("3.6.0", "2.3.5", None),
        ("3.7.0", "2.4.0", None),
    ],
)
def test_an_interpreter_that_the_installed_numpy_does_not_suit(triton, numpy, fault, monkeypatch):
    monkeypatch.setattr(triton_route, "find_spec", lambda name: name)
    monkeypatch.setattr(triton_route, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    monkeypatch.setattr(triton_route, "is_interpreted", lambda: True)
    triton_route.interpreter_fault.cache_clear()
    try:
        refusal = triton_route.serves_triton(call("swiglu"))
    finally:
        triton_route.interpreter_fault.cache_clear()
    assert (refusal and refusal.reason) == fault


def test_a_compiled_graph_takes_the_reference_where_the_compiler_makes_it_faster(monkeypatch):
    traced, usual = call("attention", shapes=()), call("attention")
    assert (traced.is_traced, usual.is_traced) == (True, False)
    assert KernelRouting().choice(traced).route == "blockwise"
    monkeypatch.setattr(dispatch, "compiled_operations", lambda architecture: ("attention",))
    assert KernelRouting().choice(traced).route == "reference"
    assert KernelRouting().choice(usual).route == "blockwise"
