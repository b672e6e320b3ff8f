"""The linear layer in 8 bits: against torchao, against float64, and its weight cache."""

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import demanding, drawn, needs_interpreter, relative_error

from meshwright.kernels.fp8 import layer as layers
from meshwright.kernels.fp8.layer import GRADIENT, RECIPES, Fp8State, cache_bytes, fp8_linear

TORCHAO = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
ERRORS = {"fp8": 0.08, "fp8_delayed": 0.08, "fp8_rowwise": 0.05, "fp8_blockwise": 0.05, "mxfp8": 0.06, "mxfp4": 0.25}
"""Largest ‖got - exact‖ / ‖exact‖ of a GEMM of normal numbers: two roundings of 3 bits (e5m2: of 2; e2m1: of 1)."""


def gradients(x, weight, grad, state):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    out = fp8_linear(x, weight, state=state)
    out.backward(grad)
    return out.detach(), x.grad, weight.grad


def operands(dtype=torch.bfloat16):
    return tuple(drawn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(4, 16, 96), (80, 96), (4, 16, 80)]))


@pytest.mark.parametrize("name", TORCHAO)
def test_equal_to_torchao(name):
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x, weight, grad = operands()
    linear = torch.nn.Linear(96, 80, bias=False).bfloat16()
    linear.weight.data.copy_(weight)
    theirs = torch.nn.Sequential(copy.deepcopy(linear))
    config = replace(Float8LinearConfig.from_recipe_name(TORCHAO[name]), emulate=True)
    convert_to_float8_training(theirs, config=config)
    x_2 = x.clone().requires_grad_()
    out = theirs(x_2)
    out.backward(grad)
    found = gradients(x, weight, grad, Fp8State(RECIPES[name]))
    for mine, other in zip(found, (out.detach(), x_2.grad, theirs[0].weight.grad), strict=True):
        # torchao multiplies by 448 / max where we divide by max / 448: a value in some thousand rounds otherwise
        assert relative_error(mine, other) < (1e-4 if name == "fp8" else 1e-9)


@pytest.mark.parametrize("caches_weight", [False, True], ids=["cast each time", "cached"])
@pytest.mark.parametrize("name", RECIPES)
def test_against_float64(name, caches_weight):
    x, weight, grad = operands()
    out, grad_x, grad_weight = gradients(x, weight, grad, Fp8State(RECIPES[name], caches_weight=caches_weight))
    x, weight, grad = x.double(), weight.double(), grad.double()
    assert relative_error(out, x @ weight.T) < ERRORS[name]
    assert relative_error(grad_x, grad @ weight) < ERRORS[name]
    assert relative_error(grad_weight, grad.flatten(0, 1).T @ x.flatten(0, 1)) < ERRORS[name]


@needs_interpreter
@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_kernels_equal_the_reference(name):
    x, weight, grad = operands(torch.float32)
    found = gradients(x, weight, grad, Fp8State(RECIPES[name]))
    with demanding(fp8_cast="triton", fp8_gemm="triton"):
        for mine, other in zip(gradients(x, weight, grad, Fp8State(RECIPES[name])), found, strict=True):
            assert relative_error(mine, other) < 1e-6


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_is_cast_once_a_step_and_the_cache_has_the_stated_size(name, monkeypatch):
    casts = []
    cast = layers.cast_both
    monkeypatch.setattr(
        layers, "cast_both", lambda x, *how, **options: casts.append(x.shape) or cast(x, *how, **options)
    )
    x, weight, grad = operands()
    state = Fp8State(RECIPES[name], caches_weight=True)
    weight.requires_grad_()
    for _ in range(3):
        fp8_linear(x, weight, state=state).backward(grad)
    assert casts.count(weight.shape) == 1
    assert state.num_bytes == cache_bytes((80, 96), RECIPES[name])
    state.expire()
    assert state.num_bytes == 0
    fp8_linear(x, weight, state=state)
    assert casts.count(weight.shape) == 2
    with torch.no_grad():
        weight.mul_(2)
    fp8_linear(x, weight, state=state)
    assert casts.count(weight.shape) == 3


def test_an_input_or_a_weight_without_gradient():
    x, weight, grad = operands()
    frozen = fp8_linear(x.clone().requires_grad_(), weight, state=Fp8State(RECIPES["fp8_rowwise"]))
    frozen.backward(grad)
    first = fp8_linear(x, weight.requires_grad_(), state=Fp8State(RECIPES["fp8_rowwise"]))
    first.backward(grad)
    assert weight.grad is not None
    assert x.grad is None


def largest_of(state, value):
    """Cast gradients of this magnitude; the largest magnitude by which they were scaled."""
    found, _ = state.cast(torch.full((2, 2), value), of=GRADIENT)
    return float(found.scales) * 57344


def test_a_delayed_scale_follows_the_largest_of_the_last_steps():
    state = Fp8State(replace(RECIPES["fp8_delayed"], history=2))
    scales = []
    for largest in (1.0, 4.0, 2.0, 2.0, 0.0, 0.0, 0.0):
        state.begin_step()
        scales.append(largest_of(state, largest))
        state.end_step()
    # the first scales itself; then the largest of the two before; after zeros alone a cast scales itself again
    assert scales == pytest.approx([1.0, 1.0, 4.0, 4.0, 2.0, 2.0, 57344.0])


def test_the_scale_is_the_same_throughout_a_step_and_a_refused_step_leaves_no_trace():
    state = Fp8State(RECIPES["fp8_delayed"])
    largest_of(state, 2.0)
    state.end_step()
    assert [largest_of(state, value) for value in (8.0, 1.0, 8.0)] == pytest.approx([2.0, 2.0, 2.0])
    state.begin_step()  # the step before it was not applied
    assert largest_of(state, 1.0) == pytest.approx(2.0)
    state.end_step()
    assert state.amax_history_3H[GRADIENT, :3].tolist() == [1.0, 2.0, 0.0]


def test_evaluation_joins_no_history_and_infinities_are_neither_hidden_nor_kept():
    state = Fp8State(RECIPES["fp8_delayed"])
    x, weight, _ = operands()
    with torch.no_grad():
        fp8_linear(x, weight, state=state)
    assert state.amax_3 is not None
    assert float(state.amax_3[0]) == 0.0
    fp8_linear(x, weight, state=state)
    state.end_step()
    x[0, 0, 0] = torch.inf
    assert fp8_linear(x, weight, state=state).isnan().any()  # a scale of earlier steps would saturate
    state.end_step()
    assert bool(state.amax_history_3H.isfinite().all())


def test_no_rows_and_a_bias():
    out = fp8_linear(torch.ones(0, 96), torch.ones(80, 96), torch.ones(80), state=Fp8State(RECIPES["fp8"]))
    assert out.shape == (0, 80)
    out = fp8_linear(torch.zeros(2, 96), torch.ones(80, 96), torch.ones(80), state=Fp8State(RECIPES["fp8"]))
    assert torch.equal(out, torch.ones(2, 80))
