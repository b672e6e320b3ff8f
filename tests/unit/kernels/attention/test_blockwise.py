import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional

from meshwright.kernels.attention import blockwise
from meshwright.kernels.attention.key_ranges import key_ranges


def inputs(*, queries=150, keys=150, heads=6, groups=2, value=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.transpose(1, 2).requires_grad_()  # as a projection leaves it

    q_BHTK, k_BGSK = tensor(2, queries, heads, 16), tensor(2, keys, groups, 16)
    return (q_BHTK, k_BGSK, tensor(2, keys, groups, value), torch.randn(2, heads, queries, value, generator=generator))


def with_gradients(attention, q_BHTK, k_BGSK, v_BGSV, grad_BHTV):
    out_BHTV = attention(q_BHTK, k_BGSK, v_BGSV)
    grads = torch.autograd.grad(out_BHTV, (q_BHTK, k_BGSK, v_BGSV), grad_BHTV.to(out_BHTV.dtype))
    return out_BHTV.detach(), *grads


def reference(mask=None):
    """PyTorch's kernel; `mask` None: the last query sees all keys."""

    def attention(q_BHTK, k_BGSK, v_BGSV):
        num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        return functional.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSV, attn_mask=seen if mask is None else mask, scale=0.3, enable_gqa=True
        )

    return attention


def ours(mask=None):
    return lambda q, k, v: blockwise.attend(q, k, v, mask_B1TS=mask, scale=0.3)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 64), (150, 150), (70, 150)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_causal_attention_equals_pytorch(queries, keys, groups):
    given = inputs(queries=queries, keys=keys, groups=groups)
    expected = with_gradients(reference(), *given)
    torch.testing.assert_close(with_gradients(ours(), *given), expected)


def capped_reference(mask, cap):
    """Scores written out, which autograd differentiates."""

    def attention(q_BHTK, k_BGSK, v_BGSV):
        repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
        k_BHSK, v_BHSV = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSK, v_BGSV))
        s_BHTS = cap * (0.3 * q_BHTK @ k_BHSK.mT / cap).tanh()
        return s_BHTS.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v_BHSV

    return attention


@pytest.mark.parametrize("queries", [1, 70, 150])
@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
def test_capped_scores_equal_those_written_out(queries, cap):
    given = inputs(queries=queries)
    seen = torch.ones(queries, 150, dtype=torch.bool).tril(150 - queries)
    expected = with_gradients(capped_reference(seen, cap), *given)

    def capped(q, k, v):
        return blockwise.attend(q, k, v, mask_B1TS=None, scale=0.3, cap=cap)

    torch.testing.assert_close(with_gradients(capped, *given), expected)


@pytest.mark.parametrize("window", [0, 20])
def test_documents_and_windows_equal_pytorch(window):
    documents_BT = torch.tensor([[0] * 90 + [1] * 60, [0] * 10 + [1] * 100 + [-1] * 40])
    mask = key_ranges(documents_BT, window=window).mask_B1TS
    expected = with_gradients(reference(mask), *inputs())
    torch.testing.assert_close(with_gradients(ours(mask), *inputs()), expected)


def test_bf16_rounds_about_as_much_as_pytorch_does():
    *exact, grad = inputs(queries=256, keys=256, value=16)  # equal widths: its fused kernel
    low = [x.detach().bfloat16().requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in low]
    right = with_gradients(reference(), *exact, grad)

    def errors(attention):
        got = with_gradients(attention, *low, grad)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True)]

    for error, of_pytorch in zip(errors(ours()), errors(reference()), strict=True):
        assert error < 1.5 * of_pytorch
