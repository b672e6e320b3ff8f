"""Loss of a head without its logits: each route against float64, forward and gradient."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FEW, assert_close, demanding, drawn, needs_interpreter
from tests.rounding import difference
from torch.nn import functional

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.linear_cross_entropy import _chunks, linear_cross_entropy, linear_cross_entropy_op
from meshwright.kernels.traffic import CHUNK_UNIT, chunk_rows

ROUTES = ["cached", pytest.param("triton", marks=needs_interpreter)]


def labels_of(tokens, vocab, *, seed=0, masked=True):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(vocab, (tokens,), generator=generator)
    if masked:
        labels_N[torch.rand(tokens, generator=generator) < 0.3] = IGNORED_LABEL
    return labels_N


def exact(h_ND, weight_VD, labels_N, *, z_loss=0.0, weights_N=None, cap=0.0, reduction="sum"):
    """PyTorch's own loss, with the z-loss in it; written without this project's functions."""
    logits_NV = h_ND @ weight_VD.T
    logits_NV = torch.tanh(logits_NV / cap) * cap if cap else logits_NV
    losses_N = functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="none")
    counted_N = (labels_N != IGNORED_LABEL).to(losses_N)
    losses_N = losses_N + z_loss * logits_NV.logsumexp(1).square() * counted_N
    losses_N = losses_N if weights_N is None else losses_N * weights_N
    if reduction == "mean":
        return losses_N.sum() / counted_N.sum().clamp(min=1)
    return losses_N.sum() if reduction == "sum" else losses_N


def compare(route, h_ND, weight_VD, labels_N, *, upstream=1.0, factor=8.0, chunk_logits=2**26, **options):
    """Value without the z-loss and gradients with it, each within `factor` times the bound of the format."""
    with demanding(linear_cross_entropy=route):
        got = linear_cross_entropy(h_ND, weight_VD, labels_N, chunk_logits=chunk_logits, **options)
    (got * upstream).sum().backward()
    wide_h, wide_w = (t.detach().double().requires_grad_() for t in (h_ND, weight_VD))
    with_z = exact(wide_h, wide_w, labels_N, **options)
    (with_z * upstream).sum().backward()
    shown = exact(wide_h, wide_w, labels_N, **(options | {"z_loss": 0.0}))
    assert got.dtype == torch.float32
    # a loss is a difference of numbers as large as the logits are
    largest = (wide_h.detach() @ wide_w.detach().T).abs().amax() if len(h_ND) else torch.zeros(())
    rounding = largest * max(1, len(h_ND))
    assert_close(got, shown, factor=factor, terms=rounding, dtype=h_ND.dtype)
    if h_ND.requires_grad:
        assert_close(h_ND.grad, wide_h.grad, factor=factor, terms=wide_h.new_tensor(1e-3))
    if weight_VD.requires_grad:
        assert_close(weight_VD.grad, wide_w.grad, factor=factor, terms=wide_h.new_tensor(1e-3))


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=15, deadline=None)
@given(
    tokens=FEW,
    hidden=st.sampled_from([1, 8, 17]),
    vocab=st.sampled_from([1, 2, 53, 130, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    z_loss=st.sampled_from([0.0, 0.05]),
    cap=st.sampled_from([0.0, 4.0]),
    reduction=st.sampled_from(["sum", "mean", "none"]),
    rows_of_chunk=st.sampled_from([1, 2, 100]),
    weighted=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(
    route, tokens, hidden, vocab, dtype, z_loss, cap, reduction, rows_of_chunk, weighted, strided, seed
):
    compare(
        route,
        drawn(tokens, hidden, dtype=dtype, strided=strided, seed=seed).requires_grad_(),
        drawn(vocab, hidden, dtype=dtype, seed=seed + 1).requires_grad_(),
        labels_of(tokens, vocab, seed=seed),
        z_loss=z_loss,
        cap=cap,
        reduction=reduction,
        weights_N=torch.rand(tokens) if weighted else None,
        chunk_logits=rows_of_chunk * vocab,
        upstream=torch.rand(tokens) if reduction == "none" else 0.3,
        factor=20.0,
    )


@pytest.mark.parametrize("route", ROUTES)
def test_large_logits_and_a_vocabulary_of_many_blocks(route):
    h_ND = drawn(4, 8, dtype=torch.float32, scale=30.0).requires_grad_()
    weight_VD = drawn(9001, 8, dtype=torch.float32, seed=1).requires_grad_()
    compare(route, h_ND, weight_VD, labels_of(4, 9001), z_loss=1e-4, chunk_logits=3 * 9001, factor=20.0)


@pytest.mark.parametrize("route", ROUTES)
def test_all_labels_ignored_is_zero_and_not_a_nan(route):
    h_ND = drawn(5, 8, dtype=torch.float32).requires_grad_()
    weight_VD = drawn(11, 8, dtype=torch.float32, seed=1).requires_grad_()
    for reduction in ("sum", "mean"):
        with demanding(linear_cross_entropy=route):
            loss = linear_cross_entropy(h_ND, weight_VD, torch.full((5,), IGNORED_LABEL), reduction=reduction)
        loss.backward()
        assert loss.item() == 0
        assert h_ND.grad.abs().sum() == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_frozen_weight_gets_no_gradient(route):
    h_ND, weight_VD = drawn(5, 8, dtype=torch.float32).requires_grad_(), drawn(11, 8, dtype=torch.float32)
    with demanding(linear_cross_entropy=route):
        linear_cross_entropy(h_ND, weight_VD, labels_of(5, 11)).backward()
        assert h_ND.grad is not None
        assert weight_VD.grad is None
        with torch.no_grad():
            assert not linear_cross_entropy(h_ND, weight_VD, labels_of(5, 11)).requires_grad


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_bits_each_time_and_inputs_untouched(route):
    results = []
    for _ in range(2):
        h_ND, weight_VD = (drawn(n, 8, dtype=torch.bfloat16, seed=n).requires_grad_() for n in (9, 53))
        before = h_ND.detach().clone(), weight_VD.detach().clone()
        with demanding(linear_cross_entropy=route):
            linear_cross_entropy(h_ND, weight_VD, labels_of(9, 53), chunk_logits=2 * 53).backward()
        assert torch.equal(before[0], h_ND)
        assert torch.equal(before[1], weight_VD)
        results.append((h_ND.grad, weight_VD.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("route", ROUTES)
def test_a_graph_that_is_kept_has_a_second_backward_pass(route):
    """Zero-bubble pipelines take the gradient of the input first and that of the weight in a second pass."""
    h_ND = drawn(5, 8, dtype=torch.float32).requires_grad_()
    weight_VD = drawn(11, 8, dtype=torch.float32, seed=1).requires_grad_()
    with demanding(linear_cross_entropy=route):
        loss = linear_cross_entropy(h_ND, weight_VD, labels_of(5, 11)) * 0.5
    (first,) = torch.autograd.grad(loss, h_ND, retain_graph=True)
    first = first.clone()
    loss.backward()
    assert torch.equal(first, h_ND.grad)
    wide = weight_VD.detach().double().requires_grad_()
    (exact(h_ND.detach().double(), wide, labels_of(5, 11)) * 0.5).backward()
    assert_close(weight_VD.grad, wide.grad, factor=4.0)


def test_bf16_gradients_are_as_near_as_bf16_is():
    h_ND, weight_VD, labels_N = (drawn(256, 16, dtype=torch.float32), drawn(53, 16, dtype=torch.float32, seed=1), None)
    labels_N = labels_of(256, 53)
    wide = weight_VD.double().requires_grad_()
    exact(h_ND.double(), wide, labels_N).backward()
    low = weight_VD.bfloat16().requires_grad_()
    linear_cross_entropy(h_ND.bfloat16(), low, labels_N, chunk_logits=53 * 4).backward()
    assert (low.grad.double() - wide.grad).norm() / wide.grad.norm() < 0.02


@pytest.mark.when_touched  # test_rms_norm.py has the rules of one operation
@needs_interpreter
def test_operator_rules_and_a_traced_graph():
    h_ND, weight_VD = drawn(4, 8, dtype=torch.float32).requires_grad_(), drawn(11, 8, dtype=torch.float32)
    weights_N = torch.tensor([1.0, 0.0, 0.5, 1.0])
    labels_N = torch.tensor([3, IGNORED_LABEL, 0, 10])
    torch.library.opcheck(linear_cross_entropy_op, (h_ND, weight_VD, labels_N, weights_N, 0.1, 0.0, 22, True, False))
    with demanding(linear_cross_entropy="triton"):
        traced = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        traced(h_ND, weight_VD, labels_N, z_loss=0.1).backward()
        got, h_ND.grad = h_ND.grad, None
        linear_cross_entropy(h_ND, weight_VD, labels_N, z_loss=0.1).backward()
    torch.testing.assert_close(got, h_ND.grad)


@needs_interpreter
@pytest.mark.parametrize(("tokens", "vocab", "trained", "chunks"), [(8, 9001, True, 1), (8, 9001, False, 3)])
def test_all_tokens_are_one_chunk_where_a_sum_would_take_more_memory(tokens, vocab, trained, chunks, monkeypatch):
    from meshwright.kernels import linear_cross_entropy as module

    monkeypatch.setattr(module, "CHUNK_LOGITS", 3 * vocab)
    made = []
    monkeypatch.setattr(module, "matmul_nt", lambda a, b: made.append(a.shape) or a @ b.T)
    h_ND = drawn(tokens, 16, dtype=torch.bfloat16).requires_grad_()
    weight_VD = drawn(vocab, 16, dtype=torch.bfloat16, seed=1).requires_grad_(trained)
    with demanding(linear_cross_entropy="triton"):
        linear_cross_entropy(h_ND, weight_VD, labels_of(tokens, vocab)).backward()
    assert sum(shape[-1] == 16 and shape[0] != vocab for shape in made) == chunks


@pytest.mark.parametrize(
    "route", ["cached", pytest.param("triton", marks=[needs_interpreter, pytest.mark.when_touched])]
)  # the function that both routes share chooses chunks, and test_values_and_gradients has chunks of kernels
def test_automatic_chunks_are_whole_tiles_and_change_no_loss(route, monkeypatch):
    """A chunk that is asked for is not rounded. The shortened chunk of 523 x 128,256 logits, in small."""
    from meshwright.kernels import linear_cross_entropy as module

    tokens, vocab = 300, 11
    monkeypatch.setattr(module, "CHUNK_LOGITS", 135 * vocab)
    h_ND, weight_VD = (drawn(n, 8, dtype=torch.float32, seed=n).requires_grad_() for n in (tokens, vocab))
    found = {}
    for asked, rows in ((0, CHUNK_UNIT), (135 * vocab, 135), (tokens * vocab, tokens)):
        monkeypatch.setattr(module, "automatic_chunk", lambda *_, **__: module.CHUNK_LOGITS)
        with demanding(linear_cross_entropy=route) as routing:
            loss = linear_cross_entropy(h_ND, weight_VD, labels_of(tokens, vocab), chunk_logits=asked)
            gradients = torch.autograd.grad(loss, (h_ND, weight_VD))
        assert routing.facts["linear_cross_entropy"]["chunk_tokens"] == rows
        found[rows] = loss, *gradients
    for values in zip(*found.values(), strict=True):
        for other in values[1:]:
            assert (other - values[0]).norm() <= difference(tokens) * values[0].norm()


def test_no_more_than_a_chunk_of_logits_is_in_memory():
    """The largest tensor of the step is a chunk of logits, or a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    h_ND, weight_VD = (drawn(256, 4, dtype=torch.float32).requires_grad_(), drawn(500, 4, dtype=torch.float32, seed=1))
    with Largest() as largest, demanding(linear_cross_entropy="cached"):
        linear_cross_entropy(h_ND, weight_VD.requires_grad_(), labels_of(256, 500), chunk_logits=8 * 500).backward()
    assert largest.numel <= 8 * 500


