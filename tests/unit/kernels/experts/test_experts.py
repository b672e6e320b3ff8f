"""Kernels of mixtures of experts in Triton's interpreter against float64: ragged groups, experts without a token."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FORMATS, assert_close, counted_traffic, demanding, drawn, needs_interpreter

from meshwright.kernels.experts.grouped_gemm import grouped_gemm, opaque_gradients, opaque_reference
from meshwright.kernels.experts.grouped_gemm import reference as grouped_reference
from meshwright.kernels.experts.grouped_gemm_triton import grouped_rows, grouped_rows_backward
from meshwright.kernels.experts.permutation import ROUTES, permute, unpermute
from meshwright.kernels.experts.permutation_triton import (
    permute_rows,
    permute_rows_backward,
    unpermute_rows,
    unpermute_rows_backward,
)  # fmt: skip
from meshwright.kernels.fp8.aligned_rows import align

pytestmark = needs_interpreter
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")
NO_SHRINKING = [Phase.explicit, Phase.generate]


def routed(tokens, choices, experts, *, seed):
    """Experts of every token as a router draws them, the order of their rows, and how many rows each expert has."""
    generator = torch.Generator().manual_seed(seed)
    chosen_NC = torch.stack(
        [torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)]
    ) if tokens else torch.zeros(0, choices, dtype=torch.long)  # fmt: skip
    return chosen_NC.flatten().argsort(stable=True), torch.bincount(chosen_NC.flatten(), minlength=experts)


def gradients(run, tensors, grad):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = run(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if dtype == torch.bfloat16 else pytest.mark.when_touched) for dtype in FORMATS
    ],  # the same kernels load bf16
    ids=str,
)
@settings(max_examples=4, phases=NO_SHRINKING)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 3, 64, 70]), min_size=1, max_size=5),
    sizes=st.sampled_from([(1, 1), (40, 24), (130, 70)]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
@example(counts=[3, 0, 70], sizes=(40, 24), strided=True, seed=1)
def test_grouped_gemm(dtype, counts, sizes, strided, seed):
    n, k = sizes
    counts_E = torch.tensor(counts)
    x = drawn(sum(counts), k, dtype=dtype, strided=strided, seed=seed)
    weight = drawn(len(counts), n, k, dtype=dtype, strided=strided, seed=seed + 1)
    grad = drawn(sum(counts), n, dtype=dtype, strided=strided, seed=seed + 2)
    with demanding(grouped_gemm="triton"):
        got = gradients(lambda x, weight: grouped_gemm(x, weight, counts_E), (x, weight), grad)
    want = gradients(
        lambda x, weight: grouped_reference(x, weight, counts_E), (x.double(), weight.double()), grad.double()
    )
    for found, exact in zip(got, want, strict=True):
        assert_close(found, exact, factor=2.0)


@settings(max_examples=6, phases=NO_SHRINKING)
@given(
    tokens=st.sampled_from([0, 1, 5, 33]),
    choices=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([1, 24, 1100]),
    dtype=st.sampled_from(FORMATS),
    strided=st.booleans(),
    alignment=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 99),
)
def test_rows_to_experts_and_back(tokens, choices, width, dtype, strided, alignment, seed):
    order, counts_E = routed(tokens, choices, 6, seed=seed)
    if alignment is not None:
        order = align(order, counts_E, alignment=alignment).order_P
    x = drawn(tokens, width, dtype=dtype, strided=strided, seed=seed)
    weights = drawn(tokens, choices, dtype=torch.float32, seed=seed + 1)
    rows = drawn(len(order), width, dtype=dtype, strided=strided, seed=seed + 2)
    grad = drawn(tokens, width, dtype=dtype, strided=strided, seed=seed + 3)

    def there(x):
        return permute(x, order, top_k=choices)

    def back(rows, weights):
        return unpermute(rows, order, weights)

    with demanding(permute="triton", unpermute="triton"):
        got = [*gradients(there, (x,), rows), *gradients(back, (rows, weights), grad)]
    with demanding(permute="reference", unpermute="reference"):
        exact = [
            *gradients(there, (x.double(),), rows.double()),
            *gradients(back, (rows.double(), weights.double()), grad.double()),
        ]
    for found, want in zip(got, exact, strict=True):
        # sums of rows and products may cancel
        assert_close(found, want, factor=2.0, terms=rows.double() * 4, dtype=dtype if found.dtype == dtype else None)


def test_the_reference_is_the_definition():
    order_M, _ = routed(7, 2, 4, seed=3)
    x, weights = drawn(7, 5, dtype=torch.float64), drawn(7, 2, dtype=torch.float64, seed=1)
    rows = ROUTES["permute"]["reference"].function(x, order_M, top_k=2)
    assert torch.equal(rows, torch.stack([x[pair // 2] for pair in order_M.tolist()]))
    place = {pair: row for row, pair in enumerate(order_M.tolist())}
    wanted = torch.stack([sum(weights[n, c] * rows[place[2 * n + c]] for c in range(2)) for n in range(7)])
    torch.testing.assert_close(ROUTES["unpermute"]["reference"].function(rows, order_M, weights), wanted)


@pytest.mark.parametrize(
    "route", ["reference", pytest.param("triton", marks=pytest.mark.when_touched)]
)  # test_rows_to_experts_and_back has kernels with rows of zeros
def test_rows_of_zeros_change_no_bit(route):
    order_M, counts_E = routed(33, 2, 5, seed=4)
    order_P = align(order_M, counts_E, alignment=4).order_P
    is_row = order_P >= 0
    x, grad = drawn(33, 40, dtype=torch.bfloat16), drawn(33, 40, dtype=torch.bfloat16, seed=1)
    weights = drawn(33, 2, dtype=torch.float32, seed=2)

    def layer(order, seen):
        def run(x, weights):
            rows = permute(x, order, top_k=2)
            rows.register_hook(seen.append)
            seen.append(rows.detach())
            return unpermute(rows, order, weights)

        return run

    plain, padded = [], []  # the rows and their gradient
    with demanding(permute=route, unpermute=route):
        want = gradients(layer(order_M, plain), (x, weights), grad)
        found = gradients(layer(order_P, padded), (x, weights), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    for rows_MD, rows_PD in zip(plain, padded, strict=True):
        assert torch.equal(rows_PD[is_row], rows_MD)
        assert not rows_PD[~is_row].any()


def test_rows_of_zeros_are_written_and_not_read():
    order_M, counts_E = routed(8, 2, 3, seed=4)
    order_P = align(order_M, counts_E, alignment=4).order_P
    x = drawn(8, 512, dtype=torch.bfloat16)
    with demanding(permute="triton", unpermute="triton"):
        with counted_traffic() as there:
            rows = permute(x, order_P, top_k=2)
        with counted_traffic() as back:
            unpermute(rows, order_P, torch.ones(8, 2))
    bytes_of_row, num_rows = 2 * 512, len(order_P)
    assert there.written_bytes == num_rows * bytes_of_row
    assert there.read_bytes == 16 * bytes_of_row + 8 * num_rows  # and the pair of each row
    assert back.read_bytes <= 1.1 * 16 * bytes_of_row


@pytest.mark.when_touched  # test_determinism.py runs each of these operations twice
def test_the_same_bits_each_time():
    order_M, counts_E = routed(33, 2, 5, seed=0)
    x, weights = drawn(33, 40, dtype=torch.bfloat16), drawn(33, 2, dtype=torch.float32, seed=1)
    matrices = drawn(5, 40, 40, dtype=torch.bfloat16, seed=2)

    def layer(x, matrices, weights):
        return unpermute(grouped_gemm(permute(x, order_M, top_k=2), matrices, counts_E), order_M, weights)

    with demanding(permute="triton", unpermute="triton", grouped_gemm="triton"):
        first, second = (gradients(layer, (x, matrices, weights), torch.ones(33, 40)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.when_touched  # test_rms_norm.py has the rules of one operation
def test_operator_rules():
    order_M, counts_E = routed(4, 2, 3, seed=0)
    x, weights = drawn(4, 5, dtype=torch.float32), drawn(4, 2, dtype=torch.float32, seed=1)
    rows, matrices = drawn(8, 5, dtype=torch.float32, seed=2), drawn(3, 6, 5, dtype=torch.float32, seed=3)
    for op, given_tensors in (
        (permute_rows, (x, order_M, 2)),
        (unpermute_rows, (rows, order_M, weights)),
        (grouped_rows, (rows, matrices, counts_E)),
        (opaque_reference, (rows, matrices, counts_E)),
    ):
        leaves = [
            t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given_tensors
        ]
        torch.library.opcheck(op, tuple(leaves), test_utils=UTILITIES)
    x, rows, weights = x.detach(), rows.detach(), weights.detach()
    order_P = align(order_M, counts_E, alignment=2).order_P
    rows_PD = drawn(len(order_P), 5, dtype=torch.float32, seed=4)
    torch.library.opcheck(permute_rows, (x, order_P, 2), test_utils=UTILITIES)
    torch.library.opcheck(unpermute_rows, (rows_PD, order_P, weights), test_utils=UTILITIES)
    for order, of_order in ((order_M, rows), (order_P, rows_PD)):
        torch.library.opcheck(permute_rows_backward, (of_order, order, 4, 2), test_utils=UTILITIES)
        torch.library.opcheck(unpermute_rows_backward, (x, of_order, order, weights), test_utils=UTILITIES)
    grads = (torch.ones(8, 6), rows, matrices.detach(), counts_E)
    for backward in (grouped_rows_backward, opaque_gradients):
        torch.library.opcheck(backward, grads, test_utils=UTILITIES)


def test_the_reference_of_a_graph_has_the_bits_of_the_reference():
    """It is one operation there, with GEMMs of its own backward."""
    counts_E = torch.tensor([3, 0, 5])
    rows, matrices = (drawn(8, 5, dtype=torch.float32, strided=True), drawn(3, 6, 5, dtype=torch.float32, seed=1))
    found = [
        gradients(lambda x, weight, run=run: run(x, weight, counts_E), (rows, matrices), torch.ones(8, 6))
        for run in (grouped_reference, opaque_reference)
    ]
    assert all(map(torch.equal, *found))
