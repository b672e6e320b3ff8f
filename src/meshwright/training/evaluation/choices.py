"""Multiple choice: the answer is the choice that the model finds most likely after the question.

    accuracy              argmax of Σ log p(token of the choice)
    accuracy, normalized  argmax of that sum over the characters of the choice

lm-evaluation-harness defines `acc` and `acc_norm` of a task with `output_type: multiple_choice` so: a choice
follows the context after a space, its tokens are the tokens of the whole text behind the tokens of the
context, and accuracy has the standard error of a mean. A context begins with the start token if the tokenizer
has one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.data.json_stream import json_lines
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.evaluation.losses import Row, losses_of
from meshwright.training.trained_model import TrainedModel

CONTEXT_KEYS = ("context", "question", "prompt")
DELIMITER = " "


@dataclass(frozen=True, kw_only=True)
class ChoiceQuestion:
    """A context and its possible continuations."""

    context: str
    choices: tuple[str, ...]
    answer: int
    unused_keys: tuple[str, ...] = ()  # of its line


def read_questions(path: Path) -> list[ChoiceQuestion]:
    """Read the questions of a JSONL file. Raises InputError with file and line for a line that is no question."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            found = [_question(record, where=where) for where, record in json_lines(file, name=str(path))]
    except OSError as error:
        raise InputError(f"cannot read the questions: {error.strerror or error}", got=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8") from error
    if not found:
        raise InputError("the file has no question", got=str(path))
    return found


def _question(record: Mapping[str, Any], *, where: str) -> ChoiceQuestion:
    names = [key for key in CONTEXT_KEYS if key in record]
    if len(names) != 1 or not isinstance(record[names[0]], str):
        raise InputError(f"{where}: no question", got=", ".join(record), allowed=f"one of {', '.join(CONTEXT_KEYS)}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise InputError(f"{where}: choices", got=choices, allowed="a list of two or more texts")
    return ChoiceQuestion(
        context=record[names[0]],
        choices=tuple(choices),
        answer=_answer(record.get("answer"), choices, where=where),
        unused_keys=tuple(key for key in record if key not in (names[0], "choices", "answer")),
    )


def _answer(answer: object, choices: list[str], *, where: str) -> int:
    """The index of the answer, given as an index, a letter, or one of the choices."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if choices.count(answer) == 1:
            return choices.index(answer)
        if len(answer) == 1 and 0 <= ord(answer.upper()) - ord("A") < len(choices):
            return ord(answer.upper()) - ord("A")
    allowed = f"0 to {len(choices) - 1}, a letter from A, or one of the choices"
    raise InputError(f"{where}: answer", got=answer, allowed=allowed)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return tokens of the context with the start token, and tokens of the continuation.

    White space at the end of the context goes to the continuation, as tokenizers put it before a word. An empty
    context is the start token, or the end token after which training begins a document.
    """
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    start = [] if tokenizer.start is None else [tokenizer.start]
    context_ids, whole_ids = (
        start + [int(i) for i in ids] for ids in tokenizer.encode([context, context + continuation])
    )
    if not context_ids:
        return [tokenizer.end], whole_ids
    return context_ids, whole_ids[len(context_ids) :]


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Log-probability of a continuation."""

    total: float
    is_greedy: bool  # every token of it is the most probable one
    is_cut: bool = False  # tokens at the beginning of the context did not fit


def likelihoods(
    trained: TrainedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch: int
) -> list[Likelihood]:
    """Log-probabilities of continuations after their contexts, in order. Too long contexts lose their beginning."""
    longest = (trained.positions or 10**9) + 1
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    found: dict[int, Likelihood] = {}
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        rows = [_row(*pairs[i], longest=longest) for i in part]
        for i, (losses_T, is_first_T) in zip(part, losses_of(trained.module, rows), strict=True):
            found[i] = Likelihood(
                total=-float(losses_T.double().sum()),
                is_greedy=bool(is_first_T.all()),
                is_cut=len(pairs[i][0]) + len(pairs[i][1]) > longest,
            )
    return [found[i] for i in range(len(pairs))]


def _row(context: Sequence[int], continuation: Sequence[int], *, longest: int) -> Row:
    whole = [*context, *continuation][-longest:]
    ignored = len(whole) - 1 - min(len(continuation), len(whole) - 1)
    return Row(tokens=whole[:-1], labels=[IGNORED_LABEL] * ignored + whole[1 + ignored :])


def evaluate_choices(trained: TrainedModel, questions: Sequence[ChoiceQuestion], *, batch: int) -> dict[str, Any]:
    """Accuracy by likelihood and by likelihood per character, with their standard errors."""
    tokenizer = trained.require_tokenizer()
    pairs = [encode_pair(tokenizer, q.context, DELIMITER + choice) for q in questions for choice in q.choices]
    found = likelihoods(trained, pairs, batch=batch)
    at, right, right_normalized, rows = 0, [], [], []
    for question in questions:
        totals = [each.total for each in found[at : at + len(question.choices)]]
        at += len(question.choices)
        normalized = [t / len(choice) for t, choice in zip(totals, question.choices, strict=True)]
        right.append(totals.index(max(totals)) == question.answer)
        right_normalized.append(normalized.index(max(normalized)) == question.answer)
        rows.append({"likelihoods": totals, "answer": question.answer, "chosen": totals.index(max(totals))})
    return {
        "num_questions": len(questions),
        "accuracy": sum(right) / len(right),
        "accuracy_standard_error": error_of_mean(right),
        "accuracy_normalized": sum(right_normalized) / len(right_normalized),
        "accuracy_normalized_standard_error": error_of_mean(right_normalized),
        "num_cut": sum(each.is_cut for each in found),
        "unused_keys": dict(Counter(key for question in questions for key in question.unused_keys)),
        "questions": rows,
    }


def error_of_mean(values: Sequence[float]) -> float | None:
    """Sample standard deviation over the root of the number; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
