"""`meshwright evaluate`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "evaluate",
    question="meshwright.api.evaluate:evaluate",
    body="meshwright.cli.evaluate:run",
    examples=[
        "meshwright evaluate runs/first",
        "meshwright evaluate exported/llama corpus.jsonl --sequence-length 2048 --json",
        "meshwright evaluate runs/tuned --choices questions.jsonl",
        "meshwright evaluate OWNER/NAME --task arc_easy --limit 100",
    ],
)
@json_option
def command() -> None:
    """Measure loss, multiple choice and harness tasks of a trained model.

    MODEL is as in `meshwright generate`. SOURCE is what `data.source` of a run file takes: text, JSONL, token files, a
    data set. Without SOURCE, --choices and --task it is the validation data of the training.

    Loss and perplexity are per predicted token, bits per byte of text; each with its standard error and counts.
    Multiple choice counts an answer as right where it is the most likely choice, as such and per character.
    """
