"""Activations in 8 bits: bytes, errors, what stays as it is; gradients against those of recomputation."""

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import drawn, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.kernels import stored_activations as stores
from meshwright.kernels.stored_activations import StoredFormat, store_activations, stored
from meshwright.training.models.feed_forward import FeedForward

ERRORS = {StoredFormat.INT8: 0.009, StoredFormat.E4M3: 0.03}


@pytest.mark.parametrize("dtype", stores.WIDE, ids=str)
@pytest.mark.parametrize("format", StoredFormat)
@pytest.mark.parametrize("shape", [(3, 5, 200), (64, 128), (7,), (2, 0)], ids=str)
def test_a_tensor_returns_with_its_shape_and_format(shape, format, dtype):
    x = drawn(*shape, dtype=dtype)
    found = stored(x, format=format)
    back = found.restored()
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert found.num_bytes == x.numel() + 4 * (x.numel() // max(shape[-1], 1)) * -(-shape[-1] // 128)
    if x.numel():
        assert relative_error(back, x) < ERRORS[format]


@pytest.mark.parametrize("format", StoredFormat)
def test_zeros_extremes_and_what_is_not_finite(format):
    x = torch.zeros(4, 256)
    x[1], x[2, :128], x[3, 0] = 3e38, 1e-30, float("inf")
    back = stored(x, format=format).restored()
    assert not back[0].any()
    assert relative_error(back[1], x[1]) < 1e-6
    assert relative_error(back[2, :128], x[2, :128]) < 1e-2
    assert back[3, :128].isnan().all()
    assert not back[3, 128:].any()


def trained(block, x, *, format=None, recomputes=False):
    """Gradients of weights and input, and the bytes that autograd keeps other than parameters."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.data_ptr(), t.shape] = t.nbytes
        return t

    x = x.detach().requires_grad_()
    if format is None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    else:
        before = stores.stored
        seen = {}

        def counted(t, *, format):
            found = before(t, format=format)
            seen[id(found)] = found
            return found

        stores.stored = counted
        try:
            out = block(x)
        finally:
            stores.stored = before
        kept = {i: s.num_bytes for i, s in seen.items()}
    block.zero_grad()
    out.square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in block.parameters())], sum(kept.values())


@pytest.mark.parametrize("format", StoredFormat)
def test_gradients_of_a_feed_forward_block_and_its_bytes(format):
    torch.manual_seed(0)
    block = FeedForward(128, 256)
    for p in block.parameters():
        nn.init.normal_(p, std=0.05)
    x = drawn(4, 64, 128, dtype=torch.float32)
    exact, whole = trained(block, x)
    again, _ = trained(block, x, recomputes=True)
    store_activations(block, format=format)
    rounded, small = trained(block, x, format=format)
    assert all(torch.equal(a, b) for a, b in zip(again, exact, strict=True))
    errors = [relative_error(a, b) for a, b in zip(rounded, exact, strict=True)]
    assert 1e-4 < max(errors) < 2 * ERRORS[format]
    assert small < 0.3 * whole  # fp32: a quarter and the scales; the input of gate and up once


def test_weights_small_tensors_and_integers_stay():
    embedding = nn.Embedding(100, 64)
    linear = nn.Linear(64, 64, bias=False)
    module = nn.Sequential(embedding, linear)
    module.requires_grad_(False)
    linear.weight.requires_grad_()
    store_activations(module, format=StoredFormat.INT8)
    tokens = torch.arange(8)
    module(tokens).sum().backward()  # 512 values: below the limit, so the gradient is exact
    assert torch.equal(linear.weight.grad, embedding.weight[:8].sum(dim=0).expand(64, 64))


def test_a_tensor_that_was_freed_is_not_taken_for_a_new_one_at_its_address():
    class Chain(nn.Module):
        def forward(self, x):
            for factor in (1.0, 2.0, 3.0):
                x = (x * factor).exp().log()  # each saves a tensor whose memory is free for the next
            return x

    module, x = Chain(), drawn(64, 128, dtype=torch.float32, scale=0.1).abs_()
    x.requires_grad_()
    store_activations(module, format=StoredFormat.INT8)
    module(x).sum().backward()
    assert relative_error(x.grad, torch.full_like(x, 6.0)) < 0.02
