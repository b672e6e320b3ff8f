"""Arithmetic of a shell: `$((...))`, `((...))` and `[[ a -lt b ]]`. Integers, with the operators of C."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.engines.megatron.shell_scripts.state import ShellVariables, UnknownText
from meshwright.errors import InputError

TOKEN = re.compile(
    r"\d+#\w+|0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*"
    r"|\+\+|--|\*\*=?|<<=?|>>=?|[-+*/%<>=!&|^]=|&&|\|\||[-+*/%<>=!&|^~?:,()]"
)
ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=")
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
          ("*", "/", "%"), ("**",))  # fmt: skip
MAX_BITS = 64
MAX_DEPTH = 20  # of variables that contain expressions


class UnknownValueError(Exception):
    """An expression contains a value that is not known."""


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero, as in C


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a or b)), "&&": lambda a, b: int(bool(a and b)), "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b, "&": lambda a, b: a & b, "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b), "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b), "<<": lambda a, b: a << min(b, MAX_BITS), ">>": lambda a, b: a >> min(b, MAX_BITS),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": _quotient,
    "%": lambda a, b: a - b * _quotient(a, b), "**": lambda a, b: a ** min(b, MAX_BITS),
}  # fmt: skip


def integer_of(text: str, variables: ShellVariables, *, where: str, unset_is_zero: bool, depth: int = 0) -> int:
    """Return the value of an expression and carry out its assignments.

    Raises UnknownValueError for a value that is not known, InputError for what is no expression.
    """
    tokens = TOKEN.findall(text)
    parser = _Expression(
        tokens=tokens, variables=variables, where=where, text=text, unset_is_zero=unset_is_zero, depth=depth
    )
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise parser.error()
    if not tokens:
        return 0
    try:
        value = parser.comma()
    except (ZeroDivisionError, ValueError, RecursionError):
        raise InputError(f"{where}: arithmetic without a value", got=text) from None
    if parser.at != len(tokens):
        raise parser.error()
    return (value + 2 ** (MAX_BITS - 1)) % 2**MAX_BITS - 2 ** (MAX_BITS - 1)


@dataclass(kw_only=True)
class _Expression:
    """A position in the tokens of an expression."""

    tokens: list[str]
    variables: ShellVariables
    where: str
    text: str
    unset_is_zero: bool
    depth: int
    at: int = 0
    skips: int = 0  # > 0 in an operand whose value is not used: it has no effects

    def error(self) -> InputError:
        return InputError(f"{self.where}: arithmetic that is not supported", got=self.text)

    def next(self, *allowed: str) -> str:
        """Pass one of `allowed` and return it, or return an empty text."""
        token = self.peek()
        if token not in allowed:
            return ""
        self.at += 1
        return token

    def peek(self, ahead: int = 0) -> str:
        """Return a token that follows, or an empty text behind the last one."""
        return "".join(self.tokens[self.at + ahead : self.at + ahead + 1])

    def comma(self) -> int:
        value = self.assignment()
        while self.next(","):
            value = self.assignment()
        return value

    def assignment(self) -> int:
        name, operator = self.peek(), self.peek(1)
        if not name.isidentifier() or operator not in ASSIGNING:
            return self.choice()
        self.at += 2
        value = self.assignment()
        return self.store(name, value if operator == "=" else OPERATIONS[operator[:-1]](self.variable(name), value))

    def choice(self) -> int:
        value = self.level(0)
        if not self.next("?"):
            return value
        first = self.skipped(self.comma, is_used=bool(value))
        if not self.next(":"):
            raise self.error()
        second = self.skipped(self.choice, is_used=not value)
        return first if value else second

    def skipped(self, parse: Callable[[], int], *, is_used: bool) -> int:
        self.skips += not is_used
        value = parse()
        self.skips -= not is_used
        return value

    def level(self, k: int) -> int:
        if k == len(LEVELS):
            return self.unary()
        value = self.level(k + 1)
        while operator := self.next(*LEVELS[k]):
            is_used = not ((operator == "&&" and not value) or (operator == "||" and value))
            below = k if operator == "**" else k + 1  # powers associate to the right
            other = self.skipped(lambda below=below: self.level(below), is_used=is_used)
            if self.skips:
                continue
            value = OPERATIONS[operator](value, other) if is_used else int(bool(value))
        return value

    def unary(self) -> int:
        if operator := self.next("++", "--"):
            name = self.peek()
            if not name.isidentifier():
                return self.unary()
            self.at += 1
            return self.store(name, self.variable(name) + (1 if operator == "++" else -1))
        if operator := self.next("!", "-", "+", "~"):
            value = self.unary()
            return {"!": int(not value), "-": -value, "+": value, "~": ~value}[operator]
        if self.next("("):
            value = self.comma()
            if not self.next(")"):
                raise self.error()
            return value
        token = self.peek()
        self.at += 1
        if token[:1].isdigit():
            # Decimal, octal with a leading 0, hexadecimal, or BASE#DIGITS.
            base, _, digits = token.rpartition("#")
            if base:
                return int(digits, int(base))
            if token[:2] in ("0x", "0X"):
                return int(token, 16)
            return int(token, 8) if token[0] == "0" and len(token) > 1 else int(token)
        if not token.isidentifier():
            raise self.error()
        value = self.variable(token)
        if operator := self.next("++", "--"):
            self.store(token, value + (1 if operator == "++" else -1))
        return value

    def store(self, name: str, value: int) -> int:
        if not self.skips:
            self.variables.set(name, str(value))
        return value

    def variable(self, name: str) -> int:
        if self.skips:
            return 1
        value = self.variables.get(name)
        if isinstance(value, tuple):
            value = value[0].text if value else ""
        if isinstance(value, UnknownText):
            raise UnknownValueError(value.reason)
        if value is None and not self.unset_is_zero:
            raise UnknownValueError("")
        if self.depth > MAX_DEPTH:
            raise self.error()
        return integer_of(
            value or "", self.variables, where=self.where, unset_is_zero=self.unset_is_zero, depth=self.depth + 1
        )
