"""Attention: the routes against the specification in float64, kernels in Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.kernel_cases import FORMATS, assert_close, demanding, drawn, needs_interpreter
from tests.processors import pretend, without_amx

from meshwright.errors import InputError
from meshwright.kernels.attention import blockwise
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.kernels.attention.operation import ScoreOptions, attention, flex, reference
from meshwright.kernels.attention.triton_attention import attention_backward, attention_forward
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.processor import Multiplies

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
LENGTHS = st.sampled_from([0, 1, 2, 17, 64, 65, 140])


def operands(*, queries, keys, heads=4, groups=2, width=16, value_width=8, dtype=torch.float32, batch=2, seed=0):
    """Queries, keys and values as a fused projection leaves them: strided."""
    shapes = [(batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, value_width)]
    return [drawn(*shape, dtype=dtype, strided=True, seed=seed + i) for i, shape in enumerate(shapes)]


def documents(batch, length, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, length, generator=generator) < 0.1).long().cumsum(dim=1)


def some_ranges(kind, *, batch, queries, keys, seed):
    order = torch.arange(keys - queries, keys)
    match kind:
        case "causal":
            return None
        case "window":
            return key_ranges(None, window=9, order_T=order, num_keys=keys)
        case "documents":
            return key_ranges(documents(batch, keys, seed=seed), order_T=order, num_keys=keys)
        case _:  # two chunks of a sequence, as context parallelism has them, in windows of documents
            return key_ranges(
                documents(batch, keys, seed=seed), window=20, order_T=order.roll(queries // 2), num_keys=keys
            )


def with_gradients(run, tensors, grad):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = run(*tensors)
    return out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))


def compare(got, tensors, grad, *, factor=2.0, **options):
    """Outputs and gradients against float64. With `sinks` they are the last of `tensors`."""
    has_sinks = options.pop("has_sinks")

    def exact(q, k, v, *sinks):
        return reference(q, k, v, ScoreOptions(sinks_H=sinks[0] if has_sinks else None, **options))

    wanted = with_gradients(exact, [t.double() for t in tensors], grad.double())
    for found, want, like in zip(got, wanted, (tensors[2], *tensors), strict=True):
        # gradients cancel: their error is relative to the terms, of the order of the output gradient
        assert_close(found, want, factor=factor, terms=grad.double().norm() * torch.ones(1), dtype=like.dtype)


@needs_interpreter
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if dtype == torch.float32 else pytest.mark.when_touched) for dtype in FORMATS
    ],  # fp32 has the narrowest limit
    ids=str,
)
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(
    keys=LENGTHS,
    fewer=st.sampled_from([0, 0, 1, 50]),
    kind=st.sampled_from(["causal", "window", "documents", "chunks"]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    widths=st.sampled_from([(16, 16), (24, 8), (40, 64)]),
    cap=st.sampled_from([0.0, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@example(keys=70, fewer=1, kind="window", heads=(4, 2), widths=(24, 8), cap=2.0, has_sinks=True, seed=1)
@example(keys=70, fewer=0, kind="causal", heads=(3, 1), widths=(16, 16), cap=0.0, has_sinks=False, seed=2)
@example(keys=70, fewer=0, kind="documents", heads=(1, 1), widths=(192, 128), cap=0.0, has_sinks=False, seed=3)
def test_kernels_against_float64(dtype, keys, fewer, kind, heads, widths, cap, has_sinks, seed):
    queries = max(0, keys - fewer)
    ranges = some_ranges(kind, batch=2, queries=queries, keys=keys, seed=seed)
    tensors = operands(queries=queries, keys=keys, heads=heads[0], groups=heads[1], width=widths[0],
                       value_width=widths[1], dtype=dtype, seed=seed)  # fmt: skip
    if has_sinks:
        tensors.append(drawn(heads[0], dtype=dtype, seed=seed + 9))
    grad = drawn(2, queries, heads[0], widths[1], dtype=dtype, seed=seed + 5)
    options = {"scale": widths[0] ** -0.5, "cap": cap, "ranges": ranges}
    with demanding(attention="triton"):
        got = with_gradients(
            lambda q, k, v, *sinks: attention(q, k, v, sinks_H=sinks[0] if sinks else None, **options), tensors, grad
        )
    compare(got, tensors, grad, has_sinks=has_sinks, factor=4.0, **options)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("route", ["blockwise", "sdpa"])
def test_cpu_routes_against_float64(route, kind, has_sinks, monkeypatch):
    without_amx(monkeypatch)
    tensors = operands(queries=70, keys=70)
    if has_sinks:
        tensors.append(drawn(4, dtype=torch.float32, seed=9))
    grad = drawn(2, 70, 4, 8, dtype=torch.float32, seed=5)
    options = {"scale": 0.25, "cap": 0.0, "ranges": some_ranges(kind, batch=2, queries=70, keys=70, seed=1)}
    with demanding(attention=route):
        got = with_gradients(
            lambda q, k, v, *sinks: attention(q, k, v, sinks_H=sinks[0] if sinks else None, **options), tensors, grad
        )
    compare(got, tensors, grad, has_sinks=has_sinks, **options)


@pytest.mark.when_touched  # test_kernels_against_float64 has caps and sinks
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("kind", ["causal", "chunks"])
def test_flex_attention_has_caps_and_sinks(kind):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = operands(queries=40, keys=40, value_width=16)
    sinks = drawn(4, dtype=torch.float32)
    options = {"scale": 0.25, "cap": 2.0, "ranges": some_ranges(kind, batch=2, queries=40, keys=40, seed=1)}
    found = flex(q, k, v, ScoreOptions(sinks_H=sinks, **options), attend=flex_attention)
    wanted = ScoreOptions(sinks_H=sinks.double(), **options)
    assert_close(found, reference(q.double(), k.double(), v.double(), wanted))


@needs_interpreter
def test_a_query_that_sees_nothing_has_no_output_and_no_gradient():
    q, k, v = operands(queries=5, keys=5, batch=1)
    ranges = key_ranges(torch.zeros(1, 5, dtype=torch.long))
    ranges.first_BT[0, 2] = 4
    for route in ("triton", "reference"):
        with demanding(attention=route):
            out, grad_q, *_ = with_gradients(
                lambda *t: attention(*t, scale=1.0, ranges=ranges), (q, k, v), torch.ones(1, 5, 4, 8)
            )
        assert torch.isfinite(out).all()
        assert not out[0, 2].any()
        assert not grad_q[0, 2].any()


@pytest.mark.when_touched  # test_determinism.py runs attention twice
@needs_interpreter
def test_the_same_bits_each_time():
    tensors, grad = operands(queries=70, keys=70), drawn(2, 70, 4, 8, dtype=torch.float32)
    with demanding(attention="triton"):
        first, second = (with_gradients(lambda *t: attention(*t, scale=0.25), tensors, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_which_route_a_cpu_takes_and_why(monkeypatch):
    without_amx(monkeypatch)

    def chosen(length, **options):
        with using(KernelRouting()) as routing:
            attention(*operands(queries=length, keys=max(length, 3)), scale=1.0, **options)
        (choice,) = routing.choices.values()
        return choice.route, [refusal.reason for _, refusal in choice.refused]

    assert chosen(8) == ("blockwise", [])
    assert chosen(1) == ("sdpa", ["a single query is no block"])
    assert chosen(8, cap=1.0) == ("blockwise", [])
    monkeypatch.setattr(blockwise, "LONGEST", 7)
    assert chosen(8)[1] == ["it keeps the probabilities: 7 keys at most"]
    pretend(monkeypatch, Multiplies.AMX)
    assert chosen(8)[0] == "sdpa"
    assert chosen(8, cap=1.0)[0] == "blockwise"


def test_a_kernel_of_gpus_is_refused_on_a_cpu():
    with (
        pytest.raises(InputError, match=r"kernels\.attention: route flash cannot serve this call: a kernel of GPUs"),
        demanding(attention="flash"),
    ):
        attention(*operands(queries=3, keys=3), scale=1.0)


@pytest.mark.when_touched  # test_rms_norm.py has the rules of one operation
@needs_interpreter
def test_operator_rules():
    q, k, v = (t.contiguous() for t in operands(queries=3, keys=5, batch=1))
    sinks = torch.ones(4)
    ranges = key_ranges(None, window=2, order_T=torch.arange(2, 5), num_keys=5)
    given = (ranges.first_BT, ranges.last_BT)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention_forward, (q.requires_grad_(), k, v, *given, sinks, 1.0, 0.0), test_utils=tests)
    out, lse = attention_forward(q.detach(), k, v, *given, sinks, 1.0, 0.0)
    torch.library.opcheck(
        attention_backward,
        (torch.ones_like(out), q.detach(), k, v, out, lse, *given, sinks, 1.0, 0.0),
        test_utils=tests,
    )
