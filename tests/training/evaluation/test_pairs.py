"""`mw.evaluate` of pairs of answers: scores of reward models as TRL measures them, rewards of policies as DPO's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.answer_runs import lines_of, pairs
from tests.tiny_folders import END, random_model, tiny_checkpoint, tiny_folder

import meshwright as mw
from meshwright.errors import InputError
from meshwright.training.weights import save_weights

pytestmark = [
    pytest.mark.usefixtures("cache_of_module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
RECORDS = pairs(13, longest=4)


def tokens_of(key):
    return [[*row["prompt"].encode(), *row[key].encode(), END] for row in RECORDS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with pairs, a policy, a reference and a reward model."""
    place = tmp_path_factory.mktemp("place")
    (place / "pairs.jsonl").write_text(lines_of(RECORDS))
    for name in ("policy", "reference"):
        tiny_folder(place / name)
    save_weights(random_model(seed=6), place / "other", dtype=torch.float32)
    (place / "other" / "model.safetensors").rename(place / "reference" / "model.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        kind = transformers.AutoModelForSequenceClassification
        reward = kind.from_pretrained(place / "policy", num_labels=1, pad_token_id=0, dtype=torch.float32)
        torch.nn.init.normal_(reward.score.weight, std=0.3)
    reward.save_pretrained(place / "reward")
    for file in (place / "policy").glob("tokenizer*"):
        (place / "reward" / file.name).write_bytes(file.read_bytes())
    return place


def test_a_reward_model_is_measured_as_by_trls_reward_trainer(place, tmp_path):
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl import RewardConfig, RewardTrainer

    (found,) = mw.evaluate(place / "reward", place / "pairs.jsonl", batch=4).pairs
    rows = datasets.Dataset.from_dict({f"{key}_ids": tokens_of(key) for key in ("chosen", "rejected")})
    args = RewardConfig(
        output_dir=str(tmp_path), per_device_eval_batch_size=len(RECORDS), report_to="none", use_cpu=True, bf16=False,
        disable_tqdm=True,
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place / "reward", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "reward", pad_token="!")
    trainer = RewardTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    theirs = trainer.evaluate()
    names = {
        "loss": "loss",
        "accuracy": "accuracy",
        "margin": "margin",
        "lowest": "min_reward",
        "highest": "max_reward",
    }
    for ours, name in names.items():
        assert found[ours] == pytest.approx(theirs[f"eval_{name}"], rel=1e-4), ours
    assert (found["chosen"] + found["rejected"]) / 2 == pytest.approx(theirs["eval_mean_reward"], rel=1e-4)
    assert (found["num_pairs"], found["num_cut"], found["num_skipped"]) == (len(RECORDS), 0, 0)


def test_a_policy_is_measured_by_the_rewards_of_dpo(place):
    (found,) = mw.evaluate(place / "policy", place / "pairs.jsonl", reference=place / "reference", beta=0.2).pairs
    rewards = {}
    for key in ("chosen", "rejected"):
        rewards[key], prompts = torch.zeros(len(RECORDS)), [len(row["prompt"]) for row in RECORDS]
        for sign, name in ((1, "policy"), (-1, "reference")):
            model = transformers.AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float32)
            for i, (ids, start) in enumerate(zip(tokens_of(key), prompts, strict=True)):
                log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                answer = log_p[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])]
                rewards[key][i] += sign * 0.2 * answer.sum().detach()
    lead = rewards["chosen"] - rewards["rejected"]
    expected = {"margin": lead.mean(), "accuracy": (lead > 0).float().mean()}
    expected |= {"loss": -torch.nn.functional.logsigmoid(lead).mean(), "margin_standard_error": lead.std() / 13**0.5}
    expected |= {key: rewards[key].mean() for key in rewards}
    assert {key: found[key] for key in expected} == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-3)
    same = mw.evaluate(place / "policy", place / "pairs.jsonl", reference=place / "policy").pairs[0]
    assert (same["margin"], same["accuracy"], same["loss"]) == (0, 0, pytest.approx(0.693147))


def test_adapters_are_compared_with_their_base_and_rows_have_all_metrics(meshwright, place, tmp_path):
    path = tiny_checkpoint(tmp_path / "saved", "task=lora", f"weights={place / 'policy'}", "lora={rank: 2, alpha: 4}")
    compared = ("--reference", place / "policy", "--tokenizer", "bytes")
    done = meshwright("evaluate", path, place / "pairs.jsonl", *compared, "--json").json
    assert done["pairs"][0]["margin"] != 0
    table = meshwright("evaluate", path, place / "pairs.jsonl", *compared)
    assert all(f"{done['pairs'][0][name]:.4f}" in table.stdout for name in ("margin", "accuracy", "chosen"))


def test_answers_that_are_cut_are_noted(place):
    done = mw.evaluate(place / "reward", place / "pairs.jsonl", sequence_length=14)
    (found,) = done.pairs
    assert found["num_cut"] == sum(len(ids) > 7 for key in ("chosen", "rejected") for ids in tokens_of(key)) > 0
    assert any(f"{found['num_cut']} answers are cut by half of the sequence length" in note for note in done.notes)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("policy", {}, "cross-entropy does not tell apart"),
        ("policy", {"beta": 0.3}, "beta: has no effect without --reference"),
        ("reward", {"reference": "policy"}, "a reward model has no reference"),
        ("policy", {"reference": "reward"}, "a reward model scores texts"),
        ("reward", {"max_tokens": 5}, "pairs of answers are measured without choices, tasks, max_tokens and examples"),
        ("reward", {"sequence_length": 4}, "no pair has tokens of both answers"),
        ("reward", {"sequence_length": 1024}, "the sequence length exceeds the positions"),
    ],
)
def test_what_cannot_be_measured_is_refused(place, model, settings, message):
    settings = {key: place / value if key == "reference" else value for key, value in settings.items()}
    with pytest.raises(InputError, match=message):
        mw.evaluate(place / model, place / "pairs.jsonl", **settings)


def test_a_text_is_not_compared(place, tmp_path):
    (tmp_path / "text.txt").write_text("no pairs")
    with pytest.raises(InputError, match="needs pairs of answers"):
        mw.evaluate(place / "reward", tmp_path / "text.txt")