def test_without_gradients_none_are_made():
    """A validation: the weight is a parameter, which autograd counts as one that needs its gradient."""
    h_ND, weight_VD = drawn(9, 8, dtype=torch.float32), drawn(53, 8, dtype=torch.float32, seed=1)
    weight_VD.requires_grad_()
    with demanding(linear_cross_entropy="cached") as routing, torch.no_grad():
        loss = linear_cross_entropy(h_ND, weight_VD, labels_of(9, 53))
    assert not loss.requires_grad
    assert routing.facts == {}  # of a chunk that gradients are made in
    with demanding(linear_cross_entropy="cached") as routing:
        same = linear_cross_entropy(h_ND, weight_VD, labels_of(9, 53), chunk_logits=2 * 53)
    assert routing.facts == {"linear_cross_entropy": {"chunk_tokens": 2, "num_chunks": 5}}
    assert same.item() == pytest.approx(loss.item(), rel=1e-6)


MEMORY = """
import resource, sys, torch
from meshwright.training.device import peak_memory_bytes
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy

route, tokens, chunk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
h = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(128256, 64, dtype=torch.bfloat16, requires_grad=True)
h.grad, weight.grad = torch.zeros_like(h), torch.zeros_like(weight)
labels = torch.randint(128256, (tokens,))
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
with using(KernelRouting(demanded={"linear_cross_entropy": route})):
    linear_cross_entropy(h, weight, labels, chunk_logits=chunk * 128256).backward()
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux counts a process's memory so")
def test_the_peak_is_at_most_a_twentieth_of_that_of_all_logits():
    """Vocabulary of 128,256 and 8,192 tokens in bf16, over what both hold: operands and their gradients.

    All logits would take 17 GB: they are measured for 256 and 512 tokens, and grow with the tokens.
    """

    def peak_bytes(route, tokens, *, chunk=0):
        found = subprocess.run(
            [sys.executable, "-c", MEMORY, route, str(tokens), str(chunk)], capture_output=True, check=True
        )
        return int(found.stdout)

    few, more = peak_bytes("reference", 256), peak_bytes("reference", 512)
    dense_bytes = more + (8192 - 512) * (more - few) / 256
    assert dense_bytes > 12 * 8192 * 128256  # at least bf16 and fp32 logits, exponentials and both gradients
    own, fewer = (peak_bytes("cached", 8192), peak_bytes("cached", 8192, chunk=128))  # `kernels.loss_chunk: 128`
    assert own <= dense_bytes / 20
    assert fewer <= dense_bytes / 40
    assert fewer < own


def test_the_memory_of_a_gpu_as_it_is_computed():
    """Of the kernels: logits of a chunk in bf16, overwritten by their gradient, instead of all of them in bf16, and in
    fp32 logits, log-softmax and its gradient. The fp32 sum of d W is counted apart: it is as large as W twice."""
    tokens, vocab = 8192, 128256
    dense_bytes = tokens * vocab * (2 + 4 + 4 + 4)
    size = int(chunk_rows(tokens, vocab=vocab))
    chunks = list(_chunks(tokens, size=size))
    assert size % CHUNK_UNIT == 0
    chunk_bytes = max(part.stop - part.start for part in chunks) * vocab * 2
    assert len(chunks) == 16
    assert chunk_bytes <= dense_bytes / 20
    assert chunk_bytes + 4 * vocab * 4096 <= dense_bytes / 6  # with the sum of Llama 3.1 8B: 2.1 of 14.7 GB
