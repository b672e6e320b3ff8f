"""`meshwright generate`: completions of one prompt, streamed, or of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from meshwright.answers.generation import Generation
from meshwright.api.generate import PromptLike, completions, generate, open_generator
from meshwright.api.question import question_of
from meshwright.cli.options import file_option
from meshwright.cli.output import emit_json, emit_text, load_with_torch, note, progress, say, wants_json
from meshwright.cli.verbs import verb
from meshwright.errors import InputError

SHOWN_PROMPT = 60


@verb("generate", question="meshwright.api.generate:generate")
@click.argument("prompt", required=False)
@file_option(
    "--prompts", "prompts_path",
    help="Prompts of a file: one a line, or JSON lines of texts, `prompt` or `messages`.",
)  # fmt: skip
def command(*, asked: dict[str, Any], prompt: str | None, prompts_path: Path | None) -> None:
    """Continue prompts with a trained model.

    It computes on this machine's accelerator, or on its CPU. MODEL is a run folder, a run file, a folder of checkpoints
    or one of them, a Hugging Face folder, a LoRA adapter, or OWNER/NAME[@REVISION] on the Hugging Face hub. PROMPT is a
    text; without it and --prompts it is read from stdin, and the last line break is left out.

    The text goes to stdout while it is generated, times and rates to stderr. Without a temperature the most probable
    token is taken, unless the model's generation_config.json says otherwise. A text ends at the model's end token, at a
    stop string, after --max-tokens, or where the trained positions end.
    """
    if prompt is not None and prompts_path is not None:
        raise InputError("a prompt and --prompts are both given", hint="leave one of them out")
    requests = _requests(prompt, prompts_path)
    settings = question_of(generate).checked(asked)
    batch = settings.pop("batch")
    with progress(f"loading {settings['model']}"):
        generator, about = open_generator(**settings)
    note(*about)
    command = ("meshwright", *sys.argv[1:])
    adapters = generator.trained.adapters
    num_answers = len(requests) * (len(adapters.names) if adapters else 1)
    if num_answers == 1 and not wants_json():
        done = completions(generator, requests, batch=1, about=about, command=command, on_text=write_text)
        end_line(done.text)
    else:
        with progress("generating", total=num_answers) as advance:
            done = completions(generator, requests, batch=batch, about=about, command=command, on_batch=advance)
        if wants_json():
            emit_json(done)
        else:
            _print_all(done)
    note(*done.notes[len(about) :])
    say(done.summary())


def write_text(number: int, text: str) -> None:
    """Write a part of the text of a prompt; on a terminal without the control characters of the model."""
    emit_text(text)


def end_line(text: str) -> None:
    """End the line of a streamed text."""
    if not text.endswith("\n"):
        write_text(0, "\n")


def read_stdin() -> str:
    """All of stdin. Raises InputError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8", got=f"byte {error.object[error.start]:#04x}") from error


def _requests(prompt: str | None, path: Path | None) -> list[PromptLike]:
    if path is not None:
        read = load_with_torch("meshwright.training.generation.requests:read_requests", what="generation")
        found = read(path)
        note(*found.notes)
        return list(found.requests)
    if prompt is None:
        if sys.stdin.isatty():
            raise InputError(
                "there is no prompt", hint="give a text after the model, --prompts FILE, or pipe one to stdin"
            )
        prompt = read_stdin().removesuffix("\n").removesuffix("\r")
    return [prompt]


def _print_all(done: Generation) -> None:
    for number, completion in enumerate(done.completions, start=1):
        prompt = completion.prompt
        shown = " ".join((prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))).split())
        shown = shown if len(shown) <= SHOWN_PROMPT else f"{shown[:SHOWN_PROMPT]}..."
        by = f" {completion.adapter}:" if completion.adapter else ""
        write_text(number, f"[{number}]{by} {shown}\n{completion.text}")
        end_line(completion.text)
