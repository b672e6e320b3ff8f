"""Each operation in a graph of `torch.compile`, forward and backward: no break, one graph for all numbers of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import demanding
from torch._dynamo.utils import counters

from meshwright.bench.kernel_cases import MAKERS, cases_of
from meshwright.catalog import lookup as catalog
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.triton_route import interpreter_fault, is_interpreted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the tracer

ROUTES = [
    (op, route)
    for op in MAKERS
    for route in OPERATIONS[op].routes
    if route in ("reference", "triton", "sdpa", "blockwise")
]
WITHOUT_TOKENS = ("adamw",)
"""Operations on parameters."""
OF_ONE_SIZE = ("fp8_gemm", "fp8_grouped_gemm", *WITHOUT_TOKENS)
"""Operations whose case holds the scales or counts of its tokens."""
UNROLLED = "blockwise"
"""A loop over blocks of queries, which a graph unrolls: each length has a graph of its own."""
TOKENS = (6, 10)


def cases(op, tokens):
    model = catalog.model("gpt-oss-20b")
    assert model.experts is not None
    small = replace(
        model,
        hidden=64,
        vocab=96,
        experts=replace(model.experts, num_experts=4, top_k=2, ffn_hidden=32),
        attention=replace(model.attention, num_heads=4, num_kv_heads=2, head_dim=16),
    )
    return list(cases_of(op, small, tokens=tokens, format="fp32", device=torch.device("cpu")))


def strided(x):
    """The same values in a part of a wider tensor, where the format allows arithmetic."""
    if not x.is_floating_point() or x.element_size() == 1 or x.dim() < 2:
        return x.clone()
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 3)
    part = wide[..., x.shape[-1] + 1 : 2 * x.shape[-1] + 1]
    return part.copy_(x)


def results(run, case, tensors, *, dynamic=()):
    """Outputs and gradients; what is updated in place is an output. Sizes in `dynamic` are symbols of the graph."""
    leaves = [t.detach().requires_grad_(i < case.num_trained) for i, t in enumerate(tensors)]
    for leaf in leaves:
        for dim in (dim for dim, size in enumerate(leaf.shape) if size in dynamic):
            torch._dynamo.mark_dynamic(leaf, dim)
    found = run(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    if case.num_trained:
        differentiable = [o for o in outputs if o.requires_grad]
        torch.autograd.backward(differentiable, [torch.ones_like(o) for o in differentiable])
    return [o.detach().clone() for o in outputs] + [t.grad for t in leaves[: case.num_trained]]


def check(op, route):
    torch._dynamo.reset()
    counters.clear()
    is_dynamic = op not in OF_ONE_SIZE and route != UNROLLED
    by_size = [cases(op, tokens) for tokens in TOKENS[: 1 + is_dynamic]]
    for forms in zip(*by_size, strict=True):
        before = counters["stats"]["unique_graphs"]
        compiled = torch.compile(partial(forms[0].run), fullgraph=True, backend="aot_eager")
        for tokens, case in zip(TOKENS, forms, strict=False):
            make = torch.clone if op in WITHOUT_TOKENS else strided
            with demanding(**{op: route}):
                expected = results(case.run, case, [make(t) for t in case.tensors])
                # a token has two experts, and a row for each
                dynamic = (tokens, 2 * tokens) if is_dynamic else ()
                found = results(compiled, case, [make(t) for t in case.tensors], dynamic=dynamic)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
        assert counters["stats"]["unique_graphs"] == before + 1
    assert not counters["graph_break"]


def test_an_operation_is_one_graph_for_all_sizes():
    check("swiglu", "reference")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "route"), ROUTES)
def test_every_operation_is_one_graph_for_all_sizes(op, route):
    if route == "triton" and (not is_interpreted() or interpreter_fault()):
        pytest.skip(interpreter_fault() or "Triton's interpreter (TRITON_INTERPRET=1)")
    check(op, route)
