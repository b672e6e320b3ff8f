"""`meshwright.evaluate`: loss, multiple choice and harness tasks of a trained model. Imports PyTorch when called."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwright.api.generate import ADAPTER, DTYPE, MAX_BATCH, MODEL, STEP, TOKENIZER, AdapterLike
from meshwright.api.question import Amount, AnyName, Count, Hook, PlainText, answered_by_body, question
from meshwright.errors import InputError
from meshwright.specs.run import Preference, PreferenceLoss
from meshwright.training.cpu_libraries import require_torch

if TYPE_CHECKING:
    from meshwright.answers.evaluation import Evaluation
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
    examples: Annotated[
        int | None,
        Count("Show so many documents of the highest loss, and so many of the longest.", unset="none", high=1000),
    ] = None,
    reference: Annotated[
        str | os.PathLike[str] | None,
        AnyName(
            "Compare answers of pairs by their likelihoods over those of this model, as DPO does.", metavar="MODEL"
        ),
    ] = None,
    beta: Annotated[float, Amount("Scale of the rewards of --reference.")] = Preference.beta,
    batch: Annotated[int, Count("Sequences at once.", high=MAX_BATCH)] = 8,
    step: Annotated[int | Literal["best"] | None, STEP] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    tokenizer: Annotated[str | os.PathLike[str] | None, TOKENIZER] = None,
    adapter: Annotated[AdapterLike | None, ADAPTER] = None,
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


def evaluation(
    *,
    model: str,
    source: str | None,
    choices: str | None,
    tasks: Sequence[str],
    batch: int,
    command: Sequence[str],
    sequence_length: int | None,
    max_tokens: int | None,
    examples: int | None,
    task_folder: str | None,
    num_fewshot: int | None,
    limit: int | None,
    reference: str | None,
    beta: float,
    **of_model: Any,
) -> Evaluation:
    """The answer to `evaluate`. `of_model`: step, number format, tokenizer and adapter."""
    require_torch("evaluation")
    from meshwright.answers.evaluation import Evaluation
    from meshwright.training import telemetry
    from meshwright.training.evaluation.choices import evaluate_choices, read_questions
    from meshwright.training.evaluation.harness import run_tasks
    from meshwright.training.evaluation.pairs import evaluate_pairs
    from meshwright.training.evaluation.text import evaluate_text, open_texts
    from meshwright.training.trained_model import load_trained, model_document

    if source is None and (choices or tasks):
        of_texts = {"sequence_length": sequence_length, "max_tokens": max_tokens, "examples": examples}
        _refuse_useless(of_texts, subject="a text: a source, or neither choices nor tasks")
    if not tasks:
        _refuse_useless({"limit": limit, "num_fewshot": num_fewshot, "task_folder": task_folder}, subject="a task")
    questions = None if choices is None else read_questions(Path(choices).expanduser())
    trained = load_trained(model, **of_model, may_score=True)
    other = None if reference is None else load_trained(reference, dtype=trained.dtype, tokenizer=of_model["tokenizer"])
    compared = _compared(trained, other, beta=beta, is_more=bool(questions or tasks or max_tokens or examples))
    texts = open_texts(trained, source, preference=compared) if source is not None or not (questions or tasks) else []
    windows = {"length": sequence_length, "batch": batch}
    of_tasks = {"folder": task_folder and Path(task_folder).expanduser(), "num_fewshot": num_fewshot, "limit": limit}

    def measured() -> dict[str, Any]:
        if compared is not None:
            return {"pairs": tuple(evaluate_pairs(trained, t, reference=other, beta=beta, **windows) for t in texts)}
        more = {"max_tokens": max_tokens, "examples": examples or 0} | windows
        return {
            "texts": tuple(evaluate_text(trained, text, **more) for text in texts),
            "choices": evaluate_choices(trained, questions, batch=batch) if questions else None,
            "tasks": run_tasks(trained, tasks, batch=batch, **of_tasks) if tasks else None,
        }

    found = _by_adapter(trained, measured)
    return Evaluation(
        model=model_document(trained),
        **found,
        device=telemetry.device_facts(trained.device, accelerator=None),
        software=telemetry.software_facts(),
        command=tuple(command),
        git_commit=telemetry.git_commit(Path.cwd()),
        notes=trained.notes + tuple(_notes(found)),
    )


def _by_adapter(trained: TrainedModel, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure with each of several adapters, or once: the numbers of the first, those of all by name, the seconds."""
    begin_s, named = time.perf_counter(), {}
    if trained.adapters is not None:
        for name in trained.adapters.names:
            trained.adapters.use(name)
            named[name] = measured()
    found = next(iter(named.values()), None) or measured()
    return found | {"adapters": named, "seconds": time.perf_counter() - begin_s}


def _compared(
    trained: TrainedModel, reference: TrainedModel | None, *, beta: float, is_more: bool
) -> Preference | None:
    """The way in which answers of pairs are compared; None: the data is no pairs. `is_more`: with other metrics."""
    if not (trained.model.num_labels or reference):
        _refuse_useless({"beta": None if beta == Preference.beta else beta}, subject="--reference")
        return None
    if is_more:
        raise InputError("pairs of answers are measured without choices, tasks, max_tokens and examples")
    if reference is None:
        return Preference(loss=PreferenceLoss.REWARD)
    if trained.model.num_labels:
        raise InputError("a reward model has no reference", got=reference.name)
    ours, theirs = (one.tokenizer and one.tokenizer.fingerprint for one in (trained, reference))
    if ours != theirs:
        raise InputError("the reference has another tokenizer", got=reference.name, hint="--tokenizer X of both")
    return Preference(loss=PreferenceLoss.DPO)


def _refuse_useless(given: Mapping[str, object], *, subject: str) -> None:
    if useless := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{', '.join(useless)}: has no effect without {subject}")


def _notes(measured: Mapping[str, Any]) -> Iterator[str]:
    """Notes on what the numbers leave out."""
    choices = measured.get("choices")
    for found in measured.get("pairs", ()):
        if found["num_skipped"]:
            yield f"{found['source']}: {found['num_skipped']:,} pairs have no token of an answer in the sequence length"
        if found["num_cut"]:
            yield f"{found['source']}: {found['num_cut']:,} answers are cut by half of the sequence length"
    for text in measured.get("texts", ()):
        if not text["is_whole"]:
            yield f"{text['source']}: ended after {text['num_tokens']:,} tokens; there are more"
    if choices is not None and choices["unused_keys"]:
        listed = ", ".join(f"{key} ({number:,})" for key, number in choices["unused_keys"].items())
        yield f"keys of questions that are not used: {listed}"
    if choices is not None and choices["num_cut"]:
        yield f"{choices['num_cut']} contexts are longer than the positions and lose their beginning"
