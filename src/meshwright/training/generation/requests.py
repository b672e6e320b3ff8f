"""Turn text and conversations into tokens of prompts, with room for the answer.

A prompt file has a prompt a line. In JSON lines (`.jsonl`, `.ndjson`) a line is a text, or an object with `prompt`,
`text` or `messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.generation import GenerationEnding
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.json_stream import json_line_values
from meshwright.training.data.records import whole_characters
from meshwright.training.data.tokenizer import Tokenizer

DEFAULT_TOKENS = 256
"""Most tokens of a completion, unless the caller sets a number."""

Messages = Sequence[Mapping[str, Any]]
Request = str | Messages
"""A text to continue, or a conversation that the assistant answers."""

_JSON_LINES = (".jsonl", ".ndjson")
_KEYS = ("prompt", "text", "messages")
_OF_TEMPLATES = ("system", "tools", "functions", "chat_template_kwargs", "documents")
"""Keys that would change the text of the prompt."""

_whole = partial(whole_characters, place=" in a prompt")


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """The prompts of a file, and notes on its unused keys."""

    requests: Sequence[Request]
    notes: tuple[str, ...] = ()


def read_requests(path: Path) -> PromptFile:
    """Read the prompts of a file. Raises InputError with file and line for a line that is no prompt."""
    unused: Counter[str] = Counter()
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix.lower() in _JSON_LINES:
                values = json_line_values(file, name=str(path))
                found = [_request(value, where=where, unused=unused) for where, value in values]
            else:
                found = [line.removesuffix("\n") for line in file if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read the prompts: {error.strerror or error}", got=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8", got=f"byte {error.object[error.start]:#04x}") from error
    if not found:
        raise InputError("the file has no prompt", got=str(path))
    listed = ", ".join(f"{key} ({number:,})" for key, number in unused.items())
    return PromptFile(requests=found, notes=(f"keys of {path} that are not used: {listed}",) if unused else ())


def _request(record: object, *, where: str, unused: Counter[str]) -> Request:
    if isinstance(record, str):
        return record
    names = [key for key in _KEYS if isinstance(record, dict) and key in record]
    if len(names) != 1:
        got = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{where}: not a prompt", got=got or "no keys", allowed=f"text, or one of {', '.join(_KEYS)}")
    assert isinstance(record, dict)
    if changing := [key for key in _OF_TEMPLATES if record.get(key)]:
        raise InputError(
            f"{where}: not supported in a prompt", got=", ".join(changing), allowed=", ".join(_KEYS),
            hint="a system message may be the first of messages",
        )  # fmt: skip
    unused.update(key for key in record if key != names[0])
    value = record[names[0]]
    is_list = isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)
    if not (is_list if names[0] == "messages" else isinstance(value, str)):
        raise InputError(
            f"{where}: {names[0]}", got=type(value).__name__, allowed="text; messages are a list of objects"
        )
    return value


def tokens_of(request: Request, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt: a text with the start token, a conversation in the chat template.

    An empty text without a start token becomes the end token, after which training begins a document.
    """
    if not isinstance(request, str):
        asked = tokenizer.chat.prompt(Conversation(messages=list(request)))
        return [int(i) for i in tokenizer.encode([_whole(asked)])[0]]
    start = [] if tokenizer.start is None else [tokenizer.start]
    return start + [int(i) for i in tokenizer.encode([_whole(request)])[0]] or [tokenizer.end]


def notes_on_spaces(requests: Sequence[Request], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Note on prompts whose last space the tokenizer would write as part of the next word."""
    with_space = [number for number, text in enumerate(requests, 1) if isinstance(text, str) and text.endswith(" ")]
    found = [number for number in with_space if not _is_beginning(str(requests[number - 1]), tokenizer)]
    if not found:
        return ()
    which = f"prompt {found[0]} ends" if len(found) == 1 else f"{len(found):,} prompts (the first: {found[0]}) end"
    return (
        f"{which} in a space, which this tokenizer writes as part of the next word: training has hardly a separate "
        "space there, so leave it out",
    )


def _is_beginning(text: str, tokenizer: Tokenizer) -> bool:
    """True if the tokens of `text` are the first ones of `text` and a word, whatever its first letter."""
    prompt, *followed = (ids.tolist() for ids in tokenizer.encode([_whole(text), *(text + x for x in ascii_letters)]))
    return all(ids[: len(prompt)] == prompt for ids in followed)


def room_for(
    tokens: Sequence[int], *, number: int, max_tokens: int | None, positions: int | None
) -> tuple[int, GenerationEnding]:
    """Return the number of tokens that may follow a prompt, and which limit it is: `max_tokens` or `positions`.

    Raises InputError if a prompt needs more positions than the model is trained for (None: they are not limited).
    """
    wanted = DEFAULT_TOKENS if max_tokens is None else max_tokens
    room = wanted if positions is None else positions - len(tokens)
    if room < (1 if max_tokens is None else wanted):
        asked = "" if max_tokens is None else f" and {wanted:,} to generate"
        raise InputError(
            f"prompt {number + 1} is too long: {len(tokens):,} tokens{asked}",
            allowed=f"{positions:,}, the positions that the model is trained for",
            hint="shorten the prompt or lower --max-tokens; --beyond-positions generates past them",
        )
    return (room, GenerationEnding.POSITIONS) if room < wanted else (wanted, GenerationEnding.MAX_TOKENS)
