"""The router's kernels in Triton's interpreter against float64, and what they choose of equal values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import assert_close, demanding, drawn, needs_interpreter

from meshwright.kernels.experts.router import RouterForm, reference, route_tokens

FORMS = {
    "mixtral": (8, RouterForm(top_k=2), False),
    "qwen3": (12, RouterForm(top_k=3, normalizes=False), False),
    "gpt-oss": (5, RouterForm(top_k=4), False),
    "deepseek-v2": (12, RouterForm(top_k=3, num_groups=3, groups_per_token=2, normalizes=False, scale=16.0), False),
    "deepseek-v3": (16, RouterForm(top_k=4, is_sigmoid=True, num_groups=4, groups_per_token=2, scale=2.5), True),
    "one expert": (1, RouterForm(top_k=1), False),
}


def routed(logits, bias, form, grads):
    """All outputs, and the gradient of the logits where weights, scores and logarithms have these gradients."""
    logits = logits.detach().clone().requires_grad_()
    found = route_tokens(logits, bias, form=form)
    total = sum(
        (t * g).sum() for t, g in zip((found.weights_NC, found.scores_NE, found.logsumexp_N), grads, strict=True)
    )
    (grad,) = torch.autograd.grad(total, logits)
    return found, grad


@needs_interpreter
@settings(max_examples=8)
@given(name=st.sampled_from(list(FORMS)), tokens=st.sampled_from([0, 1, 3, 9]), strided=st.booleans(),
       seed=st.integers(0, 99))  # fmt: skip
def test_against_float64(name, tokens, strided, seed):
    experts, form, has_bias = FORMS[name]
    logits = drawn(tokens, experts, dtype=torch.float32, strided=strided, seed=seed)
    bias = drawn(experts, dtype=torch.float32, seed=seed + 1, scale=0.1) if has_bias else None
    grads = [
        drawn(*shape, dtype=torch.float32, seed=seed + 2 + i)
        for i, shape in enumerate([(tokens, form.top_k), (tokens, experts), (tokens,)])
    ]
    with demanding(router="triton"):
        found, grad = routed(logits, bias, form, grads)
    with demanding(router="reference"):
        exact, exact_grad = routed(
            logits.double(), None if bias is None else bias.double(), form, [g.double() for g in grads]
        )
    assert torch.equal(found.experts_NC, exact.experts_NC)
    assert_close(found.weights_NC, exact.weights_NC)
    assert_close(found.scores_NE, exact.scores_NE)
    assert_close(found.logsumexp_N, exact.logsumexp_N)
    assert_close(grad, exact_grad, factor=2.0, terms=torch.cat([g.flatten() for g in grads]).double() * form.scale)


@pytest.mark.parametrize("route", ["reference", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("name", FORMS)
def test_of_equal_values_the_first_is_taken(name, route):
    experts, form, _ = FORMS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 2, (40, experts), generator=generator).float()
    with demanding(router=route):
        found = route_tokens(logits, None, form=form)
        alike = route_tokens(torch.zeros(2, experts), None, form=form)
    assert alike.experts_NC.tolist() == [list(range(form.top_k))] * 2
    for row, chosen in zip(logits.tolist(), found.experts_NC.tolist(), strict=True):
        assert len(set(chosen)) == form.top_k
        assert chosen == sorted(chosen, key=lambda e: (-row[e], e))
        if not form.num_groups:
            assert chosen == sorted(range(experts), key=lambda e: (-row[e], e))[: form.top_k]


@needs_interpreter
def test_only_one_output_has_a_gradient():
    logits = drawn(3, 8, dtype=torch.float32)
    for index in (0, 2, 3):
        found = []
        for route in ("triton", "reference"):
            x = logits.clone().requires_grad_()
            with demanding(router=route):
                route_tokens(x, None, form=RouterForm(top_k=2))[index].square().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value")
def test_overflown_logits_show_and_choose_existing_experts():
    logits = drawn(3, 6, dtype=torch.float32)
    logits[1] = torch.nan
    with demanding(router="triton"):
        found = route_tokens(logits, None, form=RouterForm(top_k=2))
    assert int(found.experts_NC.max()) < 6
    assert found.weights_NC[1].isnan().all()
    assert found.weights_NC[[0, 2]].isfinite().all()


@needs_interpreter
def test_operator_rules():
    from meshwright.kernels.experts.router_triton import route, route_backward

    logits, bias = drawn(3, 8, dtype=torch.float32).requires_grad_(), drawn(8, dtype=torch.float32, seed=1)
    given_values = (logits, bias, True, 2, 4, 2, True, 2.5)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(route, given_values, test_utils=utilities)
    experts = reference(logits, bias, form=RouterForm(top_k=2)).experts_NC
    grads = (torch.ones(3, 2), None, torch.ones(3), logits.detach(), experts, True, True, 2.5)
    torch.library.opcheck(route_backward, grads, test_utils=utilities)
