"""Cast and transpose in Triton's interpreter: the same bits as the specification."""

import inspect

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FORMATS, SIZES, counted_traffic, demanding, drawn, needs_interpreter
from triton.runtime import interpreter

from meshwright.kernels.fp8 import triton_cast
from meshwright.kernels.fp8.casting import cast_both
from meshwright.kernels.fp8.formats import CastForm, Element, Scaling, quantize
from meshwright.kernels.fp8.triton_cast import fp8_cast

pytestmark = needs_interpreter
FNUZ = (Element.E4M3_FNUZ, Element.E5M2_FNUZ)
KNOWS_FNUZ = "fp8e4b8" in inspect.getsource(interpreter._patch_lang_core)  # of Triton 3.4 it does not
EIGHT_BITS = (Element.E4M3, Element.E5M2, *(FNUZ if KNOWS_FNUZ else ()))


def assert_same(found, x, **options):
    want = quantize(x, **options)
    assert torch.equal(found.scales, want.scales)
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert found.shape == want.shape == x.shape


@settings(max_examples=8)
@given(
    rows=SIZES,
    columns=SIZES,
    dtype=st.sampled_from(FORMATS),
    scaling=st.sampled_from(Scaling),
    element=st.sampled_from(EIGHT_BITS),
    power_of_two=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_orientations(rows, columns, dtype, scaling, element, power_of_two, strided, seed):
    if scaling is Scaling.MX:
        element = Element.E4M3 if element is Element.E4M3_FNUZ else Element.E5M2
    x = drawn(rows, columns, dtype=dtype, strided=strided, seed=seed, scale=10.0 ** (seed % 5 - 2))
    options = {"element": element, "scaling": scaling, "power_of_two": power_of_two}
    with demanding(fp8_cast="triton"):
        by_rows, by_columns = cast_both(x, CastForm(**options))
    assert_same(by_rows, x, **options)
    assert_same(by_columns, x.T, **options)


def test_a_transposed_view_and_one_side():
    x = drawn(70, 40, dtype=torch.bfloat16).T
    with demanding(fp8_cast="triton"):
        none, by_columns = cast_both(x, CastForm(element=Element.E4M3, scaling=Scaling.ROW, with_rows=False))
    assert none is None
    assert_same(by_columns, x.T, element=Element.E4M3, scaling=Scaling.ROW)


def test_a_delayed_scale():
    x, amax = drawn(5, 7, dtype=torch.float32), torch.full((1, 1), 0.5)
    with demanding(fp8_cast="triton"):
        found, _ = cast_both(x, CastForm(element=Element.E4M3, scaling=Scaling.TENSOR), amax=amax)
    assert_same(found, x, element=Element.E4M3, scaling=Scaling.TENSOR, amax=amax)


@pytest.mark.when_touched  # the layer of test_grouped_gemm.py casts stacks by kernels
@settings(max_examples=8)
@given(
    num=st.integers(1, 3),
    rows=st.sampled_from([0, 1, 70, 130]),
    columns=st.sampled_from([1, 40, 260]),
    scaling=st.sampled_from(Scaling),
    power_of_two=st.booleans(),
    is_delayed=st.booleans(),
    transposed=st.booleans(),
    sides=st.sampled_from([(True, True), (True, False), (False, True)]),
    seed=st.integers(0, 99),
)
def test_a_stack_is_cast_as_its_matrices(
    num, rows, columns, scaling, power_of_two, is_delayed, transposed, sides, seed
):
    shape = (columns, rows) if transposed else (rows, columns)
    magnitudes = 10.0 ** torch.arange(num).view(-1, 1, 1)
    stack = drawn(num, *shape, dtype=torch.float32, strided=rows > 1, seed=seed) * magnitudes
    stack = (stack.mT if transposed else stack).bfloat16()
    delayed = torch.full((1, 1), 0.5) if is_delayed and scaling is Scaling.TENSOR else None
    options = {"element": Element.E4M3, "scaling": scaling, "power_of_two": power_of_two}
    form = CastForm(**options, **dict(zip(("with_rows", "with_columns"), sides, strict=True)))
    with demanding(fp8_cast="triton"):
        found = cast_both(stack, form, amax=delayed)
    with demanding(fp8_cast="reference"):
        expected = cast_both(stack, form, amax=delayed)
    for mine, exact, matrices in zip(found, expected, (stack, stack.mT), strict=True):
        assert (mine is None) == (exact is None)
        for e, x in enumerate(matrices) if mine is not None else ():
            assert_same(mine.matrix(e), x, **options, amax=delayed)
            assert_same(exact.matrix(e), x, **options, amax=delayed)


@pytest.mark.parametrize("scaling", Scaling)
def test_a_stack_is_one_launch_and_moves_the_least(scaling, monkeypatch):
    grids, launch = [], triton_cast.launch

    def counting(kernel, grid, *rest, **named):
        grids.append(grid)
        launch(kernel, grid, *rest, **named)

    monkeypatch.setattr(triton_cast, "launch", counting)
    stack = drawn(3, 128, 256, dtype=torch.bfloat16)
    with demanding(fp8_cast="triton"), counted_traffic() as counted:
        both = cast_both(stack, CastForm(element=Element.E4M3, scaling=scaling))
    first_pass = scaling in triton_cast.WHOLE  # finds the scales
    assert grids == [(1, 2, 3)] * (1 + first_pass)
    least = stack.nbytes * (1 + first_pass) + sum(side.num_bytes for side in both)
    assert counted.moved_bytes <= 1.1 * least


@pytest.mark.parametrize("scaling", Scaling)
def test_what_is_not_finite(scaling):
    x = drawn(3, 130, dtype=torch.float32)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    with demanding(fp8_cast="triton"):
        found, _ = cast_both(x, CastForm(element=Element.E4M3, scaling=scaling))
    want = quantize(x, element=Element.E4M3, scaling=scaling)
    assert torch.equal(found.dequantized().isnan(), want.dequantized().isnan())


@pytest.mark.parametrize("scaling", [Scaling.ROW, Scaling.MX])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)], ids=["matrix", "stack"])
def test_operator_rules(shape, scaling):
    torch.library.opcheck(
        fp8_cast, (drawn(*shape, dtype=torch.float32), "e4m3", scaling.value, False, None, True, False)
    )
