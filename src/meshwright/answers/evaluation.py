"""Metrics of a trained model: loss of texts, accuracy on questions, tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.json_values import jsonable
from meshwright.result import Result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Evaluation(Result):
    """The results of one evaluation.

    Attributes:
        model: name, weights, step, number format, tokenizer and positions of the model.
        texts: loss, perplexity, bits per byte, standard errors, counts, for each source; the loss of each turn of
            conversations; with `examples` the documents of the highest loss, and the longest.
        choices: accuracy, accuracy by characters, standard errors, likelihoods; None without questions.
        tasks: results of lm-evaluation-harness; None without tasks.
        pairs: loss, accuracy, margin and rewards of pairs of answers, with standard errors.
        adapters: texts, choices, tasks and pairs of each of several adapters, by name; the ones above are of the first.
        seconds: wall time of the evaluation, without loading.
    """

    model: Mapping[str, Any]
    seconds: float
    device: Mapping[str, Any]
    software: Mapping[str, str]
    texts: tuple[Mapping[str, Any], ...] = ()
    choices: Mapping[str, Any] | None = None
    tasks: Mapping[str, Any] | None = None
    pairs: tuple[Mapping[str, Any], ...] = ()
    command: tuple[str, ...] = ()
    git_commit: str | None = None
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return jsonable({key: getattr(self, key) for key in self.__dataclass_fields__})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each metric: on what, metric, value, standard error, number; of each adapter."""
        if not self.adapters:
            return self._rows(self.texts, self.choices, self.tasks, self.pairs)
        named = {name: self._rows(**found) for name, found in self.adapters.items()}
        return [row | {"on": f"{name}: {row['on']}"} for name, rows in named.items() for row in rows]

    @staticmethod
    def _rows(
        texts: Iterable[Mapping[str, Any]] = (),
        choices: Mapping[str, Any] | None = None,
        tasks: Mapping[str, Any] | None = None,
        pairs: Iterable[Mapping[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        rows = []
        for text in texts:
            for name in ("loss", "perplexity", "bits_per_byte"):
                if text[name] is not None:
                    error = text.get(f"{name}_standard_error")
                    rows.append(_row(text["source"], name, text[name], error, text["num_tokens"]))
            for turn in text["turns"]:
                metric = f"loss_of_turn_{turn['turn']}"
                rows.append(_row(text["source"], metric, turn["loss"], turn["loss_standard_error"], turn["num_tokens"]))
        for found in pairs:
            for name in ("loss", "accuracy", "margin", "chosen", "rejected"):
                error = found[f"{name}_standard_error"]
                rows.append(_row(found["source"], name, found[name], error, found["num_pairs"]))
        if choices is not None:
            for name in ("accuracy", "accuracy_normalized"):
                error = choices[f"{name}_standard_error"]
                rows.append(_row("choices", name, choices[name], error, choices["num_questions"]))
        for task, found in ((tasks or {}).get("results") or {}).items():
            for name, value in found.items():
                metric, _, kind = name.partition(",")
                if kind and not metric.endswith("_stderr") and isinstance(value, int | float):
                    error = found.get(f"{metric}_stderr,{kind}")
                    error = error if isinstance(error, int | float) else None
                    count = (tasks or {})["num_samples"].get(task, {}).get("effective")
                    rows.append(_row(task, metric, value, error, count))
        return rows

    def summary(self) -> str:
        """Return the metrics with their standard errors."""
        return ", ".join(
            f"{row['on']}: {row['metric']} {row['value']:.4f}"
            + (f" ± {row['standard_error']:.4f}" if row["standard_error"] is not None else "")
            for row in self.to_rows()
        )


def _row(on: str, metric: str, value: float, error: float | None, number: int | None) -> dict[str, Any]:
    return {"on": on, "metric": metric, "value": value, "standard_error": error, "number": number}
