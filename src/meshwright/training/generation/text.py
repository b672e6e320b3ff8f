"""Turn tokens into text while they come: whole characters only, and no characters that may begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.training.data.tokenizer import Tokenizer

BROKEN = "\ufffd"


class TextStream:
    """The text of a completion, token by token. The parts that `push` and `finish` return make up `text`.

    A character of several tokens is held back until it is whole, and so is a text that begins a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._first = self._known = 0  # tokens before `_known` are text; decoding begins at `_first`
        self._held = ""  # decoded, not given out
        self.text = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Append a token and return the text that is certain now."""
        self._tokens.append(token)
        self._held += self._decode()
        end = self._end_of(self._held)
        if end is not None:
            self.is_stopped = True
        else:
            end = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[:end], self._held[end:]
        self.text += certain
        return certain

    def finish(self) -> str:
        """Return the text held back. A character that never became whole is U+FFFD."""
        if self.is_stopped:
            return ""
        rest = self._held + self._decode(is_last=True)
        self._held = ""
        end = self._end_of(rest)
        self.is_stopped, rest = end is not None, rest[:end]
        self.text += rest
        return rest

    def _decode(self, *, is_last: bool = False) -> str:
        """The text of the tokens that came since the last whole character.

        They are decoded after the tokens before them: some tokenizers write a token's space only there.
        """
        before = self._tokenizer.decode(self._tokens[self._first : self._known])
        with_new = self._tokenizer.decode(self._tokens[self._first :])
        if with_new.endswith(BROKEN) and not is_last:
            return ""
        self._first, self._known = self._known, len(self._tokens)
        return with_new[len(before) :]

    def _end_of(self, text: str) -> int | None:
        """Place of the first stop string; None where there is none."""
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
