"""`meshwright generate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import file_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "generate",
    question="meshwright.api.generate:generate",
    body="meshwright.cli.generate:run",
    examples=[
        'meshwright generate runs/first "def main(" --max-tokens 40',
        "meshwright generate exported/llama --prompts prompts.jsonl --batch 16 --json",
        "echo 'Once upon a time' | meshwright generate OWNER/NAME --temperature 0.8 --top-p 0.95 --seed 1",
    ],
)
@click.argument("prompt", required=False)
@file_option(
    "--prompts", "prompts_path",
    help="Prompts of a file: one a line, or JSON lines of texts, `prompt` or `messages`.",
)  # fmt: skip
@json_option
def command() -> None:
    """Continue prompts with a trained model.

    It computes on this machine's accelerator, or on its CPU. MODEL is a run folder, a run file, a folder of checkpoints
    or one of them, a Hugging Face folder, a LoRA adapter, or OWNER/NAME[@REVISION] on the Hugging Face hub. PROMPT is a
    text; without it and --prompts it is read from stdin, and the last line break is left out.

    The text goes to stdout while it is generated, times and rates to stderr. Without a temperature the most probable
    token is taken, unless the model's generation_config.json says otherwise. A text ends at the model's end token, at a
    stop string, after --max-tokens, or where the trained positions end.
    """
