"""Frozen matrices in 8 and 4 bits: how far they are off, and that gradients pass through."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")


from tests.rounding import assert_equals
from tests.tiny_models import DENSE

from meshwright.specs.model import BaseFormat, Lora
from meshwright.training.models import add_adapters, build_model, init_adapters, init_weights, materialize
from meshwright.training.models.lora import quantized_weights
from meshwright.training.models.quantized import BLOCK, NORMAL_FLOAT, QuantizedWeight
from meshwright.training.weights import adapters_of, load_weights, save_weights

ROUNDED = [BaseFormat.INT8, BaseFormat.NF4]


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
    largest = matrix.view(-1, BLOCK).abs().amax(dim=1, keepdim=True)
    widest = max(b - a for a, b in itertools.pairwise(NORMAL_FLOAT))
    assert ((found - matrix).view(-1, BLOCK).abs() <= 0.5001 * widest * largest).all()
    assert 0.05 < (found - matrix).norm() / matrix.norm() < 0.12


def test_4_bits_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes.functional")
    matrix = weight(48, 64)
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(matrix, blocksize=BLOCK, quant_type="nf4"))
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
