"""Traffic of the native engine's kernels: counted in the operations that PyTorch dispatches, and what else it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cost_case import Case

from meshwright.catalog import lookup as catalog
from meshwright.cost.elementwise import FusedKernels, elementwise_times, stream_accesses
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.rates import system_rates
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.kernels.traffic import chunk_rows, num_chunks
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Model, NormPlacement
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

TOKENS = 48


def rates_on(cluster: str, *, framework: str = "native", precision: str = "bf16", **routes: str):
    return system_rates(catalog.cluster(cluster), PRECISIONS[precision], Stack(framework=framework), routes=routes)


def small(name: str = "llama3.1-8b", **changes: object) -> Model:
    model = catalog.model(name)
    a = replace(model.attention, num_heads=4, num_kv_heads=2, head_dim=16)
    base = replace(model, hidden=64, num_layers=1, vocab=130, ffn_hidden=192, attention=a)
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def predicted_bytes(model: Model, *, precision: str = "bf16"):
    """Bytes that a dense layer moves forward and backward, from its seconds at a byte a second."""
    rates = rates_on("h100-8x1", precision=precision).device
    shapes = LayerShapes(
        model=model_row(model), batch=BatchTable(seq_len=TOKENS, global_batch=1), plan=plan_row(Plan()),
        precision=precision_row(PRECISIONS[precision]),
        rates=replace(rates, memory_bytes_per_s=1.0, memory_ratio=1.0, unit_pace=0.0),
    )  # fmt: skip
    times = elementwise_times(shapes).of_layer(is_moe=False)
    return float(times.forward_s), float(times.input_s)


class TestCounts:
    """Bytes of what one layer and one loss really dispatch, GEMMs and attention apart."""

    @pytest.fixture
    def torch(self):
        torch = pytest.importorskip("torch")
        pytest.importorskip("triton")
        from meshwright.kernels.triton_route import is_interpreted

        if not is_interpreted():
            pytest.skip("Triton's interpreter (TRITON_INTERPRET=1)")
        return torch

    @staticmethod
    def counter(torch, *, least: int):
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        def tensors(tree: object) -> list:
            found = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            return [x for x in found if x.numel() >= least]

        class Counter(TorchDispatchMode):
            moved = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                name, aliases = func._schema.name, [a.alias_info for a in func._schema.arguments]
                is_view = any(alias is not None and not alias.is_write for alias in aliases)
                if is_view or name in (
                    "aten::mm",
                    "meshwright::gemm",
                    "aten::_unsafe_view",
                    "aten::empty",
                    "aten::empty_like",
                ):
                    return out
                given = tensors((args, kwargs))
                changed = [x for x, alias in zip(args, aliases, strict=False) if alias is not None]
                made = [] if any(alias is not None for alias in aliases) else tensors(out)
                read = given[1:] if name == "aten::copy_" else given
                self.moved += sum(x.numel() * x.element_size() for x in [*read, *tensors(changed), *made])
                return out

        return Counter()

    @pytest.mark.parametrize(
        "model",
        [
            pytest.param(small(), id="norms of inputs"),
            pytest.param(  # norms of both are there
                small(norm_placement=NormPlacement.AFTER), id="norms of outputs", marks=pytest.mark.slow
            ),
            pytest.param(  # the same norms, twice as many
                small(norm_placement=NormPlacement.BOTH), id="norms of both", marks=pytest.mark.when_touched
            ),
            pytest.param(  # test_rms_norm.py counts the bytes of such a norm
                small("qwen3-8b"), id="norms of queries and keys", marks=pytest.mark.when_touched
            ),
        ],
    )
    def test_a_layer_moves_what_is_predicted(self, torch, model, monkeypatch):
        from tests.kernel_cases import demanding

        from meshwright.training.models.attention import CoreAttention
        from meshwright.training.models.transformer import Transformer, TransformerOptions

        def core(self, q, k, v, *others):
            with torch.utils._python_dispatch._disable_current_modes():
                kept = tuple(torch.zeros_like(x) for x in (q, k, v))
            return _Attention.apply(q, k, v, kept)

        class _Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v, kept):
                ctx.kept = kept
                return kept[0].detach()

            @staticmethod
            def backward(ctx, *grads):
                return (*ctx.kept, None)

        monkeypatch.setattr(CoreAttention, "forward", core)
        layers = Transformer(model, layers=range(1), is_first=False, is_last=False, options=TransformerOptions())
        layers = layers.bfloat16()
        x = torch.ones(1, TOKENS, model.hidden, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.ones_like(x)
        counter = self.counter(torch, least=TOKENS * 16)
        with demanding(rms_norm="triton", swiglu="triton", rotary="triton"), counter:
            out = layers(x)
            forward, counter.moved = counter.moved, 0
            out.backward(gradient)
        expected = predicted_bytes(model)
        assert (forward, counter.moved) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("chunk_logits", [2**20, 130 * 24])
    def test_a_loss_moves_what_is_predicted(self, torch, chunk_logits):
        from meshwright.kernels.cross_entropy import triton_rows
        from meshwright.kernels.linear_cross_entropy import LossSettings, losses_and_gradients
        from meshwright.kernels.traffic import HIDDEN_GRADIENT_COPY, LOSS_OF_LOGITS, weight_sum_bytes

        vocab, hidden = 130, 64
        h, weight = (torch.ones(n, hidden, dtype=torch.bfloat16) for n in (TOKENS, vocab))
        labels, weights = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS)
        counter = self.counter(torch, least=TOKENS * 16)
        with counter:
            losses_and_gradients(
                h, weight, labels, weights, LossSettings(chunk_logits=chunk_logits, rows=triton_rows()),
                wants=(True, True),
            )  # fmt: skip
        rows = chunk_rows(TOKENS, vocab=vocab, chunk_logits=chunk_logits)
        chunks = num_chunks(TOKENS, rows=rows)
        expected = 2 * (LOSS_OF_LOGITS * TOKENS * vocab + HIDDEN_GRADIENT_COPY * TOKENS * hidden)
        expected += vocab * hidden * weight_sum_bytes(chunks, element_bytes=2)
        assert counter.moved == pytest.approx(expected)


class TestWhereTheyRun:
    def test_the_defaults_of_the_architecture_decide(self):
        own = FusedKernels(norm=1, activation=1, rotary=1, loss=1)
        for cluster in ("h100-8x1", "b200-8x1", "mi300x-8x1", "mi355x-8x1"):
            assert rates_on(cluster).device.fused == own

    def test_elsewhere_passes_are_calibrated(self):
        assert rates_on("a100-8x1").device.fused == FusedKernels()
        assert rates_on("cpu-1x1").device.fused == FusedKernels()
        assert rates_on("h100-8x1", framework="torchtitan").device.fused == FusedKernels()

    def test_routes_of_the_run_decide_before_defaults(self):
        found = rates_on("h100-8x1", rms_norm="reference", linear_cross_entropy="reference").device.fused
        assert found == FusedKernels(activation=1, rotary=1)


def case_of(*, framework: str = "native", seq_len: int = 8192, precision: str = "bf16", **routes: str) -> Case:
    return Case(
        model=model_row(catalog.model("llama3.1-8b")),
        batch=BatchTable(seq_len=seq_len, global_batch=64),
        plan=plan_row(Plan(data_shard=8)),
        precision=precision_row(PRECISIONS[precision]),
        rates=rates_on("h200-8x1", framework=framework, precision=precision, **routes),
    )


def test_passes_over_the_residual_stream():
    """By hand: norm 2, addition with norm 4, addition 3; backward 3, 4, and 3 for the layer's input."""
    assert stream_accesses(model_row(catalog.model("llama3.1-8b"))) == (9, 10)


