"""Label smoothing, noise on embeddings and dropout equal those of Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.rounding import assert_equals
from tests.tiny_models import DENSE
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.training.models import TransformerOptions, build_model, init_weights
from meshwright.training.models.transformer import ResidualDropout
from meshwright.training.weights import save_weights

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


# --- dropout ---


def gradients_of(module, **routes):
    """The loss and the gradients under one seed."""
    torch.manual_seed(4)
    with using(KernelRouting(demanded=routes)):
        loss = module(TOKENS, labels_BT=labels())
        loss.backward()
    return loss, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("route", ["reference", "sdpa"])
def test_attention_drops_the_probabilities_that_transformers_drops(route, tmp_path):
    transformers = pytest.importorskip("transformers")
    module = built(attention_dropout=0.4)
    save_weights(module, tmp_path / "tiny", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tiny", attn_implementation="eager", attention_dropout=0.4, dtype=torch.float32
    ).train()
    torch.manual_seed(4)
    logits = theirs(TOKENS).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels().flatten(), reduction="sum")
    loss, _ = gradients_of(module, attention=route)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradients_of(built(), attention=route)[0].item() != pytest.approx(expected.item(), rel=1e-3)


def test_residual_dropout_is_of_both_branches():
    module = built(residual_dropout=0.3)
    loss, found = gradients_of(module)
    by_hand = built()
    torch.manual_seed(4)
    x = by_hand.embedding(TOKENS)
    layout = by_hand.layout(torch.arange(12).expand(2, -1), None)
    for layer in by_hand.layers.values():
        x = x + functional.dropout(layer.attention(layer.attention_norm(x), layout.full), 0.3)
        x = x + functional.dropout(layer.ffn(layer.ffn_norm.normed(x)), 0.3)
    expected = functional.cross_entropy(by_hand.head(by_hand.norm(x)).mT, labels(), reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_without_a_rate_and_outside_of_training_nothing_is_dropped():
    plain, dropping = built(), built(residual_dropout=0.3, attention_dropout=0.3)
    expected = gradients_of(plain)[0]
    assert not torch.equal(gradients_of(dropping)[0], expected)
    assert torch.equal(gradients_of(dropping.eval())[0], expected)
    assert torch.equal(gradients_of(built(residual_dropout=0.0, attention_dropout=0.0))[0], expected)


def test_tensor_ranks_drop_parts_of_one_draw():
    dropout = ResidualDropout(0.25)
    x = torch.ones(2, 8, 64)
    torch.manual_seed(0)
    whole = dropout(x)
    assert whole.eq(0).float().mean().item() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / x.numel()) ** 0.5)
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    parts = []
    for rank in range(2):
        dropout.width, dropout.own_tokens = 2, lambda kept, rank=rank: kept.chunk(2, dim=1)[rank]
        torch.manual_seed(0)
        parts.append(dropout(x.chunk(2, dim=1)[rank]))
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("route", ["blockwise", "flex", "triton", "cudnn"])
def test_kernels_without_dropout_are_refused(route):
    with pytest.raises(InputError, match=f"route {route} cannot serve"):
        gradients_of(built(attention_dropout=0.1), attention=route)
