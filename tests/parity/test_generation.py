"""Greedy texts equal those of transformers, and logits with cached keys and values those without, for every family."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.parity.test_huggingface import CASES, TERMS, TINY, reference_model
from tests.rounding import assert_equals

from meshwright.catalog.huggingface import model_from_path
from meshwright.specs.generation import GenerationEnding, Sampling
from meshwright.specs.model import RopeScaling
from meshwright.training.generation import CachedModel, Prompt, cache, complete, complete_batch
from meshwright.training.models import build_model
from meshwright.training.weights import load_weights

torch.set_num_threads(1)

LENGTHS = (11, 1, 30, 4)
NEW = 14


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(TINY["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


def greedy(model, rows, *, batch=4) -> list[list[int]]:
    with CachedModel(model) as cached:
        given = [Prompt(number=i, tokens=row, max_tokens=NEW) for i, row in enumerate(rows)]
        done = complete(cached, given, batch=batch, sampling=Sampling(), tokenizer=None)
    assert all(c.ending is GenerationEnding.MAX_TOKENS for c in done)
    return [list(c.tokens) for c in done]


ALWAYS = ("llama2", "deepseek-v3")
"""Windows, sinks, latent attention and experts: other families join the same parts."""


@pytest.mark.parametrize("case", [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.when_touched) for c in CASES])
def test_greedy_tokens_and_cached_logits_equal_transformers(case, tmp_path, monkeypatch):
    reference = reference_model(case)
    reference.save_pretrained(tmp_path)
    model = build_model(model_from_path(tmp_path), device="cpu")
    load_weights(model, tmp_path)
    model.eval()
    rows, expected = prompts(), []
    for row in rows:
        out = reference.generate(
            torch.tensor([row]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, len(row) :].tolist())
    assert greedy(model, rows) == expected
    assert greedy(model, rows, batch=1) == expected

    if model.model.rope.scaling is RopeScaling.LONGROPE:
        return  # logits of a text change with its length, so that those of one forward pass are no reference
    monkeypatch.setattr(cache, "PREFILL_TOKENS", 2 * 7)  # a prompt goes through the model in parts
    whole = torch.tensor([rows[2] + expected[2], rows[0] + expected[0] + [5] * (LENGTHS[2] - LENGTHS[0])])
    with CachedModel(model) as cached, torch.no_grad():
        got = [cached.start(whole[:, :20].tolist())]
        got += [cached.append(whole[:, i].tolist()) for i in range(20, whole.shape[1])]

    def uncached():
        out_BTV = model(whole)
        return {"cached": out_BTV[:, 19:], "transformers": out_BTV}

    expected = {"cached": torch.stack(got, dim=1), "transformers": reference(whole).logits}
    assert_equals(uncached, expected, weights=model.parameters(), terms=TERMS)


@pytest.mark.parametrize("case", ["mistral", "llama2", "deepseek-v3"])
def test_a_second_turn_computes_only_what_is_new(case, tmp_path):
    reference = reference_model(case)
    reference.save_pretrained(tmp_path)
    model = build_model(model_from_path(tmp_path), device="cpu")
    load_weights(model, tmp_path)
    first, second = prompts()[2][:8], [*prompts()[2][:6], 9, 9, 9]
    fed = []
    with CachedModel(model) as cached:
        hidden_states = model.hidden_states
        model.hidden_states = lambda tokens, *rest: fed.append(tokens.shape[1]) or hidden_states(tokens, *rest)
        once = {"sampling": Sampling(), "tokenizer": None}
        complete_batch(cached, [Prompt(number=0, tokens=first, max_tokens=2)], **once)
        (again,) = complete_batch(cached, [Prompt(number=0, tokens=second, max_tokens=NEW)], **once)
    assert fed[0] == 8
    assert fed[2] == (9 if case == "mistral" else 3)  # its window of 5 has forgotten the place where they part
    del model.hidden_states
    assert list(again.tokens) == greedy(model, [second])[0]
