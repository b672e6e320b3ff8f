"""`meshwright chat`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "chat",
    question="meshwright.api.generate:generate",
    without=["batch"],
    body="meshwright.cli.chat:run",
    examples=[
        "meshwright chat runs/tuned",
        'meshwright chat runs/tuned "What is the capital of France?"',
        'meshwright chat exported/tuned --system "Answer in one word." --temperature 0.7 < questions.txt',
    ],
)
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option("--system", metavar="TEXT", help="System prompt: the first message of the conversation.")
@json_option
def command() -> None:
    """Talk to a trained model.

    The conversation is written in the chat template of its tokenizer, or as ChatML where it has none. MODEL is as in
    `meshwright generate`. With MESSAGEs, or with stdin from a file or a pipe, each message or line is a turn of one
    conversation, and the answers go to stdout. On a terminal: Ctrl-C stops an answer, Ctrl-D ends, /help
    lists the commands.

    Earlier turns are not computed again. A conversation longer than the trained positions is refused, never cut.
    """
