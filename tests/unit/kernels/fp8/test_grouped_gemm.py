"""Grouped GEMMs in 8 bits and the experts that they make: in Triton's interpreter, and against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import (
    aligned_rows,
    assert_close,
    demanding,
    drawn,
    gathered,
    needs_interpreter,
    relative_error,
    spread,
)

from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Scaling, quantize
from meshwright.kernels.fp8.grouped_gemm import ROUTES, grouped_rows, grouped_weights, opaque_reference, reference
from meshwright.kernels.fp8.layer import RECIPES, Fp8State, fp8_grouped_linear, fp8_linear
from meshwright.kernels.routes import ANY, KernelCall
from meshwright.kernels.stored_activations import StoredFormat, storing_activations

COUNTS = (3, 0, 70, 5)
ERRORS = {"fp8": 0.08, "fp8_delayed": 0.08, "mxfp4": 0.25}
"""Largest ‖got - exact‖ / ‖exact‖ of a GEMM of normal numbers; 0.06 for the other recipes."""
SCALED = st.sampled_from([(s, s) for s in Scaling if s is not Scaling.SQUARE] + [(Scaling.BLOCK, Scaling.SQUARE)])
counted = st.lists(st.sampled_from([0, 0, 1, 3, 64, 130]), min_size=1, max_size=4)


def experts(counts, *, n=80, k=96, dtype=torch.bfloat16):
    rows = sum(counts)
    return (
        drawn(rows, k, dtype=dtype, seed=1),
        drawn(len(counts), n, k, dtype=dtype, seed=2),
        drawn(rows, n, dtype=dtype, seed=3),
    )


def layer(x, weight, grad, counts, state):
    """Result and gradients of the experts' layer."""
    aligned = aligned_rows(counts)
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    out = gathered(fp8_grouped_linear(spread(x, aligned), weight, aligned.counts_E, state=state), aligned)
    out.backward(grad)
    return out.detach(), x.grad, weight.grad


def one_by_one(x, weight, grad, counts):
    """The same in float64, expert by expert."""
    parts = list(zip(x.double().split(counts), weight.double(), grad.double().split(counts), strict=True))
    return (
        torch.cat([x @ w.T for x, w, _ in parts]),
        torch.cat([g @ w for _, w, g in parts]),
        torch.stack([g.T @ x for x, _, g in parts]),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_experts_against_float64(name):
    given_tensors = experts(COUNTS)
    found = layer(*given_tensors, list(COUNTS), Fp8State(RECIPES[name], caches_weight=name == "fp8"))
    for mine, exact in zip(found, one_by_one(*given_tensors, list(COUNTS)), strict=True):
        assert 0.005 < relative_error(mine, exact) < ERRORS.get(name, 0.06)
    assert not found[2][1].any()  # the expert without a row


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4"])
def test_rows_are_those_of_a_linear_layer_of_the_expert(name):
    x, weight, grad = experts(COUNTS)
    found, grad_x, _ = layer(x, weight, grad, list(COUNTS), Fp8State(RECIPES[name]))
    parts = zip(x.split(COUNTS), weight, grad.split(COUNTS), found.split(COUNTS), grad_x.split(COUNTS), strict=True)
    for x_e, w_e, grad_e, mine, mine_x in parts:
        x_e = x_e.clone().requires_grad_()
        out = fp8_linear(x_e, w_e, state=Fp8State(RECIPES[name]))
        out.backward(grad_e)
        torch.testing.assert_close(mine, out.detach())
        torch.testing.assert_close(mine_x, x_e.grad)


@pytest.mark.parametrize("counts", [(0, 0), (0,), (1,)], ids=["no rows", "one expert without rows", "one row"])
@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise"])
def test_few_rows(name, counts):
    tensors = experts(counts)
    for mine, exact in zip(
        layer(*tensors, list(counts), Fp8State(RECIPES[name])), one_by_one(*tensors, list(counts)), strict=True
    ):
        assert mine.shape == exact.shape
        assert float((mine.double() - exact).norm()) <= 0.1 * float(exact.norm())


@needs_interpreter
@settings(max_examples=6)
@given(counts=counted, sizes=st.sampled_from([(1, 1), (40, 24), (130, 70)]), scaled=SCALED,
       gradients=st.sampled_from([Element.E4M3, Element.E5M2]), seed=st.integers(0, 99))  # fmt: skip
def test_kernels_against_float64(counts, sizes, scaled, gradients, seed):
    n, k = sizes
    aligned = aligned_rows(counts)
    x = spread(drawn(sum(counts), k, dtype=torch.float32, seed=seed), aligned)
    grad = spread(drawn(sum(counts), n, dtype=torch.float32, seed=seed + 1), aligned)
    weight = drawn(len(counts), n, k, dtype=torch.float32, seed=seed + 2)
    stack, _ = cast_both(weight, CastForm(element=Element.E4M3, scaling=scaled[1]))
    by_rows = quantize(x, element=gradients, scaling=scaled[0])
    by_columns = [quantize(t.T, element=e, scaling=scaled[0]) for t, e in ((grad, gradients), (x, Element.E4M3))]
    with demanding(fp8_grouped_gemm="triton"):
        rows = grouped_rows(by_rows, stack, aligned.counts_E, dtype=torch.float32)
        weights = grouped_weights(*by_columns, aligned.counts_E, dtype=torch.float32)
    assert_close(rows, reference(by_rows, stack, aligned.counts_E, dtype=torch.float64))
    assert_close(weights, reference(*by_columns, aligned.counts_E, dtype=torch.float64))


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    ["fp8_blockwise", *(pytest.param(r, marks=pytest.mark.when_touched) for r in ("fp8", "fp8_rowwise", "mxfp8"))],
)  # test_kernels_against_float64 draws these scalings
def test_the_layer_with_kernels_equals_the_reference_and_itself(name):
    tensors = experts((3, 0, 9), n=40, k=48, dtype=torch.float32)
    expected = layer(*tensors, [3, 0, 9], Fp8State(RECIPES[name]))
    with demanding(fp8_cast="triton", fp8_grouped_gemm="triton"):
        found, again = (layer(*tensors, [3, 0, 9], Fp8State(RECIPES[name])) for _ in range(2))
    for mine, other, second in zip(found, expected, again, strict=True):
        assert relative_error(mine, other) < 1e-6
        assert torch.equal(mine, second)


