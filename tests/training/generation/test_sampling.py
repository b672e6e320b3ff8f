"""The next token from logits: the filters of transformers, and random streams that do not depend on the batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from meshwright.specs.generation import Sampling
from meshwright.training.generation import Sampler
from meshwright.training.generation.sampling import filtered, penalize

VOCAB = 50


def logits(rows=6, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(sampling, *, rows=1, tokens=None, numbers=None):
    return Sampler(sampling, tokens=tokens or [[0]] * rows, numbers=numbers or list(range(rows)), vocab=VOCAB)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.5, "min_p": 0.1},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 10 * VOCAB},
    ],
    ids=str,
)
def test_filters_equal_those_of_transformers(settings):
    process = pytest.importorskip("transformers").generation.logits_process
    theirs = logits()
    warpers = {
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
    }
    for name, warper in warpers.items():
        if name in settings:
            theirs = warper(settings[name])(None, theirs)
    torch.testing.assert_close(filtered(logits(), Sampling(**settings)), theirs)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_equals_that_of_transformers(penalty):
    process = pytest.importorskip("transformers").generation.logits_process
    seen = torch.randint(VOCAB, (6, 9), generator=torch.Generator().manual_seed(1))
    theirs = process.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits())
    seen_BV = torch.zeros(6, VOCAB, dtype=torch.bool).scatter_(1, seen, True)
    torch.testing.assert_close(penalize(logits(), seen_BV, penalty=penalty), theirs)


def test_the_penalty_counts_the_prompt_and_what_was_generated():
    flat = torch.zeros(1, VOCAB)
    flat[0, 3], flat[0, 4], flat[0, 5] = 3.0, 2.9, 2.8
    chooser = sampler(Sampling(repetition_penalty=2.0), tokens=[[3]])
    assert [chooser.choose(flat.clone())[0] for _ in range(3)] == [4, 5, 3]


def test_without_a_temperature_the_largest_logit_is_chosen():
    assert sampler(Sampling(), rows=6).choose(logits()) == logits().argmax(dim=1).tolist()


def test_tokens_are_drawn_by_their_probability():
    settings = Sampling(temperature=1.0, top_k=3)
    row = torch.full((1, VOCAB), -20.0)
    row[0, [7, 8, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    chooser, counts = sampler(settings), torch.zeros(VOCAB)
    for _ in range(4000):
        counts[chooser.choose(row.clone())[0]] += 1
    assert counts.sum() == counts[[7, 8, 9]].sum()
    torch.testing.assert_close(counts[[7, 8, 9]] / 4000, torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0)


def test_a_sequence_draws_the_same_tokens_in_any_batch():
    settings = Sampling(temperature=2.0, seed=5)
    together, single = sampler(settings, rows=6), sampler(settings, numbers=[4])
    drawn = [together.choose(logits(seed=i))[4] for i in range(5)]
    assert [single.choose(logits(seed=i)[4:5])[0] for i in range(5)] == drawn
    together.keep([5, 4])
    assert together.choose(logits(seed=9)[[5, 4]])[1] == single.choose(logits(seed=9)[4:5])[0]
    other = sampler(Sampling(temperature=2.0, seed=6), numbers=[4])
    assert [other.choose(logits(seed=i)[4:5])[0] for i in range(5)] != drawn
