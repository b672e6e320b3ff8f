"""Only significantly faster choices are kept; those of a GPU are tested with a stand-in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from tests.processors import pretend

from meshwright.bench import gemm
from meshwright.bench.gemm import LEAST_CONFIRMED, _sound_routes, _Work, free_threads, tune
from meshwright.errors import InputError
from meshwright.kernels.linear import BY_ROUTE, GemmKind, GemmRoute, default_route
from meshwright.kernels.processor import Multiplies
from meshwright.training.gemm_tuning import GemmChoices
from meshwright.training.step_gemms import Gemm

CPU = torch.device("cpu")
FORWARD = Gemm(format="bf16", m=16, n=24, k=8, kernel=GemmKind.FORWARD)
GRADIENT = Gemm(format="bf16", m=16, n=24, k=8, kernel=GemmKind.WEIGHT_GRADIENT)
COUNTS = {FORWARD: 10, GRADIENT: 1}
LINES = ("Validator,PT_VERSION,2.13.0", "GemmTunableOp_BFloat16_TN,tn_1,Gemm_Rocblas_7,0.01")

Seconds = Callable[[Gemm, GemmChoices], float]


@dataclass
class Machine:
    """Takes `seconds` for a product under the choices of the moment, with some noise."""

    seconds: Seconds
    noise: float = 0.01
    now: GemmChoices = field(default_factory=GemmChoices)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def sample_s(self, work: _Work, p: Gemm) -> float:
        return self.seconds(p, self.now) * self.draw.lognormvariate(0, self.noise)

    @contextmanager
    def using(self, choices: GemmChoices, device: torch.device) -> Iterator[None]:
        before, self.now = self.now, choices
        yield
        self.now = before


@pytest.fixture
def tuned(monkeypatch):
    """`tuned(seconds)`: what tuning finds on a machine that takes so long."""

    def run(seconds: Seconds, *, noise: float = 0.01, device: torch.device = CPU, **more):
        machine = Machine(seconds, noise)
        monkeypatch.setattr(_Work, "sample_s", lambda work, p: machine.sample_s(work, p))
        monkeypatch.setattr(gemm, "using", machine.using)
        monkeypatch.setattr(gemm, "MAX_ROUNDS", 15)
        if device.type != "cpu":
            nothing = dict.fromkeys(COUNTS, lambda: None)
            monkeypatch.setattr(
                gemm, "_work", lambda counts, device: _Work(counts=counts, calls=nothing, device=device)
            )
            monkeypatch.setattr(gemm.devices, "synchronize", lambda device: None)
        return tune(COUNTS, device=device, budget_s=1.0, **more)

    return run


def test_a_faster_route_is_kept_only_for_its_gemm(tuned):
    def seconds(p: Gemm, now: GemmChoices) -> float:
        return 0.5 if p == GRADIENT and now.routes.get(p) is GemmRoute.TORCH_ROWS else 1.0

    found = tuned(seconds)
    assert found.choices == GemmChoices(routes={GRADIENT: GemmRoute.TORCH_ROWS})
    forward, gradient = found.rows
    assert (forward.route, gradient.route) == (None, GemmRoute.TORCH_ROWS)
    assert forward.ratio.interval == (1.0, 1.0)
    assert gradient.ratio.median == pytest.approx(0.5, rel=0.02)
    assert found.before_s.median == pytest.approx(11.0, rel=0.02)
    assert found.after_s.median == pytest.approx(10.5, rel=0.02)
    assert found.ratio.interval[1] < 1


@pytest.mark.parametrize("noise", [0.001, 0.1, 0.5])
def test_noise_is_not_taken_for_a_finding(tuned, noise):
    found = tuned(lambda p, now: 1.0, noise=noise, most_threads=8)
    assert found.choices.is_usual
    assert found.ratio.interval == (1.0, 1.0)


def test_a_lucky_first_look_does_not_stand(tuned):
    tries = 0

    def seconds(p: Gemm, now: GemmChoices) -> float:
        nonlocal tries
        tries += 1
        return 0.5 if now.routes and tries < 50 else 1.0  # fast while it is tried, not when it is confirmed

    assert tuned(seconds).choices.is_usual


def test_threads_are_chosen_and_routes_under_them(tuned):
    def seconds(p: Gemm, now: GemmChoices) -> float:
        by_threads = {None: 1.0, 1: 2.0, 2: 0.9, 4: 0.6, 6: 0.8}[now.threads]
        return by_threads * (0.8 if now.routes.get(p) is GemmRoute.TORCH_ROWS else 1.0)

    found = tuned(seconds, most_threads=6)
    assert found.choices == GemmChoices(threads=4, routes={GRADIENT: GemmRoute.TORCH_ROWS})
    assert found.ratio.median == pytest.approx((10 * 0.6 + 0.48) / 11, rel=0.02)
    assert "4 threads" in found.tried


def test_threads_that_the_environment_sets_are_not_changed(tuned, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert free_threads(1) is None
    found = tuned(lambda p, now: 1.0, most_threads=None)
    assert any("OMP_NUM_THREADS" in note for note in found.notes)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert free_threads(10**6) == 1


def test_without_routes_none_is_tried(tuned):
    found = tuned(lambda p, now: 0.1 if now.routes else 1.0, with_routes=False)
    assert found.choices.is_usual
    assert not any("route" in words for words in found.tried)


def test_a_route_that_rounds_worse_is_not_tried(monkeypatch):
    rough = lambda x, y: ((x @ y.T) * 1.01).to(x.dtype)  # noqa: E731
    assert GemmRoute.TORCH_ROWS in _sound_routes(GRADIENT)
    assert GemmRoute.TORCH_ROWS not in _sound_routes(FORWARD)  # its factors are in rows already
    monkeypatch.setitem(BY_ROUTE, GemmRoute.TORCH_ROWS, rough)
    assert GemmRoute.TORCH_ROWS not in _sound_routes(GRADIENT)
    assert default_route(torch.bfloat16) in _sound_routes(GRADIENT)


def test_a_route_that_the_processor_lacks_is_not_tried(tuned, monkeypatch):
    pretend(monkeypatch, Multiplies.FP32)
    monkeypatch.delitem(BY_ROUTE, GemmRoute.ONEDNN)
    monkeypatch.delitem(BY_ROUTE, GemmRoute.ONEDNN_ROWS)
    found = tuned(lambda p, now: 1.0)
    routes = [words for words in found.tried if "route" in words]
    assert routes == ["route: torch", "route: torch, rows", "route: widened"]


def test_real_gemms_are_measured():
    counts = {FORWARD: 2, GRADIENT: 1, Gemm(format="fp32", m=16, n=24, k=8, kernel=GemmKind.INPUT_GRADIENT): 3}
    found = tune(counts, device=CPU, budget_s=0.3)
    assert [row.count for row in found.rows] == [2, 1, 3]
    assert all(0 < row.before_s.median < 1 for row in found.rows)
    assert all(row.ratio.n >= LEAST_CONFIRMED for row in found.rows)
    assert all((row.gemm in found.choices.routes) == (row.route is not None) for row in found.rows)
    assert all(row.ratio.interval[1] < 1 for row in found.rows if row.route is not None)


def test_factors_that_do_not_fit_are_bad_input(monkeypatch):
    monkeypatch.setattr(gemm.devices, "memory_bytes", lambda device: 100)
    with pytest.raises(InputError, match="do not fit the memory"):
        tune(COUNTS, device=CPU, budget_s=1.0)


def test_an_interrupt_ends_it(monkeypatch):
    def interrupted(work: _Work, p: Gemm) -> float:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    monkeypatch.setattr(_Work, "sample_s", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(COUNTS, device=CPU, budget_s=1.0, most_threads=2)
    assert torch.get_num_threads() == threads


# --- what a GPU would do ---


def test_nvidia_chooses_between_libraries(tuned, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    seconds = {None: 1.0, "cublas": 1.0, "cublaslt": 0.8}
    found = tuned(lambda p, now: seconds[now.library], device=torch.device("cuda"))
    assert found.choices == GemmChoices(library="cublaslt")
    assert found.tried == ("cuBLAS", "cuBLASLt")
    assert found.ratio.median == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize(("lines", "faster"), [(LINES, 0.7), (LINES, 1.0), ((), 1.0)])
def test_amd_takes_the_kernels_of_tunable_op_where_they_are_faster(tuned, monkeypatch, lines, faster):
    @contextmanager
    def tuning_kernels(*, most_ms: int) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(gemm, "tuning_kernels", tuning_kernels)
    monkeypatch.setattr(gemm, "tuned_kernels", lambda: lines)
    found = tuned(lambda p, now: faster if now.tunable_op else 1.0, device=torch.device("cuda"))
    assert found.choices == (GemmChoices(tunable_op=lines) if faster < 1 else GemmChoices())
    assert found.tried == ("TunableOp: kernels of rocBLAS and hipBLASLt",)
