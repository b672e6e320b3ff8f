"""`meshwright evaluate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.generation_options import weights_options
from meshwright.cli.options import count_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "evaluate",
    body="meshwright.cli.evaluate:run",
    examples=[
        "meshwright evaluate runs/first",
        "meshwright evaluate exported/llama corpus.jsonl --sequence-length 2048 --json",
        "meshwright evaluate runs/tuned --choices questions.jsonl",
        "meshwright evaluate OWNER/NAME --task arc_easy --limit 100",
    ],
)
@click.argument("model")
@click.argument("source", required=False)
@click.option("--choices", metavar="FILE", help="JSONL of questions: context, choices, answer.")
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME", help="Task of lm-evaluation-harness. May be repeated."
)
@click.option("--task-folder", metavar="FOLDER", help="Folder with task files of your own.")
@count_option(
    "--fewshot", "num_fewshot", low=0,
    help="Examples before each question of a task.  [default: the task's]",
)  # fmt: skip
@count_option("--limit", help="Most samples of each task.")
@count_option(
    "--sequence-length", metavar="TOKENS",
    help="Window of the loss.  [default: the training's, or 1024]",
)  # fmt: skip
@count_option("--max-tokens", help="End after so many predicted tokens of the source.")
@count_option("--batch", high=4096, default=8, help="Sequences at once.")
@weights_options
@json_option
def command() -> None:
    """Measure loss, multiple choice and harness tasks of a trained model.

    MODEL is as in `meshwright generate`. SOURCE is what `data.source` of a run file takes: text, JSONL, token files, a
    data set. Without SOURCE, --choices and --task it is the validation data of the training.

    Loss and perplexity are per predicted token, bits per byte of text; each with its standard error and counts.
    Multiple choice counts an answer as right where it is the most likely choice, as such and per character.
    """