def test_each_chunk_of_the_loss_moves_the_weight_gradient_again():
    """10 bytes a value of W and chunk, besides the 2 that its GEMM writes; 10 more once."""
    one = case_of(seq_len=16384)
    rows = chunk_rows(16384, vocab=128256)
    num_bytes = 128256 * 4096 * (10 * num_chunks(16384, rows=rows) + 10)
    streaming = one.rates.device.streaming_bytes_per_s
    assert one.layer().head.weight_s > num_bytes / streaming
    both = [case_of(seq_len=n).layer().head for n in (8192, 16384)]
    assert 2 * both[0].weight_s < both[1].weight_s - 0.9 * num_bytes / streaming  # 8,192 tokens are one chunk


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_kernels_move_less_than_calibrated_ones(precision):
    plain = dict.fromkeys(("rms_norm", "swiglu", "rotary"), "reference")
    own, other = case_of(precision=precision).layer(), case_of(precision=precision, **plain).layer()
    # In fp8 the fused activation writes its cast, which a GEMM of the feed-forward block makes otherwise.
    assert own.elementwise.total_s + own.dense_ffn.total_s < other.elementwise.total_s + other.dense_ffn.total_s
    assert own.dense_ffn.total_s <= other.dense_ffn.total_s
    if precision == "bf16":
        assert own.elementwise.total_s < other.elementwise.total_s


def test_the_head_of_a_frozen_model_has_no_sum():
    one = case_of()
    frozen = replace(one, model=replace(one.model, lora_rank=16))
    assert frozen.layer().head.weight_s == 0
