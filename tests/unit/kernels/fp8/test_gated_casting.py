"""Gated activations cast from registers: the bits of the activation and the cast after each other."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import (
    FORMATS,
    SIZES,
    assert_close,
    counted_traffic,
    demanding,
    drawn,
    needs_interpreter,
    relative_error,
)

from meshwright.errors import InputError
from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Scaling
from meshwright.kernels.fp8.gated_casting import SUMMED_ROWS, cast_gated, cast_gated_gradients
from meshwright.kernels.fp8.triton_gated_cast import (
    fp8_gated_amax,
    fp8_gated_cast,
    fp8_gated_gradients,
    fp8_gated_gradients_amax,
)
from meshwright.kernels.gated_activation import KINDS, gated_activation, reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SCALINGS = [scaling for scaling in Scaling if scaling is not Scaling.SQUARE]
ROUTES = ("reference", pytest.param("triton", marks=needs_interpreter))
IF_TOUCHED = pytest.mark.when_touched


def routes(name):
    return demanding(**dict.fromkeys(("fp8_gated_cast", "fp8_gated_gradients", "fp8_cast", "swiglu"), name))


def same(found, want):
    for mine, other in zip(found, want, strict=True):
        assert mine.shape == other.shape
        assert torch.equal(mine.scales.nan_to_num(7.0), other.scales.nan_to_num(7.0))
        assert torch.equal(mine.values.view(torch.uint8), other.values.view(torch.uint8))


def tensors_of(rows, columns, *, dtype, seed=0, strided=False):
    """Gradient, gate and up."""
    return (
        drawn(rows, columns, dtype=dtype, strided=strided, seed=seed + 2),
        drawn(rows, columns, dtype=dtype, strided=strided, seed=seed, scale=3.0),
        drawn(rows, columns, dtype=dtype, seed=seed + 1, scale=5.0),
    )


def apart(grad, gate, up, kind):
    """The value, and the gradients of gate and up, by the activation of the same route."""
    gate, up = (t.detach().requires_grad_() for t in (gate, up))
    value = gated_activation(gate, up, kind=kind)
    return value.detach(), *torch.autograd.grad(value, (gate, up), grad)


def check(tensors, kind, form):
    grad, gate, up = tensors
    value, grad_gate, grad_up = apart(*tensors, kind)
    same(cast_gated(gate, up, kind=kind, form=form), cast_both(value, form))
    found = cast_gated_gradients(grad, gate, up, kind=kind, form=form, with_sums=True)
    for mine, x in zip(found, (grad_gate, grad_up), strict=True):
        same(mine.both, cast_both(x, form))
        want = torch.stack([part.double().sum(0) for part in x.split(SUMMED_ROWS)]) if len(x) else x.double()
        assert_close(mine.sums, want, factor=8, terms=x)


@needs_interpreter
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=IF_TOUCHED)]
)  # test_the_reference_has_the_bits_of_both_after_each_other has bf16
def test_kernels_have_the_bits_of_both_after_each_other_on_a_small_matrix(dtype, scaling):
    form = CastForm(element=Element.E4M3, scaling=scaling, power_of_two=dtype == torch.float32)
    with routes("triton"):
        check(tensors_of(3, 65, dtype=dtype, strided=True), "clamped", form)


@needs_interpreter
@pytest.mark.slow  # the test above has one size and one activation
@settings(max_examples=12, deadline=None)
@given(
    rows=SIZES, columns=SIZES, kind=st.sampled_from(KINDS), dtype=st.sampled_from(FORMATS),
    scaling=st.sampled_from(SCALINGS), element=st.sampled_from([Element.E4M3, Element.E5M2]),
    power_of_two=st.booleans(), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_kernels_have_the_bits_of_both_after_each_other(
    rows, columns, kind, dtype, scaling, element, power_of_two, strided, seed
):
    form = CastForm(element=element, scaling=scaling, power_of_two=power_of_two)
    with routes("triton"):
        check(tensors_of(rows, columns, dtype=dtype, seed=seed, strided=strided), kind, form)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_has_the_bits_of_both_after_each_other(kind, scaling):
    form = CastForm(element=Element.E4M3, scaling=scaling)
    check(tensors_of(70, 130, dtype=torch.bfloat16), kind, form)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "reference") for kind in KINDS),
        *(
            pytest.param(
                kind, "triton", marks=[needs_interpreter] if kind == "silu" else [needs_interpreter, IF_TOUCHED]
            )
            for kind in KINDS
        ),  # a kind is one expression in the kernel, which test_gated_activation.py draws
    ],
)
def test_against_float64(kind, name):
    tensors = tensors_of(37, 140, dtype=torch.float32)
    grad, gate, up = (t.double() for t in tensors)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    exact = reference(gate, up, kind=kind)
    exact_gradients = torch.autograd.grad(exact, (gate, up), grad)
    form = CastForm(element=Element.E4M3, scaling=Scaling.BLOCK)
    with routes(name):
        rows, columns = cast_gated(*tensors[1:], kind=kind, form=form)
        gradients = cast_gated_gradients(*tensors, kind=kind, form=form)
    for mine, want in zip((rows, *(g.both[0] for g in gradients)), (exact, *exact_gradients), strict=True):
        assert 0.005 < relative_error(mine.dequantized(torch.float64), want.detach()) < 0.035
    assert relative_error(columns.dequantized(torch.float64), exact.detach().T) < 0.035


@pytest.mark.parametrize("name", ROUTES)
def test_a_delayed_scale_sees_the_present_one_and_replaces_it(name):
    grad, gate, up = tensors_of(5, 70, dtype=torch.float32)
    value, *gradients = apart(grad, gate, up, "silu")
    seen = []

    def amax(present):
        seen.append(float(present))
        return torch.full((1, 1), 0.5)

    form = CastForm(element=Element.E4M3, scaling=Scaling.TENSOR)
    with routes(name):
        found = cast_gated(gate, up, kind="silu", form=form, amax=amax)
        both = cast_gated_gradients(grad, gate, up, kind="silu", form=form, amax=(amax, amax))
    assert seen == pytest.approx([float(x.abs().max()) for x in (value, *gradients)], rel=1e-6)
    with routes("reference"):
        for mine, x in zip((found, *(g.both for g in both)), (value, *gradients), strict=True):
            for side, want in zip(mine, cast_both(x, form, amax=torch.full((1, 1), 0.5)), strict=True):
                assert torch.equal(side.scales, want.scales)
                assert relative_error(side.dequantized(), want.dequantized()) < 1e-2


@pytest.mark.parametrize(
    "name", ["reference", pytest.param("triton", marks=[needs_interpreter, IF_TOUCHED])]
)  # test_casting.py has what is not finite in kernels
def test_one_side_and_what_is_not_finite(name):
    grad, gate, up = tensors_of(3, 130, dtype=torch.float32)
    gate[0, 0], up[1, 1] = float("nan"), float("inf")
    for scaling in SCALINGS:
        form = CastForm(element=Element.E5M2, scaling=scaling, with_rows=False)
        with routes(name):
            none, columns = cast_gated(gate, up, kind="silu", form=form)
            gradients, _ = cast_gated_gradients(grad, gate, up, kind="silu", form=form)
        assert none is None
        assert gradients.both[0] is None
        assert gradients.sums is None
        nan = columns.dequantized().isnan()
        assert nan[0, 0]
        assert nan.all() == (scaling is Scaling.TENSOR)


@needs_interpreter
@pytest.mark.parametrize(
    ("scaling", "per_element"),
    [
        pytest.param(Scaling.MX, (6, 10), id="mx"),
        pytest.param(Scaling.BLOCK, (10, 16), id="block", marks=IF_TOUCHED),  # the other counts in the same kernel
    ],
)  # of blocks the inputs are read again, from the cache
def test_bytes_that_are_loaded_and_stored(scaling, per_element):
    grad, gate, up = tensors_of(256, 256, dtype=torch.float16)
    form = CastForm(element=Element.E4M3, scaling=scaling)
    with routes("triton"):
        with counted_traffic() as forward:
            cast_gated(gate, up, kind="silu", form=form)
        with counted_traffic() as backward:
            cast_gated_gradients(grad, gate, up, kind="silu", form=form)
    for counted, least in zip((forward, backward), per_element, strict=True):
        assert least < counted.moved_bytes / gate.numel() < 1.02 * least + 0.15


def test_what_the_kernels_refuse(monkeypatch):
    _, gate, up = tensors_of(2, 32, dtype=torch.float32)
    form = CastForm(element=Element.E2M1, scaling=Scaling.MX)
    with routes("triton"), pytest.raises(InputError, match=r"fp8_gated_cast.*(4-bit|interpreter)"):
        cast_gated(gate, up, kind="silu", form=form)
    rows, _ = cast_gated(gate, up, kind="silu", form=form)
    assert rows.element is Element.E2M1


@pytest.mark.when_touched  # test_rms_norm.py has the rules of one operation
@needs_interpreter
@pytest.mark.parametrize(
    "scaling", [Scaling.ROW, pytest.param(Scaling.BLOCK, marks=IF_TOUCHED)]
)  # the operators are the same
def test_operator_rules(scaling):
    grad, gate, up = tensors_of(3, 5, dtype=torch.float32)
    torch.library.opcheck(fp8_gated_amax, (gate, up, "silu"))
    torch.library.opcheck(fp8_gated_gradients_amax, (grad, gate, up, "silu"))
    cast = ("silu", "e4m3", scaling.value, False)
    torch.library.opcheck(fp8_gated_cast, (gate, up, *cast, None, True, False))
    torch.library.opcheck(fp8_gated_gradients, (grad, gate, up, *cast, [], True, True, True))