@needs_interpreter
def test_operator_rules():
    from meshwright.kernels.fp8.triton_grouped_gemm import fp8_grouped_rows, fp8_grouped_weights

    x, weight, grad = experts((128, 0), n=8, k=5, dtype=torch.float32)
    rows, columns = (quantize(t, element=Element.E4M3, scaling=Scaling.ROW) for t in (x, x.T))
    stack, _ = cast_both(weight, CastForm(element=Element.E4M3, scaling=Scaling.ROW))
    of_grad = quantize(grad.T, element=Element.E4M3, scaling=Scaling.ROW)
    end = (torch.tensor([128, 0]), torch.float32)
    for op, a, b in ((fp8_grouped_rows, rows, stack), (fp8_grouped_weights, of_grad, columns)):
        given_tensors = (a.values, a.scales, "row", b.values, b.scales, "row", *end)
        # the check of the schema compares inputs by arithmetic that PyTorch has not for 8 bits
        torch.library.opcheck(op, given_tensors, test_utils=("test_autograd_registration", "test_faketensor"))


def test_rules_of_the_reference_of_a_graph():
    """It is one operation there, of any columns."""
    x, weight, _ = experts((128, 0), n=8, k=5, dtype=torch.float32)
    for element in (Element.E4M3, Element.E2M1):
        how = {"element": element, "scaling": Scaling.ROW}
        rows, (stack, _) = quantize(x, **how), cast_both(weight, CastForm(**how))
        counts_E = torch.tensor([128, 0])
        operands = [(q.values, q.scales, q.element, q.scaling, q.shape[1]) for q in (rows, stack)]
        given_values = (*operands[0], *operands[1], counts_E, torch.float32)
        utilities = ("test_autograd_registration", "test_faketensor")
        torch.library.opcheck(opaque_reference, given_values, test_utils=utilities)
        expected = reference(rows, stack, counts_E, dtype=torch.float32)
        assert torch.equal(opaque_reference(*given_values), expected)


def test_a_stack_is_cast_once_a_step():
    x, weight, grad = experts(COUNTS)
    state = Fp8State(RECIPES["fp8_blockwise"], caches_weight=True)
    first = layer(x, weight, grad, list(COUNTS), state)
    assert state.num_bytes > 2 * weight.numel()
    second = layer(x, weight, grad, list(COUNTS), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    state.expire()
    assert state.num_bytes == 0


def test_delayed_scales_are_shared_by_all_experts():
    state = Fp8State(replace(RECIPES["fp8_delayed"], history=2))
    x, weight, grad = experts(COUNTS)
    layer(x, weight, grad, list(COUNTS), state)
    state.end_step()
    wanted = [float(t.abs().max()) for t in (x, weight, grad)]
    assert state.amax_history_3H[:, 0].tolist() == pytest.approx(wanted)
    stack, _ = state.cast(weight, of=1)
    assert stack.scales.unique().numel() == 1


def test_scales_are_not_rounded_with_the_activations(monkeypatch):
    from meshwright.kernels import stored_activations

    monkeypatch.setattr(stored_activations, "SMALLEST", 1)
    x, weight, grad = (t.requires_grad_() for t in experts((78,)))
    found = []
    for stores in (False, True):
        x.grad = weight.grad = None
        state = Fp8State(RECIPES["fp8_rowwise"], caches_weight=True)
        if stores:
            with storing_activations(torch.nn.Module(), format=StoredFormat.INT8):
                out = fp8_linear(x, weight[0], state=state)
        else:
            out = fp8_linear(x, weight[0], state=state)
        out.backward(grad.detach())
        found.append((x.grad.clone(), weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_library_says_what_it_cannot():
    serves = ROUTES["fp8_grouped_gemm"]["scaled_grouped_mm"].serves

    def refused(*flags, device="cuda", shapes=((64, 32), (4, 48, 32), (4,))):
        call = KernelCall(
            op="fp8_grouped_gemm", shapes=shapes, dtypes=(), device=device, architecture="sm90",
            flags=frozenset(flags),
        )  # fmt: skip
        refusal = serves(call)
        return refusal and refusal.reason

    assert refused("rows", "scaling:row", "element:e4m3") is None
    assert refused("rows", "scaling:tensor", ANY) is None
    assert "on GPUs" in refused("rows", "scaling:row", device="cpu")
    assert "scales of rows" in refused("rows", "scaling:block", "element:e4m3")
    assert "multiplies e4m3" in refused("rows", "scaling:tensor", "element:e5m2")
    assert "is called for rows" in refused("weights", "scaling:row", "element:e4m3")
    assert "16 divides" in refused("rows", "scaling:row", "element:e4m3", shapes=((64, 20), (4, 48, 20), (4,)))


@needs_interpreter
def test_four_bits_are_multiplied_by_the_reference():
    with using(KernelRouting()) as routing:
        layer(*experts((5, 3)), [5, 3], Fp8State(RECIPES["mxfp4"]))
    assert {c.route for c in routing.choices.values() if c.call.op == "fp8_grouped_gemm"} == {"reference"}
