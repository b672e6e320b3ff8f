"""PyTorch's deterministic mode: every Triton route serves it, and gives the same bits each time."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from tests.kernel_cases import demanding, needs_interpreter

from meshwright.bench.kernel_cases import cases_of
from meshwright.catalog import lookup as catalog
from meshwright.kernels.operations import OPERATIONS

pytestmark = needs_interpreter
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def small(*, experts):
    """Four experts of 32, or a dense model."""
    model = catalog.model("gpt-oss-20b" if experts else "qwen2.5-0.5b")
    attention = replace(model.attention, num_heads=4, num_kv_heads=2, head_dim=16)
    model = replace(model, hidden=64, vocab=67, attention=attention)
    if not experts:
        return replace(model, ffn_hidden=96)
    return replace(model, experts=replace(model.experts, num_experts=4, top_k=2, ffn_hidden=32))


def calls_of(op):
    torch.manual_seed(0)
    for experts in (False, True):
        cases = [*cases_of(op, small(experts=experts), tokens=5, format="bf16", device=CPU)]
        if cases:
            return cases
    raise AssertionError(f"no case of {op}")


def values(case):
    """Results of a call, the tensors that it changes, and its gradients."""
    tensors = [t.clone() if isinstance(t, torch.Tensor) else t for t in case.tensors]
    for tensor in tensors[: case.num_trained]:
        tensor.requires_grad_()
    with demanding(**{case.op: "triton"}):
        outs = case.run(*tensors)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if case.num_trained:
        trained = [out for out in outs if out.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(out) for out in trained])
    grads = [t.grad for t in tensors[: case.num_trained] if t.grad is not None]
    return [t.detach() for t in (*outs, *grads, *(t for t in tensors if isinstance(t, torch.Tensor)))]


@pytest.mark.parametrize("op", [name for name, one in OPERATIONS.items() if "triton" in one.routes])
def test_the_same_bits_each_time(op):
    for case in calls_of(op):
        first, second = values(case), values(case)
        assert len(first) > len(case.tensors) or not case.num_trained
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.view(torch.uint8) if one.dtype.itemsize == 1 else one,
                               other.view(torch.uint8) if other.dtype.itemsize == 1 else other)  # fmt: skip
