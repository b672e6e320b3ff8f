"""Documents of a corpus, and the characters of them that are trained on.

A record of JSONL, Parquet or Hugging Face `datasets` becomes a document in one of three ways, tried in this order:
`messages` (a conversation: answers of the assistant are trained on), a prompt and its answer (the answer is
trained on), and `text` (everything is trained on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from meshwright.errors import InputError


class TextSpan(NamedTuple):
    """Characters `start` to `stop` (exclusive) of a document's text."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TextDocument:
    """One text that belongs together; attention never looks from one document into another."""

    text: str
    trained: tuple[TextSpan, ...] | None = None  # what the loss counts; None: everything
    is_rendered: bool = False  # the text already holds its own start and end of turn marks


class Chat(Protocol):
    """A format that writes conversations as text."""

    def render(self, messages: list[Mapping[str, Any]]) -> TextDocument:
        """The conversation as one document. Raises InputError when it cannot be written."""
        ...


ANSWER_KEYS = {"prompt": ("completion", "response", "answer"), "question": ("answer",)}
"""A key of the prompt, and the keys that may hold its answer."""


def document_from_record(
    record: Mapping[str, Any], *, where: str, text_key: str | None = None, chat: Chat
) -> TextDocument:
    """The document of one record; `where` begins every error ("corpus.jsonl:12").

    >>> from meshwright.training.data.chat import ChatML
    >>> d = document_from_record({"prompt": "1+1=", "completion": "2"}, where="x:1", chat=ChatML())
    >>> d.text, d.trained
    ('1+1=2', (TextSpan(start=4, stop=5),))
    """
    document = _document(record, where=where, text_key=text_key, chat=chat)
    try:
        document.text.encode()
    except UnicodeEncodeError as error:  # JSON can say "\\ud800"
        got = f"U+{ord(error.object[error.start]):04X}"
        raise InputError(f"{where}: half a character, which is not text", got=got) from error
    return document


def _document(record: Mapping[str, Any], *, where: str, text_key: str | None, chat: Chat) -> TextDocument:
    if text_key is not None:
        return TextDocument(text=_string(record, text_key, where))
    if isinstance(record.get("messages"), list):
        try:
            return chat.render(record["messages"])
        except InputError as error:
            raise InputError(f"{where}: {error.message}", hint=error.hint) from error
    for ask, answers in ANSWER_KEYS.items():
        answer = next((key for key in answers if ask in record and key in record), None)
        if answer is not None:
            prompt, completion = _string(record, ask, where), _string(record, answer, where)
            span = TextSpan(len(prompt), len(prompt) + len(completion))
            return TextDocument(text=prompt + completion, trained=(span,))
    if "text" in record:
        return TextDocument(text=_string(record, "text", where))
    raise InputError(
        f"{where}: a record without text",
        got=", ".join(map(str, record)) or "no keys",
        allowed="text; prompt and completion; messages",
        hint="name the key that holds the text: source: NAME?text=KEY",
    )


def _string(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        got = type(value).__name__ if key in record else f"the keys {', '.join(map(str, record))}"
        raise InputError(f"{where}: {key!r} is not text", got=got)
    return value
