"""Cross-entropy of rows in place: a sharded vocabulary, and the bytes that its kernels move."""

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import assert_close, counted_traffic, drawn, needs_interpreter
from torch.nn import functional

from meshwright.kernels.labels import IGNORED_LABEL


@needs_interpreter
def test_bytes_moved_are_those_of_the_model():
    from meshwright.kernels.cross_entropy_triton import fused, scale_rows

    rows, vocab = 3, 300
    row = vocab * 4
    labels = torch.tensor([1, IGNORED_LABEL, 299])
    weights = (labels != IGNORED_LABEL).float()
    logits = drawn(rows, vocab, dtype=torch.float32)
    with counted_traffic() as counted:
        fused(logits, labels, weights, z_loss=0.0, cap=0.0, with_grad=True)
    # two rows are read, read again and written; the masked one is written; some numbers of each row
    assert abs(counted.moved_bytes - 7 * row) <= 100
    with counted_traffic() as counted:
        scale_rows(logits, torch.ones(()).expand(rows))
    assert counted.moved_bytes == rows * 4  # rows whose scale is one are not touched
    with counted_traffic() as counted:
        scale_rows(logits, torch.tensor([1.0, 1.0, 0.5]))
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
