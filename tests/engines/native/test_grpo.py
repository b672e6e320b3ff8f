"""Completions of the model: the loss by the papers' formulas, under every plan, resumed, and its data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.answer_runs import LORA, lines_of, run_on, sums
from tests.tiny_runs import EXPERTS, tiny_run
from torch import Tensor
from torch.nn.functional import log_softmax

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.rollouts import Rollouts
from meshwright.errors import InputError
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.training.models.reinforcement import means_from

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

ALONE = MeshCoordinates(plan=Plan(micro_batch=2), device=torch.device("cpu"))
LENGTH, GROUP, NUM, LONGEST = 24, 4, 8, 6
DIGITS = '{verifier: regex, pattern: "[0-9]"}'
END = 256  # of a text, byte by byte


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(lines_of({"prompt": p, "answer": a} for p, a, _ in sums(16)), encoding="utf-8")
    return path


def grpo(**changes: object) -> str:
    """The setting with these keys; completions of random weights have the wanted bytes now and then."""
    rewards = f"[{DIGITS}, {{verifier: length, most_tokens: 5, weight: 0.5}}]"
    keys = {"group": GROUP, "completion_tokens": LONGEST, "rewards": rewards} | changes
    return "train.grpo={" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"


def opened(run, where=ALONE):
    parts, loader = assemble(run, coordinates=where), open_batch_loader(run, coordinates=where)
    return parts, Rollouts(run, assembly=parts, loader=loader, coordinates=where)


def rows_of(tensors: dict[str, Tensor]) -> list[tuple[list[int], int]]:
    """Tokens of each row, and how many of them are its prompt's."""
    found = []
    for tokens, labels in zip(tensors["tokens_BT"].tolist(), tensors["labels_BT"].tolist(), strict=True):
        places = [place for place, label in enumerate(labels) if label != -100]
        found.append(([*tokens[: places[0] + 1], *(labels[p] for p in places)], places[0] + 1))
    return found


def log_p_of(module, rows, temperature: float) -> list[Tensor]:
    """Log-probabilities of the tokens of completions by whole logits, one sequence after the other."""
    found = []
    for tokens, start in rows:
        logits = module(torch.tensor([tokens]))[0, start - 1 : -1].float() / temperature
        found.append(log_softmax(logits, -1).gather(1, torch.tensor(tokens[start:])[:, None])[:, 0])
    return found


def advantages_by_hand(rows, scale: str) -> list[float]:
    rewards = []
    for tokens, start in rows:
        said = tokens[start:]
        rewards.append(float(any(48 <= token <= 57 for token in said)) + 0.5 * (len(said) <= 5))
    found = []
    for first in range(0, len(rewards), GROUP):
        group = torch.tensor(rewards[first : first + GROUP], dtype=torch.float64)
        spread = {"group": group.std(), "batch": torch.tensor(rewards, dtype=torch.float64).std()}
        found += ((group - group.mean()) / (spread[scale] + 1e-4 if scale in spread else 1)).tolist()
    return found


CASES = {
    "dapo": {},
    "grpo, scaled by the batch": {"loss": "grpo", "scale": "batch", "epsilon_high": 0.02, "iterations": 2},
    "dr_grpo, hot": {"loss": "dr_grpo", "scale": "none", "temperature": 1.3, "iterations": 2, "epsilon": 0.01},
}


def expected_loss(case, log_p, old, reference, advantages, beta: float) -> Tensor:
    """Equation 3 of Shao et al. 2024, with the means of each form."""
    low, high = 1 - case.get("epsilon", 0.2), 1 + case.get("epsilon_high", case.get("epsilon", 0.2))
    losses = []
    for new, before, base, advantage in zip(log_p, old, reference, advantages, strict=True):
        ratio = (new - before).exp()
        gain = torch.stack([ratio * advantage, ratio.clamp(low, high) * advantage]).min(0).values
        losses.append(-gain + beta * ((base - new).exp() - (base - new) - 1))
    form = case.get("loss", "dapo")
    if form == "grpo":
        return torch.stack([of.mean() for of in losses]).mean()
    if form == "dr_grpo":
        return torch.cat(losses).sum() / (len(losses) * LONGEST)
    return torch.cat(losses).mean()


