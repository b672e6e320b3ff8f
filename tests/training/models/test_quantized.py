"""Frozen matrices in 8 and 4 bits: how far they are off, and that gradients pass through."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import pytest

torch = pytest.importorskip("torch")


from tests.rounding import assert_equals
from tests.tiny_models import DENSE

from meshwright.specs.model import NF4_BLOCK, BaseFormat, Lora
from meshwright.training.models import add_adapters, build_model, init_adapters, init_weights, materialize, quantized
from meshwright.training.models.lora import quantized_weights
from meshwright.training.models.quantized import NORMAL_FLOAT, QuantizedWeight
from meshwright.training.weights import adapters_of, load_weights, save_weights

ROUNDED = [BaseFormat.INT8, BaseFormat.NF4, BaseFormat.NF4_DOUBLE]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def rounded(matrix: torch.Tensor, kind: BaseFormat) -> torch.Tensor:
    held = QuantizedWeight(*matrix.shape, kind=kind)
    held.take(matrix)
    return held.whole(torch.float32)


def test_8_bits_are_off_by_half_a_unit_of_their_row():
    matrix = weight(24, 40) * torch.logspace(-3, 3, 24).unsqueeze(1)
    unit = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded(matrix, BaseFormat.INT8) - matrix).abs() <= 0.5001 * unit).all()


def test_4_bits_are_off_by_half_a_gap_of_their_block():
    matrix = weight(24, 40)  # 15 blocks
    found = rounded(matrix, BaseFormat.NF4)
    largest = matrix.view(-1, NF4_BLOCK).abs().amax(dim=1, keepdim=True)
    widest = max(b - a for a, b in itertools.pairwise(NORMAL_FLOAT))
    assert ((found - matrix).view(-1, NF4_BLOCK).abs() <= 0.5001 * widest * largest).all()
    assert 0.05 < (found - matrix).norm() / matrix.norm() < 0.12


def quantile_table() -> list[float]:
    """The 16 values of the 4-bit normal float, as appendix E of the QLoRA paper derives them.

    Eight quantiles of the normal distribution above zero, seven below, zero, divided by the largest.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    inverse = NormalDist().inv_cdf
    above, below = ([inverse(outermost + (0.5 - outermost) * i / steps) for i in range(steps)] for steps in (8, 7))
    values = sorted([*above, 0.0, *(-value for value in below)])
    return [value / values[-1] for value in values]


def dequantised_by_hand(matrix: torch.Tensor, *, is_double: bool) -> torch.Tensor:
    """A matrix in 4 bits as sections 2 and 3 of the QLoRA paper have it, value by value."""
    values, flat = quantile_table(), matrix.flatten().tolist()
    blocks = [flat[i : i + 64] for i in range(0, len(flat), 64)]
    scales = kept = [max(map(abs, block)) for block in blocks]
    if is_double:
        mean = sum(scales) / len(scales)
        kept = []
        for i in range(0, len(scales), 256):
            centred = [scale - mean for scale in scales[i : i + 256]]
            unit = max(map(abs, centred)) / 127
            kept += [mean + unit * round(scale / unit) for scale in centred]
    found = []
    for block, scale, own in zip(blocks, scales, kept, strict=True):
        found += [own * min(values, key=lambda value, x=x, s=scale: abs(value - x / s)) for x in block]
    return torch.tensor(found).view(matrix.shape)


def test_the_values_of_4_bits_are_quantiles_of_the_normal_distribution():
    assert pytest.approx(quantile_table(), abs=2e-7) == NORMAL_FLOAT


@pytest.mark.parametrize("kind", [BaseFormat.NF4, BaseFormat.NF4_DOUBLE])
def test_4_bits_are_those_of_the_paper(kind, monkeypatch):
    matrix = weight(160, 120) * torch.logspace(-1, 1, 160).unsqueeze(1)  # 300 blocks: two scales of scales
    expected = dequantised_by_hand(matrix, is_double=kind is BaseFormat.NF4_DOUBLE)
    torch.testing.assert_close(rounded(matrix, kind), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(quantized, "LOOKED_UP_AT_ONCE", 7 * NF4_BLOCK)  # in parts, and in 16 bits
    held = QuantizedWeight(*matrix.shape, kind=kind)
    held.take(matrix)
    assert torch.equal(held.whole(torch.bfloat16), held.whole(torch.float32).bfloat16())
    torch.testing.assert_close(held.whole(torch.float32), expected, rtol=1e-5, atol=1e-6)


def test_8_bits_are_those_of_the_paper():
    matrix = weight(24, 40)
    rows = [(row, max(map(abs, row)) / 127) for row in matrix.tolist()]
    expected = torch.tensor([[round(x / unit) * unit for x in row] for row, unit in rows])
    torch.testing.assert_close(rounded(matrix, BaseFormat.INT8), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_matrix_takes_the_bytes_that_the_planner_counts(kind):
    shape = 512, 2048
    held = QuantizedWeight(*shape, kind=kind)
    rate = {BaseFormat.INT8: 1 + 4 / 2048, BaseFormat.NF4: 0.5 + 4 / 64, BaseFormat.NF4_DOUBLE: 0.5 + (1 + 1 / 64) / 64}
    counted = sum(buffer.nbytes for buffer in held.buffers())
    assert counted == pytest.approx(rate[kind] * 512 * 2048, abs=4)  # the mean of all scales


def test_4_bits_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes.functional")
    matrix = weight(48, 64)
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(matrix, blocksize=NF4_BLOCK, quant_type="nf4"))
    torch.testing.assert_close(rounded(matrix, BaseFormat.NF4), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7, 64), (16, 48)])
def test_any_shape_can_be_held_and_zero_stays_zero(kind, shape):
    assert rounded(torch.zeros(shape), kind).eq(0).all()
    assert rounded(weight(*shape), kind).shape == shape
    assert rounded(torch.ones(shape), kind).sub(1).abs().max() < 1e-6


def adapted_model(folder, kind: BaseFormat):
    lora = Lora(rank=4, targets=("query", "output", "down"), base_format=kind)
    built = build_model(DENSE)
    add_adapters(built, lora)
    materialize(built, device="cpu")
    init_adapters(built, seed=0)
    load_weights(built, folder)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapters_of(built).items():
        if "lora_b" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return built


@pytest.mark.parametrize("kind", ROUNDED)
def test_gradients_are_those_of_the_rounded_matrices(tmp_path, kind):
    plain = build_model(DENSE, device="cpu")
    init_weights(plain, seed=0, std=0.2)
    save_weights(plain, tmp_path / "base", dtype=torch.float32)
    held = adapted_model(tmp_path / "base", kind)
    whole = adapted_model(tmp_path / "base", BaseFormat.FULL)
    rounded_by_name = {name: q.whole(torch.float32) for name, q in quantized_weights(held)}
    assert len(rounded_by_name) == 2 * 7  # every matrix of the layers, adapted or not
    for name, matrix in rounded_by_name.items():
        whole.get_parameter(name).data.copy_(matrix)
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))

    def trained(built):
        built.zero_grad()
        built(tokens, labels_BT=tokens).backward()
        return {name: parameter.grad for name, parameter in adapters_of(built).items()}

    gradients = trained(held)
    assert all(gradient.any() for gradient in gradients.values())
    assert_equals(lambda: trained(whole), gradients, weights=whole.parameters(), terms=DENSE.vocab)
