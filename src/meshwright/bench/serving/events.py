"""Parse server-sent events (WHATWG HTML, section 9.2.6): the subset that the OpenAI interface uses.

    data: {"choices": [...]}       one event; several `data` lines of an event are joined by line feeds
    <empty line>                   ends the event; one without data is none
    : ping                         a comment
    event: NAME                    the event's name: `ping` and its like say nothing, `error` has the reason
    data: [DONE]                   the end of the answer

Lines end with a line feed, a carriage return, or both. Bytes arrive in any split: `EventBuffer.feed` returns the events
that are complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.json_values import parse_json

DONE = b"[DONE]"
LARGEST_EVENT_BYTES = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIELDS = (b"data", b"event", b"id", b"retry", b"error")
SILENT_EVENTS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive")


class MalformedEventError(ValueError):
    """Bytes that are no event, or JSON of another form."""


class EventBuffer:
    """Data of complete events, from bytes in any split."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that `data` completes. Raises MalformedEventError above 16 MiB."""
        text = self._rest + data
        if self._is_first and len(text) >= len(BYTE_ORDER_MARK):
            text, self._is_first = text.removeprefix(BYTE_ORDER_MARK), False
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # a line feed may come with the next bytes
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > LARGEST_EVENT_BYTES:
            raise MalformedEventError(f"an event is longer than {LARGEST_EVENT_BYTES} bytes")
        return [found for block in blocks if (found := _data(block)) is not None]

    def end(self) -> list[bytes]:
        """Return the event that the end of the stream completes, if any."""
        rest, self._rest = self._rest.replace(b"\r", b"\n"), b""
        found = _data(rest)
        return [] if found is None else [found]


def _data(block: bytes) -> bytes | None:
    """Data of one event; None where there is none, for comments, and for events that say nothing."""
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
        return block[6:] or None
    fields: dict[bytes, list[bytes]] = {}
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        if not line.strip() or (colon and not name):
            continue
        if name not in FIELDS:
            raise MalformedEventError(f"not a line of an event: {line[:80]!r}")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    event, data = fields.get(b"event", [b""])[-1].strip(), b"\n".join(fields.get(b"data", []))
    if event in SILENT_EVENTS:
        return None
    if b"error" in fields:  # llama.cpp, before its errors were events
        event, data = b"error", b"\n".join(fields[b"error"])
    if event == b"error":
        try:
            found = parse_json(data)
        except ValueError:
            found = data.decode("utf-8", errors="replace")
        if isinstance(found, dict) and "error" in found:
            return data
        return json.dumps({"error": found or "an event without a reason"}).encode()
    return data or None


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
    between them is a token: its bytes are no complete character yet. A part of a tool call is one, too.
    """
    try:
        found = parse_json(data)
    except ValueError:
        raise MalformedEventError(f"not JSON: {data[:80]!r}") from None
    if not isinstance(found, dict):
        raise MalformedEventError(f"not a mapping: {data[:80]!r}")
    if error := found.get("error"):
        return Chunk(ChunkKind.EMPTY, error=error_text(error))
    usage, choices = found.get("usage"), found.get("choices")
    if not isinstance(usage, dict | None) or not isinstance(choices, list | None):
        raise MalformedEventError(f"usage or choices are of another kind: {data[:80]!r}")
    if not choices:
        if "choices" not in found and usage is None:
            raise MalformedEventError(f"neither choices nor usage: {data[:80]!r}")
        return Chunk(ChunkKind.EMPTY, usage=usage)
    choice = choices[0]
    if not isinstance(choice, dict):
        raise MalformedEventError(f"a choice is not a mapping: {data[:80]!r}")
    finish = choice.get("finish_reason")
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        content = _joined(delta.get("content"))
        text = content or delta.get("refusal") or _called(delta) or content
        is_first = "role" in delta
    else:
        reasoning, text, is_first = None, choice.get("text"), False
    if reasoning:
        return Chunk(ChunkKind.REASONING, str(reasoning), finish, usage)
    if text or (text == "" and not is_first and finish is None):
        return Chunk(ChunkKind.ANSWER, str(text), finish, usage)
    return Chunk(ChunkKind.EMPTY, "", finish, usage)


def _joined(content: object) -> object:
    """The text of content in parts, thoughts included, as Mistral sends it; other content as it is."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(str(_joined(part.get("text") or part.get("thinking")) or "") for part in parts)


def _called(delta: dict[str, Any]) -> str:
    """Names and arguments of the calls of tools in a chunk."""
    calls = [delta["function_call"]] if isinstance(delta.get("function_call"), dict) else []
    for call in delta.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        calls += [function] if isinstance(function, dict) else []
    return "".join(str(call.get(key) or "") for call in calls for key in ("name", "arguments"))


def error_text(error: object) -> str:
    """The message of an error in JSON, on one line."""
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]
