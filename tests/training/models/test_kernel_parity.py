"""Models train with Triton kernels, in the interpreter, as they do with the reference of each operation."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from tests.kernel_cases import needs_interpreter
from tests.tiny_models import DENSE, LATENT, MIXTURE

from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.specs.model import Activation
from meshwright.training.models import TransformerOptions, build_model, init_weights

OPERATIONS = ("linear_cross_entropy", "swiglu", "rms_norm", "rotary")
TRITON = dict.fromkeys(OPERATIONS, "triton")
REFERENCE = dict.fromkeys(OPERATIONS, "reference")
GPT_OSS = replace(
    MIXTURE, activation=Activation.CLAMPED_SWIGLU, attention=replace(DENSE.attention, sinks=True, bias=True)
)
GEMMA = replace(DENSE, activation=Activation.GELU_TANH, zero_centered_norms=True, logit_cap=5.0)
MODELS = {"dense": DENSE, "mixture": MIXTURE, "latent": LATENT, "gpt-oss": GPT_OSS, "gemma": GEMMA}


def losses(model, routes, *, num_steps=2):
    """Losses of a few steps of AdamW, and the routes that they took."""
    torch.manual_seed(0)
    built = build_model(model, device="cpu", options=TransformerOptions(z_loss=1e-3))
    init_weights(built, seed=1)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    tokens = torch.randint(model.vocab, (2, 9), generator=torch.Generator().manual_seed(3))
    found = []
    with using(KernelRouting(demanded=routes)) as routing:
        for _ in range(num_steps):
            loss = built(tokens[:, :-1], labels_BT=tokens[:, 1:]) / 16
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    return found, list(routing.choices.values())


@needs_interpreter
@pytest.mark.parametrize(
    "name", ["gpt-oss", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dense", "latent", "gemma", "mixture"))]
)  # the slow ones have the same operations with other activations, norms and orders of pairs
def test_losses_of_a_few_steps_are_those_of_the_reference(name):
    expected, _ = losses(MODELS[name], REFERENCE)
    got, choices = losses(MODELS[name], TRITON)
    assert {(op, "triton") for op in OPERATIONS} <= {(choice.call.op, choice.route) for choice in choices}
    norms = [choice.call for choice in choices if choice.call.op == "rms_norm"]
    assert any(len(call.shapes) == 3 for call in norms), "no norm has the addition before it"
    assert expected[-1] < expected[0]
    assert got == pytest.approx(expected, abs=2e-5)
