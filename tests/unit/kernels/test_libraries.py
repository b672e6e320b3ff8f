"""Adapters of libraries: Liger's own kernels in Triton's interpreter; stand-ins with the signatures of the others."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import assert_close, demanding, drawn, needs_interpreter
from torch.nn import functional

from meshwright.kernels import gated_activation as activations
from meshwright.kernels import libraries
from meshwright.kernels.attention.operation import ScoreOptions, attention, reference
from meshwright.kernels.gated_activation import gated_activation
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.libraries import aiter, transformer_engine
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


# --- Liger ---


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


# --- libraries of one vendor's GPUs, with stand-ins of their signatures ---


def call(op, architecture, *shapes, dtype="bfloat16", flags=()):
    return KernelCall(
        op=op, shapes=shapes, dtypes=(dtype,) * len(shapes), device="cuda", architecture=architecture,
        flags=frozenset(flags),
    )  # fmt: skip


HEADS = ((1, 128, 8, 64), (1, 128, 2, 64), (1, 128, 2, 64))


@pytest.fixture
def _libraries(monkeypatch):
    """Stand-ins, which compute on a CPU what the libraries document."""

    def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        assert (ln_out, quantizer, sm_margin) == (None, None, 0)
        assert otype == "float32"
        scale = (input.square().mean(dim=1) + eps).rsqrt()
        return [input * scale[:, None] * (weight + zero_centered_gamma), None, scale]

    def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
        normed = x * rsigma[:, None]
        grad = dz * (gamma + zero_centered_gamma)
        dx = rsigma[:, None] * (grad - normed * (grad * normed).mean(dim=1, keepdim=True))
        return [dx, (dz * normed).sum(dim=0)]

    def rmsnorm_bwd_add(dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma):
        dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
        return [dx + add, dgamma]

    class DotProductAttention:
        def __init__(
            self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
            attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softmax_scale=None,
        ):  # fmt: skip
            assert (qkv_format, attn_mask_type) == ("bshd", "causal")
            self.sizes, self.scale = (num_attention_heads, kv_channels, num_gqa_groups), softmax_scale

        def __call__(self, query_layer, key_layer, value_layer):
            assert self.sizes == (
                query_layer.shape[2],
                (query_layer.shape[3], value_layer.shape[3]),
                key_layer.shape[2],
            )
            return plain(query_layer, key_layer, value_layer, self.scale).flatten(2)

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None,
                        alibi_slopes=None, deterministic=True):  # fmt: skip
        assert causal
        return plain(q, k, v, softmax_scale)

    def normed(input, weight, epsilon):
        assert input.dim() == 2
        return functional.rms_norm(input, weight.shape, weight, epsilon)

    def plain(q, k, v, scale):
        return reference(q, k, v, ScoreOptions(scale=scale))

    parts = {
        "transformer_engine_torch": {
            "rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd, "rmsnorm_bwd_add": rmsnorm_bwd_add,
        },
        "transformer_engine": {},
        "transformer_engine.pytorch": {"DotProductAttention": DotProductAttention},
        "transformer_engine.pytorch.constants": {"TE_DType": {torch.float32: "float32"}},
        "aiter": {"flash_attn_func": flash_attn_func},
        "aiter.ops": {}, "aiter.ops.triton": {}, "aiter.ops.triton.normalization": {},
        "aiter.ops.triton.normalization.rmsnorm": {"rms_norm": normed},
    }  # fmt: skip
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries, "find_spec", lambda name: SimpleNamespace())
    transformer_engine._module.cache_clear()
    yield
    transformer_engine._module.cache_clear()


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize(
    ("library", "zero_centered"), [(transformer_engine, False), (transformer_engine, True), (aiter, False)]
)
@pytest.mark.parametrize("adds", [False, True], ids=["norm", "with the addition"])
def test_norms_of_libraries(library, zero_centered, adds):
    tensors = [drawn(2, 3, 16, **FP32), drawn(16, **FP32, seed=1)]
    tensors += [drawn(2, 3, 16, **FP32, seed=2)] if adds else []

    def by(function):
        def run(x, weight, residual=None):
            outputs = function(x, weight, residual, 1e-5, zero_centered)
            return outputs if adds else outputs[:1]

        return run

    def exact(x, weight, residual, epsilon, zero_centered):
        return norm_reference(x, weight + zero_centered, residual, epsilon, False)

    agree(by(library.rms_norm), by(exact), tensors)


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("library", [transformer_engine, aiter])
def test_attention_of_libraries(library):
    q, k, v = drawn(2, 5, 4, 8, **FP32), drawn(2, 5, 2, 8, **FP32, seed=1), drawn(2, 5, 2, 6, **FP32, seed=2)
    agree(
        lambda *qkv: (library.attention(*qkv, ScoreOptions(scale=0.3)),),
        lambda *qkv: (attention(*qkv, scale=0.3),),
        (q, k, v),
    )


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize(
    ("route", "own", "other"), [("transformer_engine", "sm90", "gfx942"), ("aiter", "gfx942", "sm90")]
)
def test_a_library_serves_the_gpus_of_its_vendor(route, own, other):
    assert routes_of("attention")[route].serves(call("attention", own, *HEADS)) is None
    assert routes_of("rms_norm")[route].serves(call("rms_norm", own, (8, 64), (64,))) is None
    for refused, words in (
        (call("attention", other, *HEADS), "for GPUs of"),
        (call("attention", own, *HEADS, flags={"sinks"}), "sinks"),
        (call("attention", own, *HEADS, dtype="float32"), "16 bits"),
        (call("attention", own), "traced"),
        (call("attention", own, *HEADS, flags={"subclass"}), "plain tensor"),
        (call("attention", own, (0, 128, 8, 64), *HEADS[1:]), "empty"),
    ):
        assert words in routes_of("attention")[route].serves(refused).reason


def test_a_library_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    for op, route, architecture, project in (
        ("rms_norm", "transformer_engine", "sm90", "transformer_engine"),
        ("rms_norm", "aiter", "gfx942", "amd-aiter"),
        ("rms_norm", "liger", "sm90", "liger-kernel"),
    ):
        refusal = routes_of(op)[route].serves(call(op, architecture, (8, 64), (64,)))
        assert refusal.reason == f"{project} is not installed: pip install {project}"
