"""`meshwright.evaluate`: loss, multiple choice and harness tasks of a trained model. Imports PyTorch when called."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwright.api.generate import ADAPTER, DTYPE, MAX_BATCH, MODEL, STEP, TOKENIZER
from meshwright.api.question import AnyName, Count, Hook, PlainText, answered_by_body, question
from meshwright.errors import InputError
from meshwright.training.cpu_libraries import require_torch

if TYPE_CHECKING:
    from meshwright.answers.evaluation import Evaluation
    from meshwright.training.evaluation.choices import ChoiceQuestion
    from meshwright.training.trained_model import TrainedModel


@question("meshwright.api.evaluate:evaluation")
def evaluate(
    model: Annotated[str | os.PathLike[str], MODEL],
    source: Annotated[
        str | os.PathLike[str] | None,
        AnyName(
            "Text or tokens, as `data.source` of a run file.",
            unset="the validation data of the training, unless there are choices or tasks",
        ),
    ] = None,
    *,
    choices: Annotated[
        str | os.PathLike[str] | None,
        AnyName(
            "JSONL of questions: `context`, `question` or `prompt`; `choices`; `answer`: index, letter or text.",
            metavar="FILE",
        ),
    ] = None,
    tasks: Annotated[Sequence[str], PlainText("Task of lm-evaluation-harness.", flag="--task", metavar="NAME")] = (),
    task_folder: Annotated[
        str | os.PathLike[str] | None, AnyName("Folder with task files of your own.", metavar="FOLDER")
    ] = None,
    num_fewshot: Annotated[
        int | None, Count("Examples before each question of a task.", unset="the task's", flag="--fewshot", low=0)
    ] = None,
    limit: Annotated[int | None, Count("Most samples of each task.")] = None,
    sequence_length: Annotated[
        int | None, Count("Window of the loss.", unset="the training's, or 1024", metavar="TOKENS")
    ] = None,
    max_tokens: Annotated[int | None, Count("End after so many predicted tokens of the source.")] = None,
    batch: Annotated[int, Count("Sequences at once.", high=MAX_BATCH)] = 8,
    step: Annotated[int | Literal["best"] | None, STEP] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    tokenizer: Annotated[str | os.PathLike[str] | None, TOKENIZER] = None,
    adapter: Annotated[str | os.PathLike[str] | None, ADAPTER] = None,
    command: Annotated[Sequence[str], Hook("The command line, for the record.")] = (),
) -> Evaluation:
    """Measure how well a trained model predicts a text, answers questions, and does tasks of lm-evaluation-harness.

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
    return answered_by_body()


_OF_TEXTS = ("sequence_length", "max_tokens")
_OF_TASKS = ("limit", "num_fewshot", "task_folder")


def evaluation(
    *,
    model: str,
    source: str | None,
    choices: str | None,
    tasks: Sequence[str],
    batch: int,
    step: int | Literal["best"] | None,
    dtype: str | None,
    tokenizer: str | None,
    adapter: str | None,
    command: Sequence[str],
    **limits: Any,
) -> Evaluation:
    """The answer to `evaluate`. `limits` are the settings of texts and of tasks."""
    require_torch("evaluation")
    from meshwright.training.evaluation.choices import read_questions
    from meshwright.training.trained_model import load_trained

    is_text = source is not None or not (choices or tasks)
    _refuse_useless(limits, is_text=is_text, has_tasks=bool(tasks))
    questions = None if choices is None else read_questions(Path(choices).expanduser())
    trained = load_trained(model, step=step, dtype=dtype, tokenizer=tokenizer, adapter=adapter)
    return _evaluate(trained, questions, tasks, source=source, limits=limits, batch=batch, command=tuple(command))


def _refuse_useless(limits: Mapping[str, object], *, is_text: bool, has_tasks: bool) -> None:
    """Refuse arguments of texts without a text, and of tasks without a task."""
    text = "a text: a source, or neither choices nor tasks"
    for subject, is_there, names in ((text, is_text, _OF_TEXTS), ("a task", has_tasks, _OF_TASKS)):
        useless = [name for name in names if limits[name] is not None]
        if useless and not is_there:
            raise InputError(f"{', '.join(useless)}: has no effect without {subject}")


def _evaluate(
    trained: TrainedModel,
    questions: Sequence[ChoiceQuestion] | None,
    tasks: Sequence[str],
    *,
    source: str | None,
    limits: Mapping[str, Any],
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

    is_text = source is not None or not (questions or tasks)
    texts = open_texts(trained, source) if is_text else []
    begin_s = time.perf_counter()
    of_texts = tuple(
        evaluate_text(trained, text, length=limits["sequence_length"], batch=batch, max_tokens=limits["max_tokens"])
        for text in texts
    )
    of_choices = None if questions is None else evaluate_choices(trained, questions, batch=batch)
    of_tasks = None
    if tasks:
        folder = None if limits["task_folder"] is None else Path(limits["task_folder"]).expanduser()
        of_tasks = run_tasks(
            trained, tasks, folder=folder, num_fewshot=limits["num_fewshot"], limit=limits["limit"], batch=batch
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
