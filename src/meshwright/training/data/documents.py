"""Documents of a corpus, and the characters of them that are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshwright.training.data.conversations import Conversation


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

    def render(self, conversation: Conversation) -> TextDocument:
        """The conversation as one document; the loss counts the answers that are `trained`.

        Raises InputError when the conversation cannot be written, or an answer has no fixed place in the text.
        """
        ...

    def prompt(self, conversation: Conversation) -> str:
        """The text after which the assistant speaks. Raises InputError when the messages cannot be written."""
        ...

    def reads(self, key: str) -> bool:
        """Return True if the format writes this key of a message, or `tools`."""
        ...
