"""`mw.evaluate`: losses of transformers on the same tokens, choices and tasks as lm-evaluation-harness counts them."""

from __future__ import annotations

import json
import math
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from tests.tiny_folders import END, TEMPLATE, tiny_checkpoint, tiny_folder

import meshwright as mw
from meshwright.training.evaluation.losses import MeanLoss

DOCUMENTS = ["The quick brown fox", "né 漢字", "x", "jumps over the lazy dog " * 5]


pytestmark = pytest.mark.usefixtures("cache_of_module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def theirs(folder, length):
    """Sums of transformers' losses, and numbers of labels, of each window."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for text in DOCUMENTS:
        tokens = [*text.encode(), END]
        for at in range(0, len(tokens) - 1, length):
            ids = torch.tensor([tokens[at : at + length + 1]])
            with torch.no_grad():
                found.append((model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1), ids.shape[1] - 1))
    return found


@pytest.mark.parametrize(("length", "batch"), [(256, 3), (16, 8), (1, 2)])
def test_the_loss_is_that_of_transformers_on_the_same_tokens(folder, corpus, length, batch):
    (text,) = mw.evaluate(folder, corpus, sequence_length=length, batch=batch).texts
    expected = theirs(folder, length)
    total, count = (sum(column) for column in zip(*expected, strict=True))
    assert text["num_tokens"] == count == sum(len(t.encode()) for t in DOCUMENTS)
    assert text["loss"] == pytest.approx(total / count, rel=1e-5)
    assert text["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    mean, rows = total / count, len(expected)
    squares = sum((s - mean * n) ** 2 for s, n in expected)
    assert text["loss_standard_error"] == pytest.approx(math.sqrt(squares * rows / (rows - 1)) / count, rel=1e-4)


def test_bits_per_byte_count_the_bytes_that_are_predicted(folder, corpus):
    (text,) = mw.evaluate(folder, corpus).texts
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats = num_bytes = 0.0
    for document in DOCUMENTS:
        ids = torch.tensor([list(document.encode())])
        if ids.shape[1] > 1:
            with torch.no_grad():
                nats += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_bytes += ids.shape[1] - 1  # nothing predicts the first one
    assert text["num_bytes"] == num_bytes
    assert text["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_only_answers_count_in_data_with_prompts(folder, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    (text,) = mw.evaluate(folder, tmp_path / "asked.jsonl").texts
    assert (text["num_tokens"], text["bits_per_byte"]) == (2, None)  # the answer and its end


TALKS = [
    [("1+1=", "2"), ("2+2=", "4"), ("and why?", "because")],
    [("hello", "good day to you, and to all whom you like"), ("bye", "so long")],
    [("once", "only")],
]


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations, and a model with their template."""
    folder = tmp_path_factory.mktemp("talks")
    roles = ("user", "assistant")
    rows = [
        [{"role": role, "content": said} for pair in talk for role, said in zip(roles, pair, strict=True)]
        for talk in TALKS
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return tiny_folder(folder / "tiny", template=TEMPLATE), folder / "talks.jsonl"


def test_each_turn_has_the_loss_of_its_answers(talks):
    transformers = pytest.importorskip("transformers")
    model, source = talks
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses: dict[int, list[float]] = {}
    documents = []
    for number, talk in enumerate(TALKS, start=1):
        text, spans = "", []
        for turn, (asked, said) in enumerate(talk, start=1):
            text += f"<user>{asked}</user><assistant>"
            spans.append((turn, len(text)))
            text += f"{said}</assistant>"
        ids = torch.tensor([[*text.encode()]])
        with torch.no_grad():
            each = torch.nn.functional.cross_entropy(module(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        own = []
        for (turn, start), (_, said) in zip(spans, talk, strict=True):
            own += (span := each[start - 1 : start - 1 + len(f"{said}</assistant>")].tolist())
            losses.setdefault(turn, []).extend(span)
        documents.append({"document": number, "loss": sum(own) / len(own), "num_tokens": len(own), "text": text})
    (found,) = mw.evaluate(model, source, sequence_length=256, examples=2).texts
    expected = [(turn, pytest.approx(sum(of) / len(of), rel=1e-5), len(of)) for turn, of in losses.items()]
    assert [(turn["turn"], turn["loss"], turn["num_tokens"]) for turn in found["turns"]] == expected
    orders = {"worst": lambda each: -each["loss"], "longest": lambda each: -len(each["text"])}
    for kind, order in orders.items():
        for shown, document in zip(found[kind], sorted(documents, key=order)[:2], strict=True):
            assert shown == {
                **document, "loss": pytest.approx(document["loss"], rel=1e-5), "length": len(document["text"])
            }  # fmt: skip


def test_turns_and_documents_are_whole_across_windows(talks):
    model, source = talks
    (found,) = mw.evaluate(model, source, sequence_length=16, examples=3).texts
    assert sum(turn["num_tokens"] for turn in found["turns"]) == found["num_tokens"]
    for kind in ("worst", "longest"):
        assert sum(each["num_tokens"] for each in found[kind]) == found["num_tokens"]
    rows = mw.evaluate(model, source).to_rows()
    assert [row["metric"] for row in rows][2:] == ["loss_of_turn_1", "loss_of_turn_2", "loss_of_turn_3"]


def test_examples_need_a_text(folder, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n")
    with pytest.raises(mw.InputError, match="examples: has no effect"):
        mw.evaluate(folder, choices=tmp_path / "q.jsonl", examples=2)


def test_an_end_before_the_source_is_noted(folder, corpus):
    done = mw.evaluate(folder, corpus, max_tokens=20)
    assert 20 <= done.texts[0]["num_tokens"] < 150
    assert not done.texts[0]["is_whole"]
    assert "there are more" in done.notes[0]
    assert mw.evaluate(folder, corpus, max_tokens=10**6).notes == ()


def test_a_checkpoint_is_evaluated_on_what_was_held_out(tmp_path, corpus):
    evaluated = "train.evaluate={every_steps: 2}"
    path = tiny_checkpoint(tmp_path / "saved", f"data.source={corpus}", "data.sequence_length=32", evaluated)
    done = mw.evaluate(path)
    assert done.texts[0]["source"].startswith("the validation part of")
    assert done.texts[0]["sequence_length"] == 32
    named = ("data.validation={all: " + str(corpus) + "}", evaluated)
    path = tiny_checkpoint(tmp_path / "other", f"data.source={corpus}", *named)
    assert mw.evaluate(path).texts[0]["source"] == str(corpus)


def test_text_that_was_trained_on_is_not_called_validation_data(tmp_path, corpus):
    path = tiny_checkpoint(tmp_path / "saved", f"data.source={corpus}")
    with pytest.raises(mw.InputError, match="held no documents out"):
        mw.evaluate(path)


def test_sources_of_a_checkpoint_are_found_from_other_folders(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    sources = {"glob": "*.jsonl", "options": "corpus.jsonl?text=text"}
    path = tiny_checkpoint(
        tmp_path / "saved",
        "data.source=corpus.jsonl?text=text",
        "data.validation={" + ", ".join(f"{k}: '{v}'" for k, v in sources.items()) + "}",
        "train.evaluate={every_steps: 2}",
    )
    (tmp_path / "corpus.jsonl").write_text('{"text": "another corpus"}\n')
    monkeypatch.chdir(tmp_path)
    found = [text["source"] for text in mw.evaluate(path).texts]
    assert found == [str(corpus.parent / value) for value in sources.values()]


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (None, {}, "nothing to evaluate on"),
        ("synthetic", {}, "random tokens"),
        ("./nowhere.txt", {}, "no such data"),
        ("corpus", {"sequence_length": 257}, "exceeds the positions"),
        ("corpus", {"max_tokens": 0}, "max_tokens: got 0"),
        ("corpus", {"batch": "x"}, "batch: got 'x'"),
        ("corpus", {"choices": "nowhere"}, "cannot read the questions"),
        ("corpus", {"tasks": "arc"}, "tasks: got 'arc'"),
        ("corpus", {"limit": 2, "num_fewshot": 0}, "limit, num_fewshot: .* without a task"),
        ("corpus", {"task_folder": "."}, "task_folder: .* without a task"),
        (None, {"choices": "./q", "max_tokens": 2, "sequence_length": 4}, "sequence_length, max_tokens: .* a text"),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated_is_bad_input(folder, corpus, source, settings, message):
    with pytest.raises(mw.InputError, match=message):
        mw.evaluate(folder, corpus if source == "corpus" else source, **settings)


def test_the_error_of_a_single_row_is_unknown():
    mean = MeanLoss()
    mean.add(6.0, 3)
    assert (mean.mean, mean.standard_error) == (2.0, None)


# --- multiple choice ---

QUESTIONS = [
    {"context": "The opposite of hot is", "choices": ["cold", "a very long answer"], "answer": 0},
    {"question": "1, 2, 3, ", "choices": ["four", "4", "5"], "answer": "B"},
    {"prompt": "", "choices": ["Yes", "No"], "answer": "No"},
    {"context": "né  ", "choices": ["漢字", "x"], "answer": "A"},
    {"context": "y" * 300, "choices": ["long", "longer"], "answer": 1},
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "q.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return path


def test_likelihoods_are_those_of_single_forward_passes(folder, questions):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = mw.evaluate(folder, choices=questions, batch=3)
    assert found.choices["num_cut"] == 2
    assert found.notes == ("2 contexts are longer than the positions and lose their beginning",)
    for question, row in zip(QUESTIONS, found.choices["questions"], strict=True):
        context = next(question[k] for k in ("context", "question", "prompt") if k in question)
        for choice, total in zip(question["choices"], row["likelihoods"], strict=True):
            text = context.rstrip() + context[len(context.rstrip()) :] + " " + choice
            start = [*context.rstrip().encode()] or [END]
            ids = ([*text.encode()] if context else [END, *text.encode()])[-257:]
            with torch.no_grad():
                logits = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
            num_after = len(text.encode()) - (len(start) if context else 0)
            expected = sum(logits[i, ids[i + 1]].item() for i in range(len(ids) - 1 - num_after, len(ids) - 1))
            assert total == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"choices": ["a", "b"], "answer": 0}',
        '{"context": "a", "choices": ["a"], "answer": 0}',
        '{"context": "a", "choices": ["a", "b"]}',
        '{"context": "a", "choices": ["a", "b"], "answer": 2}',
        '{"context": "a", "choices": ["a", "b"], "answer": "C"}',
        '{"context": "a", "choices": ["a", "b"], "answer": true}',
        '{"context": "a", "choices": ["a", "b"], "answer": 0, "answer": 1}',
        "",
    ],
)
def test_a_wrong_question_is_bad_input(folder, tmp_path, line):
    (tmp_path / "q.jsonl").write_text(line)
    with pytest.raises(mw.InputError, match=r"q.jsonl:1|no question"):
        mw.evaluate(folder, choices=tmp_path / "q.jsonl")


def test_keys_of_questions_that_are_not_used_are_noted(folder, tmp_path):
    line = json.dumps({"context": "a\u2028b", "choices": ["c", "d"], "answer": 0, "passage": "e"}, ensure_ascii=False)
    (tmp_path / "q.jsonl").write_text(f"{line}\n{line}\n")
    done = mw.evaluate(folder, choices=tmp_path / "q.jsonl")
    assert done.choices["num_questions"] == 2
    assert done.notes == ("keys of questions that are not used: passage (2)",)


TASK = """
task: own_choices
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task file over questions of our own, which needs no network, and an index of it alone."""
    tasks = pytest.importorskip("lm_eval.tasks")
    path = tmp_path_factory.mktemp("task")
    rows = [
        {"context": f"{i} and {i} is", "choices": [f"{2 * i}", f"{i} again", "x" * (i + 1)], "answer": i % 3}
        for i in range(12)
    ]
    (path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "tasks").mkdir()
    (path / "tasks" / "own.yaml").write_text(TASK.replace("QUESTIONS", str(path / "questions.jsonl")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(path / "cache"))
        own = partial(tasks.TaskManager, include_defaults=False)  # the harness's are seconds of reading files
        patch.setattr(tasks, "TaskManager", cache(own))
        yield path


@pytest.mark.filterwarnings("ignore")
def test_our_choices_count_as_the_harness_counts_and_its_tasks_run(folder, task):
    done = mw.evaluate(folder, tasks=["own_choices"], task_folder=task / "tasks", choices=task / "questions.jsonl")
    theirs = done.tasks["results"]["own_choices"]
    ours = done.choices
    assert theirs["acc,none"] == ours["accuracy"]
    assert theirs["acc_norm,none"] == ours["accuracy_normalized"]
    assert theirs["acc_stderr,none"] == pytest.approx(ours["accuracy_standard_error"])
    assert 0 < ours["accuracy"] < 1
    rows = {(row["on"], row["metric"]): row["number"] for row in done.to_rows()}
    assert rows["own_choices", "acc"] == rows["choices", "accuracy"] == 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.when_touched  # test_our_choices_count_as_the_harness_counts_and_its_tasks_run uses the harness
def test_the_harness_gets_the_same_from_its_own_model(folder, task):
    pytest.importorskip("transformers")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task / "tasks"))
    own = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)
    theirs = simple_evaluate(model=own, tasks=["own_choices"], task_manager=manager, bootstrap_iters=0)
    ours = mw.evaluate(folder, tasks=["own_choices"], task_folder=task / "tasks").tasks
    for metric in ("acc,none", "acc_norm,none"):
        assert theirs["results"]["own_choices"][metric] == ours["results"]["own_choices"][metric]


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_bad_input(folder, task):
    with pytest.raises(mw.InputError, match="unknown task"):
        mw.evaluate(folder, tasks=["no_such_task"], task_folder=task / "tasks")


@pytest.mark.slow  # as above, with the thousands of tasks that the harness brings
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_none_of_the_harness(folder):
    with pytest.raises(mw.InputError, match="unknown task"):
        mw.evaluate(folder, tasks=["no_such_task"])


def test_without_the_harness_it_is_named(folder, monkeypatch):
    monkeypatch.setattr("meshwright.training.evaluation.harness.find_spec", lambda name: None)
    with pytest.raises(mw.MissingDependencyError, match="lm_eval"):
        mw.evaluate(folder, tasks=["arc_easy"])


def test_the_command_prints_the_metrics(meshwright, folder, corpus, questions):
    done = meshwright("evaluate", folder, corpus, "--choices", questions)
    assert done.exit_code == 0
    for part in ("loss", "perplexity", "bits per byte", "accuracy normalized", "Windows of 256 tokens"):
        assert part in done.stdout
    document = meshwright("evaluate", folder, corpus, "--json").json
    assert document["texts"][0]["num_tokens"] > 0
    assert document["command"][0] == "meshwright"
    assert "loss" in mw.evaluate(folder, corpus)._repr_html_()
