"""Parse server-sent events (WHATWG HTML, section 9.2.6): the subset that the OpenAI interface uses.

    data: {"choices": [...]}       one event; several `data` lines of an event are joined by line feeds
    <empty line>                   ends the event
    : ping                         a comment
    data: [DONE]                   the end of the answer

Bytes arrive in any split: `EventBuffer.feed` returns the events that are complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DONE = b"[DONE]"
LARGEST_EVENT_BYTES = 16 * 2**20


class MalformedEventError(ValueError):
    """Bytes that are no event, or JSON of another form."""


class EventBuffer:
    """Data of complete events, from bytes in any split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that `data` completes. Raises MalformedEventError above 16 MiB."""
        text = self._rest + data
        if b"\r" in text:  # a line feed may come with the next bytes
            text = text.replace(b"\r\n", b"\n")
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > LARGEST_EVENT_BYTES:
            raise MalformedEventError(f"an event is longer than {LARGEST_EVENT_BYTES} bytes")
        return [found for block in blocks if (found := _data(block)) is not None]

    def end(self) -> list[bytes]:
        """Return the event that the end of the stream completes, if any."""
        rest, self._rest = self._rest, b""
        found = _data(rest.replace(b"\r", b""))
        return [] if found is None else [found]


def _data(block: bytes) -> bytes | None:
    """Data of one event; None for comments and other fields."""
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    if lines:
        return b"\n".join(lines)
    known = (b":", b"event:", b"id:", b"retry:")
    strange = [line for line in block.split(b"\n") if line.strip() and not line.startswith(known)]
    if strange:
        raise MalformedEventError(f"not a line of an event: {strange[0][:80]!r}")
    return None


class ChunkKind(StrEnum):
    """Content of a chunk."""

    ANSWER = "answer"
    REASONING = "reasoning"
    EMPTY = "empty"  # a role, the finish, or the usage


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of an answer."""

    kind: ChunkKind
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None


def read_chunk(data: bytes) -> Chunk:
    """Read the JSON of one event of `/v1/completions` or `/v1/chat/completions`. Raises MalformedEventError.

    A chunk with a role and no text is no token, nor is an empty chunk that carries the finish. An empty chunk
    between them is a token: its bytes are no complete character yet.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedEventError(f"not JSON: {data[:80]!r}") from None
    if not isinstance(found, dict):
        raise MalformedEventError(f"not a mapping: {data[:80]!r}")
    if error := found.get("error"):
        return Chunk(ChunkKind.EMPTY, error=error_text(error))
    usage, choices = found.get("usage"), found.get("choices")
    if not isinstance(usage, dict | None) or not isinstance(choices, list | None):
        raise MalformedEventError(f"usage or choices are of another kind: {data[:80]!r}")
    if not choices:
        if choices is None and usage is None:
            raise MalformedEventError(f"neither choices nor usage: {data[:80]!r}")
        return Chunk(ChunkKind.EMPTY, usage=usage)
    choice = choices[0]
    if not isinstance(choice, dict):
        raise MalformedEventError(f"a choice is not a mapping: {data[:80]!r}")
    finish = choice.get("finish_reason")
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text, is_first = delta.get("content"), "role" in delta
    else:
        reasoning, text, is_first = None, choice.get("text"), False
    if reasoning:
        return Chunk(ChunkKind.REASONING, str(reasoning), finish, usage)
    if text or (text == "" and not is_first and finish is None):
        return Chunk(ChunkKind.ANSWER, str(text), finish, usage)
    return Chunk(ChunkKind.EMPTY, "", finish, usage)


def error_text(error: object) -> str:
    """The message of an error in JSON, on one line."""
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]
