"""`meshwright.evaluate`: loss, multiple choice and harness tasks of a trained model. Imports PyTorch when called."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.api import arguments
from meshwright.api.generate import DTYPES, MAX_BATCH
from meshwright.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from meshwright.answers.evaluation import Evaluation
    from meshwright.training.evaluation.choices import Question
    from meshwright.training.trained_model import TrainedModel


def evaluate(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    choices: str | os.PathLike[str] | None = None,
    tasks: Sequence[str] = (),
    task_folder: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    batch: int = 8,
    step: int | Literal["best"] | None = None,
    dtype: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    command: Sequence[str] = (),
) -> Evaluation:
    """Measure how well a trained model predicts a text, answers questions, and does tasks of lm-evaluation-harness.

    Args:
        model: as in `generate`.
        source: text or tokens, as `data.source` of a run file. Default, without choices and tasks: the validation data
            of the training.
        choices: JSONL file of questions: `context`, `question` or `prompt`; `choices`; `answer`: index, letter or text.
        tasks: names of tasks of lm-evaluation-harness.
        task_folder: folder with task files of your own.
        num_fewshot: examples before each question of a task. Default: the task's.
        limit: most samples of each task.
        sequence_length: window in tokens. Default: the training's, or 1,024.
        max_tokens: end after so many predicted tokens of the source.
        batch: sequences at once.
        step: of the checkpoint; "best": that of the lowest validation loss. Default: the newest.
        dtype: fp32, bf16 or fp16. Default: as trained, or as the files are.
        tokenizer: another tokenizer, as in `generate`.
        adapter: folder of a LoRA adapter to add to the weights.
        command: the command line, for the record.

    Returns:
        The metrics with standard errors and counts, the model, the device and the software.

    Raises:
        InputError: there is no such model, source, file or task.
        MissingDependencyError: PyTorch, or lm_eval for tasks, is absent.

    Example:
        >>> import meshwright as mw
        >>> mw.evaluate("runs/first", "python-stdlib", max_tokens=10_000).texts[0]["loss"]  # doctest: +SKIP
        2.31
    """
    named = _names(tasks)
    counts = _counts(
        num_fewshot=num_fewshot,
        limit=limit,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
    )
    paths = {
        name: None if value is None else str(arguments.path(name, value))
        for name, value in (
            ("source", source), ("choices", choices), ("task_folder", task_folder), ("tokenizer", tokenizer),
            ("adapter", adapter),
        )
    }  # fmt: skip
    size = arguments.count("batch", batch, most=MAX_BATCH)
    format_name = None if dtype is None else arguments.choice("dtype", dtype, DTYPES)
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "evaluation needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )
    from meshwright.training.evaluation.choices import read_questions
    from meshwright.training.trained_model import load_trained

    _refuse_useless(counts, paths, has_tasks=bool(named))
    questions = None if paths["choices"] is None else read_questions(Path(paths["choices"]).expanduser())
    trained = load_trained(
        str(arguments.path("model", model)),
        step=arguments.checkpoint_step(step),
        dtype=format_name,
        tokenizer=paths["tokenizer"],
        adapter=paths["adapter"],
    )
    return _evaluate(
        trained, questions, named, counts=counts, paths=paths, batch=size, command=tuple(command)
    )


def _names(tasks: object) -> list[str]:
    named = arguments.items("tasks", tasks, example='["arc_easy"]')
    for name in named:
        if not isinstance(name, str) or not name:
            raise InputError("tasks", got=name, allowed="names")
    return named


def _counts(**given: int | None) -> dict[str, int | None]:
    """Checked numbers; the number of examples may be 0."""
    may_be_0 = ("num_fewshot",)
    return {
        name: None if value is None else arguments.count(name, value, least=0 if name in may_be_0 else 1)
        for name, value in given.items()
    }


def _refuse_useless(counts: dict[str, int | None], paths: dict[str, str | None], *, has_tasks: bool) -> None:
    """Refuse arguments of texts without a text, and of tasks without a task."""
    given: dict[str, object] = {**counts, **paths}
    is_text = paths["source"] is not None or not (paths["choices"] or has_tasks)
    text = "a text: a source, or neither choices nor tasks"
    subjects = (
        (text, is_text, ("sequence_length", "max_tokens")),
        ("a task", has_tasks, ("limit", "num_fewshot", "task_folder")),
    )
    for subject, is_there, names in subjects:
        useless = [name for name in names if given[name] is not None]
        if useless and not is_there:
            raise InputError(f"{', '.join(useless)}: has no effect without {subject}")


def _evaluate(
    trained: TrainedModel,
    questions: Sequence[Question] | None,
    tasks: Sequence[str],
    *,
    counts: Mapping[str, int | None],
    paths: Mapping[str, str | None],
    batch: int,
    command: tuple[str, ...],
) -> Evaluation:
    """All that was asked for, with checked arguments."""
    from meshwright.answers.evaluation import Evaluation
    from meshwright.training import telemetry
    from meshwright.training.evaluation.choices import evaluate_choices
    from meshwright.training.evaluation.harness import run_tasks
    from meshwright.training.evaluation.text import evaluate_text, open_texts
    from meshwright.training.trained_model import model_document

    is_text = paths["source"] is not None or not (questions or tasks)
    texts = open_texts(trained, paths["source"]) if is_text else []
    begin_s = time.perf_counter()
    of_texts = tuple(
        evaluate_text(
            trained, text, length=counts["sequence_length"], batch=batch, max_tokens=counts["max_tokens"]
        )
        for text in texts
    )
    of_choices = None if questions is None else evaluate_choices(trained, questions, batch=batch)
    of_tasks = None
    if tasks:
        folder = None if paths["task_folder"] is None else Path(paths["task_folder"]).expanduser()
        of_tasks = run_tasks(
            trained,
            tasks,
            folder=folder,
            num_fewshot=counts["num_fewshot"],
            limit=counts["limit"],
            batch=batch,
        )
    return Evaluation(
        model=model_document(trained),
        texts=of_texts,
        choices=of_choices,
        tasks=of_tasks,
        seconds=time.perf_counter() - begin_s,
        device=telemetry.device_facts(trained.device, accelerator=None),
        software=telemetry.software_facts(),
        command=command,
        git_commit=telemetry.git_commit(Path.cwd()),
        notes=trained.notes + tuple(_notes(of_texts, of_choices)),
    )


def _notes(texts: Sequence[Mapping[str, Any]], choices: Mapping[str, Any] | None) -> Iterator[str]:
    """Notes on what the numbers leave out."""
    for text in texts:
        if not text["is_whole"]:
            yield f"{text['source']}: ended after {text['num_tokens']:,} tokens; there are more"
    if choices is not None and choices["unused_keys"]:
        listed = ", ".join(f"{key} ({number:,})" for key, number in choices["unused_keys"].items())
        yield f"keys of questions that are not used: {listed}"
    if choices is not None and choices["num_cut"]:
        yield f"{choices['num_cut']} contexts are longer than the positions and lose their beginning"
