"""Rows of experts are filled up with zeros where oneDNN compiles a GEMM for each number of rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from meshwright.kernels import linear as linear_module
from meshwright.kernels.experts.grouped_gemm import opaque_reference, reference
from meshwright.specs.model import Experts
from meshwright.training.models import experts as experts_module
from meshwright.training.models.experts import RoutedExperts

E, D, F = 4, 16, 24


def made(*, bias: bool = False) -> RoutedExperts:
    module = RoutedExperts(D, Experts(num_experts=E, top_k=2, ffn_hidden=F, bias=bias))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return module


def routed(num: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of `num` rows by their experts, and the rows of each expert."""
    chosen = torch.randint(0, E, (num,), generator=torch.Generator().manual_seed(seed))
    return chosen.argsort(stable=True), torch.bincount(chosen, minlength=E)


def trained(module: RoutedExperts, x: torch.Tensor, order: torch.Tensor, counts: torch.Tensor):
    """Output by row of x, and all gradients."""
    aligned = module.align(order, counts)
    places = order if aligned is None else aligned.order_P
    rows = torch.where(places[:, None] < 0, 0.0, x[places.clamp(min=0)])
    out = torch.zeros_like(x).index_put((places[places >= 0],), module(rows, counts, aligned)[places >= 0])
    return out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num", [1, 40, 300])
def test_filled_rows_change_nothing(monkeypatch, num, bias):
    module, (order, counts) = made(bias=bias), routed(num, seed=num)
    x = torch.randn(num, D, generator=torch.Generator().manual_seed(1))
    found = {}
    for fills in (False, True):
        monkeypatch.setattr(experts_module, "compiles_shapes", lambda matrix, fills=fills: fills)
        assert (module.align(order, counts) is not None) == (fills and num >= 2 * E * experts_module.SHAPES)
        found[fills] = trained(module, x, order, counts)
    for plain, filled in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(filled, plain, rtol=1e-5, atol=1e-6)


def test_few_shapes_come_up_over_many_steps(monkeypatch):
    shapes = set()
    by_route = linear_module._by_route
    monkeypatch.setattr(experts_module, "compiles_shapes", lambda matrix: True)
    monkeypatch.setattr(linear_module, "has_own_route", lambda *matrices: True)
    monkeypatch.setattr(linear_module, "_is_routed", lambda *matrices: True)
    monkeypatch.setattr(
        linear_module, "_by_route", lambda x, y: shapes.add((x.shape[0], y.shape[0], x.shape[1])) or by_route(x, y)
    )
    module, x = made(), torch.randn(512, D, generator=torch.Generator().manual_seed(2))
    for seed in range(20):
        trained(module, x, *routed(512, seed=seed))
    rows = {size for shape in shapes for size in shape} - {D, F}
    assert len(rows) > 1
    assert rows <= {96, 112, 128, 144, 160}


def test_rows_behind_the_last_expert_are_zeros_and_have_no_gradient():
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(12, D, generator=generator), torch.randn(E, F, D, generator=generator)
    counts = torch.tensor([3, 0, 4, 1])
    for function in (reference, opaque_reference):
        x.requires_grad_()
        out = function(x, weight, counts)
        assert out.shape == (12, F)
        assert not out[8:].any()
        torch.testing.assert_close(out[3:7], x[3:7] @ weight[2].T)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not gradient[8:].any()
        assert gradient[:8].all()


def test_only_code_that_is_compiled_for_a_shape_fills_rows(monkeypatch):
    route = linear_module.GemmRoute
    for dtype, own, compiles in (
        (torch.float32, route.ONEDNN, True), (torch.float32, route.TORCH, False),
        (torch.bfloat16, route.TORCH, True), (torch.bfloat16, route.WIDENED, False),
    ):  # fmt: skip
        monkeypatch.setattr(linear_module, "default_route", lambda dtype, own=own: own)
        matrix = torch.zeros(2, 2, dtype=dtype)
        assert linear_module.compiles_shapes(matrix) == (compiles and linear_module.processor.HERE.has_onednn)
        assert not linear_module.compiles_shapes(matrix.to("meta"))
