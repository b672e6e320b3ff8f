"""`meshwright evaluate`: metrics of a trained model."""

from __future__ import annotations

import sys
from typing import Any

from meshwright.answers.evaluation import Evaluation
from meshwright.api.evaluate import evaluate
from meshwright.api.question import ask
from meshwright.cli.output import emit, note, print_line, print_table, progress
from meshwright.cli.verbs import verb
from meshwright.units import format_duration

MAX_SHOWN = 60
"""Characters of an example that the table has."""


@verb("evaluate", question="meshwright.api.evaluate:evaluate")
def command(*, asked: dict[str, Any]) -> None:
    """Measure loss, multiple choice and harness tasks of a trained model.

    MODEL is as in `meshwright generate`. SOURCE is what `data.source` of a run file takes: text, JSONL, token files, a
    data set. Without SOURCE, --choices and --task it is the validation data of the training.

    Loss and perplexity are per predicted token, bits per byte of text; each with its standard error and counts.
    Multiple choice counts an answer as right where it is the most likely choice, as such and per character.
    """
    with progress(f"evaluating {asked['model']}"):
        done = ask(evaluate, asked, command=("meshwright", *sys.argv[1:]))
    emit(done, _show)
    note(*done.notes)


def _show(done: Evaluation) -> None:
    rows = [
        (
            row["on"],
            row["metric"].replace("_", " "),
            f"{row['value']:.4f}",
            "" if row["standard_error"] is None else f"{row['standard_error']:.4f}",
            "" if row["number"] is None else f"{row['number']:,}",
        )
        for row in done.to_rows()
    ]
    print_table(
        {"on": "left", "metric": "left", "value": "right", "standard error": "right", "tokens or samples": "right"},
        rows,
        title=f"{done.model['name']}" + (f", step {done.model['step']:,}" if done.model["step"] is not None else ""),
    )
    of_adapters = [(f"{name}: ", text) for name, found in done.adapters.items() for text in found["texts"]]
    for prefix, text in of_adapters or [("", text) for text in done.texts]:
        for kind in ("worst", "longest"):
            if text[kind]:
                print_table(
                    {"document": "right", "loss": "right", "tokens": "right", "text": "left"},
                    [_example(each) for each in text[kind]],
                    title=f"{prefix}{text['source']}: {kind} documents",
                )
    if done.texts:
        print_line(f"Windows of {done.texts[0]['sequence_length']:,} tokens; {format_duration(done.seconds)}.")


def _example(example: dict[str, Any]) -> tuple[str, str, str, str]:
    begin = " ".join((example["text"] or "")[:MAX_SHOWN].split())
    return f"{example['document']:,}", f"{example['loss']:.4f}", f"{example['length']:,}", begin
