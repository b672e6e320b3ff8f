import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional

from meshwright.training.labels import IGNORED_LABEL
from meshwright.training.models.loss import linear_cross_entropy


def inputs(*, tokens=37, hidden=16, vocab=53, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h_ND = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    weight_VD = torch.randn(vocab, hidden, generator=generator, requires_grad=True)
    labels_N = torch.randint(vocab, (tokens,), generator=generator)
    labels_N[::5] = IGNORED_LABEL
    return h_ND, weight_VD, labels_N


def reference(h_ND, weight_VD, labels_N, *, z_loss=0.0, weights_N=None):
    logits_NV = h_ND @ weight_VD.T
    loss_N = functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="none")
    loss_N = loss_N + z_loss * logits_NV.logsumexp(1).square() * (labels_N != IGNORED_LABEL)
    return (loss_N if weights_N is None else loss_N * weights_N).sum()


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_logits", [1, 53 * 8, 2**26])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_equal_cross_entropy(z_loss, chunk_logits, weighted):
    h_ND, weight_VD, labels_N = inputs()
    weights_N = torch.rand(len(labels_N)) / 7 if weighted else None
    expected = reference(h_ND, weight_VD, labels_N, z_loss=z_loss, weights_N=weights_N)
    expected_grads = torch.autograd.grad(expected * 0.3, (h_ND, weight_VD))
    got = linear_cross_entropy(
        h_ND, weight_VD, labels_N, weights_N=weights_N, z_loss=z_loss, chunk_logits=chunk_logits
    )
    grads = torch.autograd.grad(got * 0.3, (h_ND, weight_VD))
    shown = reference(h_ND, weight_VD, labels_N, weights_N=weights_N)  # the z-loss is in the gradient only
    torch.testing.assert_close(got, shown, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-5)


def test_all_labels_ignored_is_zero_and_not_a_nan():
    h_ND, weight_VD, labels_N = inputs()
    loss = linear_cross_entropy(h_ND, weight_VD, torch.full_like(labels_N, IGNORED_LABEL))
    loss.backward()
    assert loss.item() == 0
    assert h_ND.grad.abs().sum() == 0


def test_a_frozen_weight_gets_no_gradient():
    h_ND, weight_VD, labels_N = inputs()
    linear_cross_entropy(h_ND, weight_VD.detach(), labels_N).backward()
    assert h_ND.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(h_ND, weight_VD, labels_N).requires_grad


def test_bf16_gradients_are_as_near_as_bf16_is():
    h_ND, weight_VD, labels_N = inputs(tokens=256)
    exact = torch.autograd.grad(reference(h_ND, weight_VD, labels_N), weight_VD)[0]
    low_h, low_w = h_ND.detach().bfloat16().requires_grad_(), weight_VD.detach().bfloat16().requires_grad_()
    linear_cross_entropy(low_h, low_w, labels_N, chunk_logits=53 * 4).backward()
    assert (low_w.grad.float() - exact).norm() / exact.norm() < 0.02