@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_papers(data, name, kind):
    case, beta = CASES[name], 0.3 if kind else 0.0
    run = run_on(data, grpo(**case, beta=beta), *kind, length=LENGTH, micro=2)
    parts, rollouts = opened(run)
    (module,) = parts.modules
    trained = [p for p in module.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)

    def move(by: float) -> None:
        with torch.no_grad():
            for parameter in trained:
                parameter += by * torch.randn(parameter.shape, generator=generator)

    temperature = case.get("temperature", 1.0)
    first = rollouts.batch(0)
    rows = rows_of(first.tensors)
    with torch.no_grad():
        old = reference = log_p_of(module, rows, temperature)  # adapters begin at zero
    if case.get("iterations", 1) > 1:
        move(0.03)
    batch = rollouts.batch(1) if case.get("iterations", 1) > 1 else first
    assert rows_of(batch.tensors) == rows
    assert batch.counts.num_labels == sum(len(tokens) - start for tokens, start in rows)
    advantages = advantages_by_hand(rows, case.get("scale", "group"))
    assert any(advantages)
    log_p = log_p_of(module, rows, temperature)
    expected = expected_loss(case, log_p, old, reference, advantages, beta)
    gradients = torch.autograd.grad(expected, trained)
    loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    found = means_from(parts.collect_reward_sums(), has_reference=beta > 0)
    assert found["entropy"] == pytest.approx(-torch.cat(log_p).mean().item(), rel=1e-4)
    assert ("divergence" in found) == (beta > 0)
    assert (found["clipped"] > 0) == (case.get("iterations", 1) > 1)


PLANS = [
    Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2),
    Plan(tensor=2, micro_batch=2),
]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
def test_a_plan_equals_one_process(equals_one_process, kind):
    settings = f"{{rewards: [exact], group: 2, completion_tokens: 4, beta: {0.1 if kind else 0}}}"
    run = tiny_run(f"train.grpo={settings}", "batch={global_sequences: 8, micro: 2}", *kind)
    equals_one_process([(run, plan) for plan in PLANS])


@pytest.fixture
def toy(tiny_run):
    def make(folder, train: str, **sections: str):
        folder.mkdir(exist_ok=True)
        rows = lines_of({"prompt": p, "answer": a} for p, a, _ in sums(16))
        (folder / "sums.jsonl").write_text(rows, encoding="utf-8")
        return tiny_run(
            folder, **{
                "data": "{source: sums.jsonl, tokenizer: bytes, sequence_length: 24}", "train": train,
                "model": "{hidden: 32, num_layers: 1, vocab: 260, ffn_hidden: 64, attention: {num_heads: 4}}",
                "batch": "{global_sequences: 8, micro: 4}",
                "optimizer": "{learning_rate: 1.0e-2, schedule: constant}",
            } | sections,
        )  # fmt: skip

    return make


