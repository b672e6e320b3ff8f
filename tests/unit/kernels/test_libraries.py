"""Liger's kernels as routes, in Triton's interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import assert_close, demanding, drawn, needs_interpreter

from meshwright.kernels import gated_activation as activations
from meshwright.kernels import liger
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.kernels.rms_norm import reference as norm_reference
from meshwright.kernels.rotary import rotate
from meshwright.kernels.routes import KernelCall, routes_of

FP32 = {"dtype": torch.float32}


def gradients_of(outputs, grads, inputs):
    """Outputs and gradients, detached."""
    torch.autograd.backward(list(outputs), list(grads))
    return [x.detach() for x in outputs] + [x.grad for x in inputs]


def leaves(*tensors, wide=False):
    return [(t.double() if wide else t).detach().clone().requires_grad_() for t in tensors]


def agree(function, exact, tensors, *, factor=4.0):
    """Outputs and gradients of `function` beside those of `exact` in float64."""
    got_inputs, wide_inputs = leaves(*tensors), leaves(*tensors, wide=True)
    got, wide = function(*got_inputs), exact(*wide_inputs)
    grads = [drawn(*x.shape, dtype=torch.float32, seed=90 + i) for i, x in enumerate(got)]
    found = gradients_of(got, grads, got_inputs)
    expected = gradients_of(wide, [g.double() for g in grads], wide_inputs)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, factor=factor)


@pytest.fixture
def _liger(monkeypatch):
    """Supply what only Triton's compiler has: numbers that are tensors, and functions of libdevice."""
    pytest.importorskip("liger_kernel")
    pytest.importorskip("triton")
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import cross_entropy, fused_add_rms_norm, geglu
    from liger_kernel.ops import rms_norm as norms
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument):
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    for module in (cross_entropy, geglu):
        monkeypatch.setattr(module, "tanh", lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0)
    for module in (norms, fused_add_rms_norm):
        monkeypatch.setattr(module, "rsqrt", lambda x: 1.0 / tl.sqrt(x))


interpreted = [needs_interpreter, pytest.mark.usefixtures("_liger")]


class TestLiger:
    pytestmark = interpreted

    @pytest.mark.parametrize("zero_centered", [False, True], ids=["weight", "1 + weight"])
    def test_norms(self, zero_centered):
        options = {"epsilon": 1e-5, "zero_centered": zero_centered}
        x, residual = (drawn(2, 3, 40, **FP32, seed=s) for s in (0, 1))
        weight = drawn(40, **FP32, seed=2)

        def exact(x, residual, weight):
            return norm_reference(x, weight, residual, 1e-5, False)

        with demanding(rms_norm="liger"):
            shift = float(zero_centered)
            agree(
                lambda x, r, w: add_rms_norm(x, r, w, **options),
                lambda x, r, w: exact(x, r, w + shift),
                (x, residual, weight),
            )
            agree(
                lambda x, w: (rms_norm(x, w, **options),),
                lambda x, w: (exact(x, torch.zeros_like(x), w + shift)[0],),
                (x, weight),
            )

    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
    def test_activations(self, kind):
        with demanding(swiglu="liger"):
            agree(
                lambda g, u: (gated_activation(g, u, kind=kind),),
                lambda g, u: (activations.reference(g, u, kind=kind),),
                (drawn(5, 33, **FP32), drawn(5, 33, **FP32, seed=1)),
            )

    @pytest.mark.parametrize("pairs", [8, 4], ids=["whole heads", "a part of them"])
    def test_rotary_does_not_overwrite_its_input(self, pairs):
        q, k = drawn(2, 5, 4, 16, **FP32), drawn(2, 5, 2, 16, **FP32, seed=1)
        angles = drawn(2, 5, 1, pairs, **FP32, seed=2)
        cos, sin = angles.cos(), angles.sin()
        before = q.clone()
        with demanding(rotary="liger"):
            agree(
                lambda q, k: rotate(q, k, cos, sin),
                lambda q, k: routes_of("rotary")["reference"].function(q, k, cos.double(), sin.double(), False),
                (q, k),
            )
            rotate(q, k, cos, sin)
        assert torch.equal(q, before)

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    @pytest.mark.parametrize("cap", [0.0, 3.0], ids=["plain", "cap"])
    def test_the_loss_of_a_head(self, reduction, cap):
        h, weight = drawn(6, 16, **FP32), drawn(50, 16, **FP32, seed=1)
        labels = torch.tensor([3, 0, IGNORED_LABEL, 49, 7, 7])

        def by(route):
            def run(h, weight):
                with demanding(linear_cross_entropy=route):
                    return (linear_cross_entropy(h, weight, labels, reduction=reduction, cap=cap),)

            return run

        agree(by("liger"), by("reference"), (h, weight))


def test_a_library_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    shapes, dtypes = ((8, 64), (64,)), ("bfloat16",) * 2
    call = KernelCall(op="rms_norm", shapes=shapes, dtypes=dtypes, device="cuda", architecture="sm90")
    refusal = routes_of("rms_norm")["liger"].serves(call)
    assert refusal.reason == "liger-kernel is not installed: pip install liger-kernel"
