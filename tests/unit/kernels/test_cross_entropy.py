"""Cross-entropy in place: each route against float64, forward and gradient, and the bytes that its kernels move."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FEW, FORMATS, assert_close, counted_traffic, demanding, drawn, needs_interpreter
from torch.nn import functional

from meshwright.kernels.cross_entropy import cross_entropy, cross_entropy_op
from meshwright.kernels.labels import IGNORED_LABEL

ROUTES = ["cached", pytest.param("triton", marks=needs_interpreter)]


@pytest.mark.parametrize("route", ["reference", *ROUTES])
@settings(max_examples=15, deadline=None)
@given(
    rows=FEW,
    vocab=st.sampled_from([1, 2, 53, 130, 300]),
    dtype=st.sampled_from(FORMATS),
    reduction=st.sampled_from(["sum", "mean", "none"]),
    cap=st.sampled_from([0.0, 5.0]),
    z_loss=st.sampled_from([0.0, 0.05]),
    upstream_stride=st.sampled_from([0, 1, 3]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(route, rows, vocab, dtype, reduction, cap, z_loss, upstream_stride, strided, seed):
    leaf = drawn(rows, vocab, dtype=dtype, strided=strided, seed=seed, scale=3.0).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    labels[1::3] = IGNORED_LABEL
    upstream = torch.ones(()) * 0.7
    if reduction == "none":
        many = torch.rand(max(1, 3 * rows), generator=torch.Generator().manual_seed(seed))
        upstream = many.as_strided((rows,), (upstream_stride,))
    with demanding(cross_entropy=route):
        got = cross_entropy(leaf * 1.0, labels, reduction=reduction, cap=cap, z_loss=z_loss)
    got.backward(upstream)
    wide = leaf.detach().double().requires_grad_()
    logits = torch.tanh(wide / cap) * cap if cap else wide
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
    counted = (labels != IGNORED_LABEL).sum().clamp(min=1)
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted}[reduction]
    squares = z_loss * (logits.logsumexp(1).square() * (labels != IGNORED_LABEL))  # in the gradient alone
    shares = squares / counted if reduction == "mean" else squares
    (expected + (shares if reduction == "none" else shares.sum())).backward(upstream.double())
    assert_close(got, expected, terms=wide, factor=4.0)
    assert_close(leaf.grad, wide.grad, terms=wide.new_tensor(0.1), factor=4.0)


@pytest.mark.parametrize("route", ROUTES)
def test_the_gradient_lies_where_the_logits_were(route):
    leaf = drawn(3, 50, dtype=torch.float32).requires_grad_()
    logits = leaf * 1.0
    seen = []
    logits.register_hook(seen.append)
    with demanding(cross_entropy=route):
        cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
    (gradient,) = seen
    assert gradient.data_ptr() == logits.data_ptr()
    leaf = drawn(3, 50, dtype=torch.float32).requires_grad_()
    before = leaf.detach().clone()
    with demanding(cross_entropy=route):
        cross_entropy(leaf, torch.tensor([1, 2, 3])).backward()
        cross_entropy(leaf.detach(), torch.tensor([1, 2, 3]))
    assert torch.equal(leaf, before)  # a leaf is copied, and without a gradient nothing is written


@needs_interpreter
def test_bytes_moved_are_those_of_the_model():
    rows, vocab = 3, 300
    row = vocab * 4
    labels = torch.tensor([1, IGNORED_LABEL, 299])
    with demanding(cross_entropy="triton"):
        leaf = drawn(rows, vocab, dtype=torch.float32).requires_grad_()
        with counted_traffic() as counted:
            loss = cross_entropy(leaf * 1.0, labels)
        # two rows are read, read again and written; the masked one is written; some numbers of each row
        assert abs(counted.moved_bytes - 7 * row) <= 100
        with counted_traffic() as counted:
            loss.backward()
        assert counted.moved_bytes == rows * 4  # the gradient that arrives is one: its rows are not touched
        loss = cross_entropy(leaf * 1.0, labels, reduction="none")
        with counted_traffic() as counted:
            loss.backward(torch.tensor([1.0, 1.0, 0.5]))
        assert counted.moved_bytes == rows * 4 + 2 * row


@pytest.mark.when_touched  # test_rms_norm.py has the rules of one operation
@needs_interpreter
def test_operator_rules():
    from meshwright.kernels import cross_entropy_triton as made

    logits, labels, weights = (
        drawn(3, 9, dtype=torch.float32),
        torch.tensor([1, 2, -100]),
        torch.tensor([1.0, 2.0, 0.0]),
    )
    torch.library.opcheck(cross_entropy_op, (logits.clone().requires_grad_(), labels, weights, 0.1, 3.0))
    settings = {"z_loss": 0.1, "cap": 0.0}
    torch.library.opcheck(made.fused, (logits.clone(), labels, weights), settings | {"with_grad": True})
    torch.library.opcheck(made.statistics, (logits, labels), {"cap": 0.0, "first": 0})
    torch.library.opcheck(made.gradient, (logits.clone(), labels, torch.ones(3), weights), settings | {"first": 0})
    torch.library.opcheck(made.scale_rows, (logits.clone(), weights))


@needs_interpreter
def test_a_vocabulary_in_two_parts_equals_the_whole():
    """Statistics and gradient of `RowFunctions`, of both implementations, as ranks with a half each call them."""
    from meshwright.kernels.cross_entropy import TORCH_ROWS, triton_rows

    whole = drawn(4, 70, dtype=torch.float32, scale=3.0)
    labels, weights = torch.tensor([0, 33, IGNORED_LABEL, 69]), torch.tensor([1.0, 0.5, 0.0, 2.0])
    for cap in (0.0, 4.0):
        leaf = whole.double().requires_grad_()
        logits = torch.tanh(leaf / cap) * cap if cap else leaf
        losses = functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED_LABEL)
        (losses * weights).sum().backward()
        for rows in (TORCH_ROWS, triton_rows()):
            parts = [whole[:, :33].clone(), whole[:, 33:].clone()]
            found = [rows.statistics(p, labels, cap=cap, first=f) for p, f in zip(parts, (0, 33), strict=True)]
            lse = torch.stack([s[0].double() + s[1].double().log() for s in found]).logsumexp(0).float()
            for part, first in zip(parts, (0, 33), strict=True):
                rows.gradient(part, labels, lse, weights, z_loss=0.0, cap=cap, first=first)
            assert_close((lse - found[0][2] - found[1][2]) * weights, losses * weights, terms=leaf)
            assert_close(torch.cat(parts, dim=1), leaf.grad, factor=4.0)