def test_a_resumed_training_writes_the_same_completions(toy, tmp_path):
    settings = grpo(completion_tokens=6, iterations=2).replace("train.grpo=", "grpo: ")
    settings += ", evaluate: {every_steps: 2}"
    six, two = (f"{{steps: {n}, {settings}, checkpoint: {{folder: saved, every_steps: 2}}}}" for n in (6, 2))
    whole, parted = (toy(tmp_path / name, six) for name in ("whole", "parted"))
    whole.train()
    toy(tmp_path / "parted", two).train()
    parted.train("--resume")
    compared = ("loss", "gradient_norm", "rewards", "validation_rewards", "completions")
    steps, resumed = ([{k: s.get(k) for k in compared} for s in training.steps()] for training in (whole, parted))
    assert resumed == steps
    assert steps[0]["rewards"]["length"] == steps[1]["rewards"]["length"]
    assert steps[1]["rewards"]["length"] != steps[2]["rewards"]["length"]


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["{data_shard: 2, sharding: parameters}", "{tensor: 2}"])
def test_parts_of_a_model_write_what_the_whole_one_writes(toy, tmp_path, parallel):
    evaluate = "evaluate: {every_steps: 2, num_sequences: 3}"
    train = f"{{steps: 3, {evaluate}, grpo: {{group: 4, completion_tokens: 6, rewards: [{DIGITS}]}}}}"
    found = []
    for number, plan in enumerate(("{data_shard: 1}", parallel)):
        training = toy(tmp_path / str(number), train, parallel=plan, precision="fp32")
        training.train()
        found.append(
            [
                [s["loss"], s["gradient_norm"], *s["rewards"].values(), *s.get("validation_rewards", {}).values()]
                for s in training.steps()
            ]
        )
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_a_validation_is_the_mean_reward_of_one_completion_of_each_held_out_prompt(toy, tmp_path):
    """Each completion that the log shows has the reward that its text has, and the means are those of all of them."""
    held = {"tens": sums(5), "more": sums(3)}
    settings = grpo().replace("train.grpo=", "grpo: ")
    train = f"{{steps: 4, {settings}, evaluate: {{every_steps: 2}}, checkpoint: {{folder: saved, keep_best: true}}}}"
    sources = ", ".join(f"{name}: {name}.jsonl" for name in held)
    data = f"{{source: sums.jsonl, tokenizer: bytes, sequence_length: 24, validation: {{{sources}}}}}"
    training = toy(tmp_path, train, data=data)
    for name, rows in held.items():
        text = lines_of({"prompt": p, "answer": a} for p, a, _ in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    record = training.train(page=True)
    evaluated = [step for step in training.steps() if "validation_rewards" in step]
    assert [step["step"] for step in evaluated] == [2, 4]
    asked = [(prompt, answer) for rows in (5, 3) for prompt, answer, _ in sums(rows)]
    for step in evaluated:
        shown, means, losses = (step[key] for key in ("completions", "validation_rewards", "validation_losses"))
        assert [(one["prompt"], one["reference"]) for one in shown] == asked
        rewards = torch.tensor([one["reward"] for one in shown])
        for one in shown:
            assert one["reward"] - any(c in "0123456789" for c in one["completion"]) in (0.0, 0.5)
        assert means["mean"] == pytest.approx(rewards.mean().item())
        assert means["mean"] == pytest.approx(means["score_regex"] + 0.5 * means["score_length"])
        expected = {"tens": -rewards[:5].mean().item(), "more": -rewards[5:].mean().item(), "mean": -means["mean"]}
        assert losses == pytest.approx(expected)
        assert step["validation_loss"] == losses["mean"]
    best = record["statistics"]["best"]
    assert best["loss"] == min(step["validation_loss"] for step in evaluated)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Completions and their rewards" in page
    assert asked[0][0] in page


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((grpo(group=3),), ["train.grpo.group"]),
        ((grpo(completion_tokens=24),), ["train.grpo.completion_tokens"]),
        ((grpo(beta=0.1),), ["train.grpo.beta"]),
        ((grpo(iterations=2),), ["train.steps"]),
        ((grpo(rewards="[regex]"),), ["train.grpo.rewards[0].pattern"]),
        ((grpo(rewards="[{verifier: exact, most_tokens: 3}]"),), ["train.grpo.rewards[0].most_tokens"]),
        ((grpo(), "train.preference=dpo"), ["train.preference"]),
        ((grpo(), "train.evaluate={target_loss: 1}"), ["train.evaluate.target_loss"]),
        ((grpo(), "train.z_loss=1e-4"), ["train.z_loss"]),
        ((grpo(), "train.compile=true"), ["train.compile"]),
        ((grpo(), "task=lora", "lora={rank: 2, dropout: 0.1}"), ["lora.dropout"]),
        ((grpo(), "data.source=synthetic"), ["data.source"]),
        ((grpo(), EXPERTS), ["model.experts"]),
    ],
)
def test_what_completions_do_not_have_is_refused(data, overrides, keys):
    found = check(run_on(data, *overrides, length=LENGTH, micro=2))
    assert [problem.key for problem in found] == keys


@pytest.mark.parametrize("plan", [Plan(pipeline=2), Plan(context=2)])
def test_plans_that_part_a_completion_are_refused(data, plan):
    problems = check_plan(plan, run=run_on(data, grpo(), length=LENGTH, micro=2))
    assert "train.grpo" in [problem.key for problem in problems]


def test_data_without_answers_is_refused_and_long_prompts_are_skipped(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one"}\n' * 9, encoding="utf-8")
    with pytest.raises(InputError, match="needs prompts with the answers"):
        open_batch_loader(run_on(text, grpo(), length=LENGTH, micro=2), coordinates=ALONE)
    rows = [{"prompt": "x" * num, "answer": "y"} for num in (18, 19, 3)]
    text.write_text(lines_of(rows), encoding="utf-8")
    loader = open_batch_loader(run_on(text, grpo(), length=LENGTH, micro=2), coordinates=ALONE)
    assert (loader.corpus.train.num_samples, loader.corpus.train.usage.num_samples_without_labels) == (2, 1)


def test_messages_have_answers_of_text(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(lines_of([{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}] * 2), encoding="utf-8")
    run = run_on(path, grpo(), length=200, micro=2)
    _, rollouts = opened(run)
    batch = rollouts.loader.prompts(0)
    asked = rollouts.question(batch.tokens_BT[0].tolist(), batch.labels_BT[0].tolist())
    assert asked.reference == "2"
    assert "1+1" in asked.text
    assert "2" not in asked.text
