"""Label smoothing and noise on embeddings equal those of Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.rounding import assert_equals
from tests.tiny_models import DENSE
from torch.nn import functional

from meshwright.training.models import TransformerOptions, build_model, init_weights

TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))


def built(model=DENSE, **options):
    module = build_model(model, device="cpu", options=TransformerOptions(**options))
    init_weights(module, seed=0, std=0.2)
    return module.train()


def labels():
    found = TOKENS.roll(-1, dims=1)
    found[:, -1] = -100
    return found


@pytest.mark.parametrize("model", [DENSE, replace(DENSE, tied_embeddings=True)], ids=["untied", "tied"])
def test_gradients_are_those_of_the_label_smoother_of_transformers(model):
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.2)
    plain, smoothed = built(model), built(model, label_smoothing=0.2)
    logits = plain(TOKENS)
    smoother({"logits": logits}, labels()).mul((labels() >= 0).sum()).backward()

    def ours():
        smoothed.zero_grad()
        shown = smoothed(TOKENS, labels_BT=labels())
        shown.backward()
        plainly = functional.cross_entropy(logits.mT, labels(), reduction="sum").item()
        assert shown.item() == pytest.approx(plainly, rel=1e-5)
        return {name: p.grad for name, p in smoothed.named_parameters()}

    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_equals(ours, expected, weights=smoothed.parameters(), terms=61)


def test_weights_of_tokens_weigh_the_smoothing():
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(1))
    module, plain = built(label_smoothing=0.3), built()
    log_p = plain(TOKENS).log_softmax(-1)
    losses = -0.7 * log_p.gather(2, labels().clamp(min=0)[..., None])[..., 0] - 0.3 * log_p.mean(-1)
    (losses * weights * (labels() >= 0)).sum().backward()
    module(TOKENS, labels_BT=labels(), weights_BT=weights).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_the_noise_is_that_of_transformers():
    hook = pytest.importorskip("transformers.integrations.neftune").neftune_post_forward_hook
    module = built(embedding_noise=5.0 / (12 * 32) ** 0.5)
    theirs = torch.nn.Embedding.from_pretrained(module.embedding.weight.detach()).train()
    theirs.neftune_noise_alpha = 5.0
    theirs.register_forward_hook(hook)
    torch.manual_seed(0)
    expected = theirs(TOKENS)
    torch.manual_seed(0)
    assert torch.equal(module._embedded(TOKENS, module.embedding), expected)
    module.eval()
    assert torch.equal(module._embedded(TOKENS, module.embedding), theirs.weight[TOKENS])
