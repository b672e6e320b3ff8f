"""KTO: the loss of the paper and of TRL on whole logits, under every plan, resumed, and its data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.answer_runs import LORA, run_on, sums
from tests.tiny_runs import tiny_run
from torch import Tensor
from torch.nn.functional import log_softmax

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.reference import score_references
from meshwright.errors import InputError
from meshwright.specs.plan import Plan
from meshwright.training.models import rewards_from

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.2, 0.7
KTO = f"{{loss: kto, beta: {BETA}, desirable_weight: {DESIRABLE}, undesirable_weight: {UNDESIRABLE}}}"
NUM, LENGTH = 8, 40
ALONE = MeshCoordinates(plan=Plan(micro_batch=NUM), device=torch.device("cpu"))
RECORDS = [
    {"prompt": asked, "completion": wrong if number % 3 == 1 else right, "label": number % 3 != 1}
    for number, (asked, right, wrong) in enumerate(sums(NUM))
]
"""Sums with answers that are right or wrong; some are longer than half of a sample."""


def run_of(data, *overrides: str):
    return run_on(data, f"train.preference={KTO}", *overrides, length=LENGTH, micro=NUM)


def log_p_of(module, prompt: str, answer: str) -> Tensor:
    """Log-probability of an answer by whole logits."""
    asked = prompt.encode()
    tokens = torch.tensor([[*asked, *answer.encode(), 256]])[:, : LENGTH // 2]  # 256 is the end of a document
    log_p = log_softmax(module(tokens)[0, :-1].float(), -1).gather(1, tokens[0, 1:, None])[:, 0]
    return log_p[len(asked) - 1 :].sum()


def scores_of(module) -> tuple[Tensor, Tensor]:
    """Of the own answers, and of the answers of the records before behind the same prompts."""
    rows = RECORDS
    own = [log_p_of(module, row["prompt"], row["completion"]) for row in rows]
    other = [log_p_of(module, row["prompt"], rows[i - 1]["completion"]) for i, row in enumerate(rows)]
    return torch.stack(own), torch.stack(other)


@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
def test_loss_gradients_and_rewards_are_those_of_the_paper(data, kind):
    run = run_of(data, *kind)
    parts, loader = assemble(run, coordinates=ALONE), open_batch_loader(run, coordinates=ALONE)
    (module,) = parts.modules
    if loader.needs_reference:
        score_references(loader, parts.stepper, num_steps=1)
    with torch.no_grad():
        reference, of_others = scores_of(module)  # adapters begin at zero
        generator = torch.Generator().manual_seed(0)
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter += 0.08 * torch.randn(parameter.shape, generator=generator)
    own, others = scores_of(module)
    is_right = torch.tensor([row["label"] for row in RECORDS])
    drift = (others - of_others).mean().clamp(min=0).detach()
    ratios = own - reference
    good = DESIRABLE * (1 - (BETA * (ratios - drift)).sigmoid())[is_right]
    bad = UNDESIRABLE * (1 - (BETA * (drift - ratios)).sigmoid())[~is_right]
    expected = torch.cat([good, bad]).mean()
    gradients = torch.autograd.grad(expected, trained)

    batch = loader.batch(0)  # every record, in any order
    assert batch.counts.num_labels == NUM
    loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    rewards = BETA * ratios.detach()
    found = rewards_from(parts.collect_reward_sums())
    chosen, rejected = rewards[is_right].mean().item(), rewards[~is_right].mean().item()
    right = ((rewards > BETA * drift) == is_right).float().mean().item()
    assert found == pytest.approx(
        {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": right}, rel=1e-4
    )


PARALLEL = ["{data_shard: 2, sharding: parameters}", "{tensor: 2}"]


@pytest.mark.parametrize("kind", [{}, {"task": "lora", "lora": "{rank: 2}"}], ids=["all weights", "adapters"])
def test_a_training_is_the_same_under_plans_and_resumed(data, tmp_path, tiny_run, kind):
    def training(name: str, num_steps: int = 4, *, micro: int = 8, parallel: str = "{data_shard: 1}"):
        (tmp_path / name).mkdir(exist_ok=True)
        train = f"{{steps: {num_steps}, preference: {KTO}, evaluate: {{every_steps: 2}}, "
        return tiny_run(
            tmp_path / name, data=f"{{source: {data}, validation: {data}, tokenizer: bytes, sequence_length: 40}}",
            model="{hidden: 32, num_layers: 1, vocab: 260, ffn_hidden: 64, attention: {num_heads: 4}}",
            batch=f"{{global_sequences: 8, micro: {micro}}}",
            train=train + "checkpoint: {folder: saved, every_steps: 1}}",
            optimizer="{learning_rate: 1.0e-2, schedule: constant}", precision="fp32", parallel=parallel, **kind,
        )  # fmt: skip

    names = ("loss", "gradient_norm", "rewards", "validation_loss")
    whole = training("whole")
    whole.train()
    expected = [[step.get(name) for name in names] for step in whole.steps()]
    assert expected[0][0] == pytest.approx(0.5 * (6 * DESIRABLE + 2 * UNDESIRABLE) / 8, rel=0.1)
    assert expected[-1][-1] < expected[1][-1]
    training("parted", 2).train()
    training("parted").train("--resume")
    assert [[step.get(name) for name in names] for step in training("parted").steps()] == expected
    for parallel in PARALLEL:
        divided = training(parallel[1:5], micro=4 if "data" in parallel else 8, parallel=parallel)
        divided.train()
        assert divided.losses() == pytest.approx(whole.losses(), rel=1e-5)


def test_other_data_weights_and_smoothing_are_refused(data, tmp_path):
    text = tmp_path / "answers.jsonl"
    text.write_text('{"prompt": "a", "completion": "b"}\n' * 9, encoding="utf-8")
    with pytest.raises(InputError, match="kto needs judged answers"):
        open_batch_loader(run_of(text), coordinates=ALONE)
    for preference, message in (("dpo", "dpo needs pairs of answers"), ("null", "does not tell apart")):
        with pytest.raises(InputError, match=message):
            open_batch_loader(run_of(data, f"train.preference={preference}"), coordinates=ALONE)
    for settings, key in (
        ("dpo, desirable_weight: 2", "desirable_weight"),
        ("kto, label_smoothing: 0.1", "label_smoothing"),
    ):
        problems = check(tiny_run(f"train.preference={{loss: {settings}}}"))
        assert [problem.key for problem in problems] == [f"train.preference.{key}"]
