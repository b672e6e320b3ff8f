"""The end of an answer in a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.tokenizer import Tokenizer

_MARK = "MESHWRIGHT"


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """End of an answer in the chat template: tokens of its own, or text."""

    tokens: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()


def turn_end(tokenizer: Tokenizer) -> TurnEnd:
    """The end of an answer in the tokenizer's chat template: a special token, or the first line of text."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    try:
        after = tokenizer.chat.render(Conversation(messages=messages)).text.rpartition(_MARK)[2].strip()
    except InputError:  # a template for other conversations: the end tokens are all that ends an answer
        return TurnEnd()
    if not after:
        return TurnEnd()
    first = int(tokenizer.encode([after])[0][0])
    if not tokenizer.decode([first]):
        return TurnEnd(tokens=(first,))
    return TurnEnd(stops=(after.splitlines()[0],))
