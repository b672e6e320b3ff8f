"""Syntax tree of a shell script: what `parsing` returns and `interpreter` executes.

A word consists of parts: literal text, parameters (`$NAME`, `${NAME:-word}`), arithmetic (`$((...))`) and outputs of
commands (`$(...)`). Each part knows whether it is quoted, because unquoted values are split at blanks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument after expansion."""

    text: str
    line: int
    unknown: str = ""  # why the text still has a `$`: the reason that a value is unknown
    choices: tuple[tuple[Word, ...], ...] = ()  # all that the unknown word may stand for; none: anything


@dataclass(frozen=True, kw_only=True)
class Literal:
    """Text without `$`."""

    text: str
    is_quoted: bool = False


@dataclass(frozen=True, kw_only=True)
class ShellParameter:
    """A reference to a variable with an optional operation on its value."""

    name: str
    source: str  # as it is written
    subscript: str = ""  # @, *, or an arithmetic expression
    prefix: str = ""  # `#`: the length; `!`: a reference by name
    operation: str = ""  # :-, %, /, ...
    operand: tuple[Part, ...] = ()
    is_quoted: bool = False


@dataclass(frozen=True, kw_only=True)
class ShellArithmetic:
    """`$((expression))`."""

    expression: tuple[Part, ...]
    source: str
    is_quoted: bool = False


@dataclass(frozen=True, kw_only=True)
class ShellOutput:
    """`$(commands)`."""

    commands: tuple[AndOrList, ...]
    source: str
    is_quoted: bool = False


Part = Literal | ShellParameter | ShellArithmetic | ShellOutput


@dataclass(frozen=True, kw_only=True)
class ShellWord:
    """A word before expansion."""

    parts: tuple[Part, ...]
    line: int

    @property
    def bare(self) -> str | None:
        """Return the text of an unquoted literal; None for any other word."""
        if all(isinstance(part, Literal) and not part.is_quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, kw_only=True)
class ShellAssignment:
    """`NAME=word`, `NAME+=word`, `NAME[subscript]=word` or `NAME=(words)`."""

    name: str
    value: ShellWord | tuple[ShellWord, ...]
    line: int
    subscript: str = ""
    is_appended: bool = False


@dataclass(kw_only=True)
class HereDocument:
    """The text between `<<END` and `END`, which is read after the line of the command."""

    end: str
    is_literal: bool  # END is quoted
    strips_tabs: bool  # <<-
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """Assignments and words. Redirections other than here-documents do not concern the arguments."""

    assignments: tuple[ShellAssignment, ...]
    words: tuple[ShellWord | ShellAssignment, ...]  # assignments: those after export, declare, local, ...
    documents: tuple[HereDocument, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class ShellPipeline:
    """Commands joined by `|`."""

    commands: tuple[Command, ...]
    is_negated: bool = False


@dataclass(frozen=True, kw_only=True)
class AndOrList:
    """Pipelines joined by `&&` and `||`."""

    first: ShellPipeline
    rest: tuple[tuple[str, ShellPipeline], ...] = ()
    is_background: bool = False


Body = tuple[AndOrList, ...]


@dataclass(frozen=True, kw_only=True)
class IfCommand:
    """`if`, with every `elif`."""

    branches: tuple[tuple[Body, Body], ...]  # condition, body
    otherwise: Body


@dataclass(frozen=True, kw_only=True)
class CaseCommand:
    """`case`. Each clause has patterns, a body and its end: `;;`, `;&` or `;;&`."""

    word: ShellWord
    clauses: tuple[tuple[tuple[ShellWord, ...], Body, str], ...]


@dataclass(frozen=True, kw_only=True)
class ForCommand:
    """`for NAME in words`; without words over the positional arguments."""

    name: str
    words: tuple[ShellWord, ...] | None
    body: Body
    line: int


@dataclass(frozen=True, kw_only=True)
class CountingCommand:
    """`for ((begin; condition; step))`."""

    expressions: tuple[tuple[Part, ...], ...]
    body: Body
    line: int


@dataclass(frozen=True, kw_only=True)
class WhileCommand:
    """`while` and `until`."""

    condition: Body
    body: Body
    is_until: bool
    line: int


@dataclass(frozen=True, kw_only=True)
class GroupCommand:
    """`{ ...; }` and `( ... )`, which has variables of its own."""

    body: Body
    is_subshell: bool = False


@dataclass(frozen=True, kw_only=True)
class FunctionDefinition:
    """`name() { ... }`."""

    name: str
    body: Command
    line: int


@dataclass(frozen=True, kw_only=True)
class TestCommand:
    """`[[ ... ]]`: words, and the operators of the grammar as text."""

    tokens: tuple[ShellWord | str, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class ArithmeticCommand:
    """`((expression))`."""

    expression: tuple[Part, ...]
    line: int


Command = (
    SimpleCommand
    | IfCommand
    | CaseCommand
    | ForCommand
    | CountingCommand
    | WhileCommand
    | GroupCommand
    | FunctionDefinition
    | TestCommand
    | ArithmeticCommand
)
