"""Conditions of a shell script, `[ ... ]` and `[[ ... ]]`: True, False, or None if it depends on files or programs.

A variable that is not set is empty, as in the shell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from meshwright.engines.megatron.shell_scripts.expansion import Expander
from meshwright.engines.megatron.shell_scripts.integers import UnknownValueError
from meshwright.engines.megatron.shell_scripts.state import UnknownText
from meshwright.engines.megatron.shell_scripts.syntax import Literal, ShellWord
from meshwright.errors import InputError

ON_FILES = frozenset(f"-{letter}" for letter in "abcdefghkoprstuwxLSNOG")
FILE_ORDERS = ("-nt", "-ot", "-ef")
ORDERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge,
    "-le": operator.le,
}  # fmt: skip
EQUALS = ("=", "==", "!=")
Token = ShellWord | str | UnknownText


def both(left: bool | None, right: bool | None) -> bool | None:
    """Return `left and right` of values that may be unknown."""
    return False if left is False or right is False else None if left is None or right is None else True


def negated(value: bool | None) -> bool | None:
    """Return `not value` of a value that may be unknown."""
    return None if value is None else not value


def bracket_holds(words: list[ShellWord], expander: Expander, *, line: int) -> bool | None:
    """Return the value of `[ ... ]` with these words between the brackets."""
    expander = replace(expander, unset_is_empty=True, line=line)
    tokens: list[Token] = []
    for word in words:
        if word.bare in ("-a", "-o", "!", "(", ")"):
            tokens.append({"-a": "&&", "-o": "||"}.get(word.bare, word.bare))
        else:
            tokens += _tokens(word, expander)
    if not tokens:
        return False
    return _Test(tokens=tokens, expander=expander, has_patterns=False).value()


def _tokens(word: ShellWord, expander: Expander) -> list[Token]:
    """Return a word, or the words into which it is split."""
    whole = expander.joined(word)
    if isinstance(whole, UnknownText):
        return [whole]
    return [ShellWord(parts=(Literal(text=one.text),), line=word.line) for one in expander.words(word)]


def test_holds(tokens: tuple[ShellWord | str, ...], expander: Expander, *, line: int) -> bool | None:
    """Return the value of `[[ ... ]]`."""
    expander = replace(expander, unset_is_empty=True, line=line)
    found: list[Token] = ["!" if isinstance(one, ShellWord) and one.bare == "!" else one for one in tokens]
    return _Test(tokens=found, expander=expander, has_patterns=True).value()


@dataclass(kw_only=True)
class _Test:
    """A position in the tokens of a condition."""

    tokens: list[Token]
    expander: Expander
    has_patterns: bool  # [[ ]]: the right side of == is a pattern
    at: int = 0

    def value(self) -> bool | None:
        held = self.either()
        if self.at != len(self.tokens):
            raise self.error()
        return held

    def error(self) -> InputError:
        shown = " ".join(
            token if isinstance(token, str) else "$?" if isinstance(token, UnknownText) else self.shown(token)
            for token in self.tokens
        )
        return InputError(f"{self.expander.where}: a condition that is not supported", got=shown)

    def shown(self, word: ShellWord) -> str:
        return "".join(part.source if hasattr(part, "source") else part.text for part in word.parts)  # pyright: ignore

    def next(self, *operators: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] in operators:
            self.at += 1
            return True
        return False

    def either(self) -> bool | None:
        held = self.each()
        while self.next("||"):
            held = negated(both(negated(held), negated(self.each())))
        return held

    def each(self) -> bool | None:
        held = self.one()
        while self.next("&&"):
            held = both(held, self.one())
        return held

    def one(self) -> bool | None:
        if self.next("!"):
            return negated(self.one())
        if self.next("("):
            held = self.either()
            if not self.next(")"):
                raise self.error()
            return held
        return self.primary()

    def primary(self) -> bool | None:
        """Evaluate a test of one word or a comparison of two."""
        rest = self.tokens[self.at :]
        count = next((k for k, token in enumerate(rest) if token in ("&&", "||", ")")), len(rest))
        if not count:
            raise self.error()
        kind = self.bare(rest[0]) if count == 2 else self.bare(rest[1]) if count == 3 else ""
        self.at += count
        match count:
            case 1:
                text = self.text(rest[0])
                return None if isinstance(text, UnknownText) else text != ""
            case 2 if kind in ("-n", "-z"):
                text = self.text(rest[1])
                return None if isinstance(text, UnknownText) else (text == "") == (kind == "-z")
            case 2 if kind == "-v":
                return self.expander.variables.get(str(self.text(rest[1]))) is not None
            case 2 if kind in ON_FILES:
                return None
            case 2 if not {self.bare(rest[0]), self.bare(rest[1])}.isdisjoint((*ORDERS, *EQUALS)):
                return False  # `[ $UNSET -gt 4 ]` is an error, which the shell takes for False
            case 3 if kind in ORDERS:
                return self.ordered(rest[0], kind, rest[2])
            case 3 if kind in EQUALS:
                held = self.equal(rest[0], rest[2])
                return negated(held) if kind == "!=" else held
            case 3 if kind in ("<", ">"):
                left, right = self.text(rest[0]), self.text(rest[2])
                if isinstance(left, UnknownText) or isinstance(right, UnknownText):
                    return None
                return left < right if kind == "<" else left > right
            case 3 if kind == "=~" or kind in FILE_ORDERS:
                return None  # expressions of the C library are not evaluated
        raise self.error()

    def bare(self, token: Token) -> str:
        return token if isinstance(token, str) else (token.bare or "") if isinstance(token, ShellWord) else ""

    def text(self, token: Token) -> str | UnknownText:
        if isinstance(token, str | UnknownText):
            return token
        return self.expander.joined(token)

    def equal(self, left: Token, right: Token) -> bool | None:
        first = self.text(left)
        second = (
            self.expander.pattern(right) if self.has_patterns and isinstance(right, ShellWord) else self.text(right)
        )
        if isinstance(first, UnknownText) or isinstance(second, UnknownText):
            return None
        return fnmatchcase(first, second) if self.has_patterns else first == second

    def ordered(self, left: Token, kind: str, right: Token) -> bool | None:
        numbers = []
        for token in (left, right):
            text = self.text(token)
            if isinstance(text, UnknownText):
                return None
            if self.has_patterns:
                try:
                    numbers.append(self.expander.integer(text, unset_is_zero=True))
                except UnknownValueError:
                    return None
            elif text.strip().removeprefix("-").isdigit():
                numbers.append(int(text))
            else:
                return False  # an error, which the shell takes for False
        return ORDERS[kind](*numbers)
