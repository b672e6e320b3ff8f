"""Variables of a shell script and the expansion of words.

Supported are quotes, `$NAME`, `${NAME:-word}` and its variants, arrays and arithmetic in `$((...))`. A variable that is
not set expands to itself, `$NAME`: only a reader that needs its value raises an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.engines.megatron.megatron_lm.arithmetic import evaluate_integer
from meshwright.engines.megatron.shell_scripts.statements import Word, end_of_quoted

REFERENCE = re.compile(
    r"\$(?:\{(?P<braced>\w+|[@*])(?:\[(?P<all>[@*])\])?(?P<rest>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?P<plain>[A-Za-z_]\w*|\d)|(?P<every>[@*#]))"
)
NAME_IN_ARITHMETIC = re.compile(r"(?<![\w$}])\$?\{?([A-Za-z_]\w*)\}?")
ARITHMETIC = re.compile(r"\$\(\((?P<expression>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
MODIFIERS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")


@dataclass(kw_only=True)
class ShellVariables:
    """Variables and functions of a script: a value is text or the words of an array."""

    values: dict[str, list[Word] | str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # name -> body

    @property
    def positional(self) -> list[str]:
        """Return the values of `$@`."""
        return [str(self.values[str(k)]) for k in range(1, len(self.values) + 1) if str(k) in self.values]

    def shift(self) -> None:
        """Remove the first positional argument."""
        kept = self.positional[1:]
        for k in range(len(kept) + 1):
            self.values.pop(str(k + 1), None)
        self.values |= {str(k): value for k, value in enumerate(kept, start=1)}


def expand(
    word: Word, variables: ShellVariables, *, path: Path, begin: int = 0, split: bool = True
) -> list[Word]:
    """Expand a word. Unquoted text is split at blanks, and `"${ARRAY[@]}"` into its elements."""
    text = word.text[begin:]
    if text in ('"$@"', '"${@}"'):
        return [Word(text=one, line=word.line) for one in variables.positional]
    array = re.fullmatch(r'"\$\{(\w+)\[@\]\}"', text)
    if array and isinstance(found := variables.values.get(array.group(1)), list):
        return found
    done: list[str] = [""]
    is_quoted = False
    at = 0
    while at < len(text):
        if text[at] == "\\":
            done[-1] += text[at + 1 : at + 2]
            is_quoted, at = True, at + 2
            continue
        if text[at] in "'\"":
            stop = end_of_quoted(text, at, text[at], line=word.line, path=path)
            inside = text[at + 1 : stop - 1]
            done[-1] += (
                inside
                if text[at] == "'"
                else _substitute(_unescaped(inside), variables, word=word, path=path)
            )
            is_quoted, at = True, stop
            continue
        stop = next(
            (k for k in range(at, len(text)) if text[k] in "'\"\\" and not _is_nested(text, at, k)), len(text)
        )
        expanded = _substitute(text[at:stop], variables, word=word, path=path)
        if split:
            parts = re.split(r"\s+", expanded)
            done[-1] += parts[0]
            done += parts[1:]
        else:
            done[-1] += expanded
        at = stop
    return [Word(text=part, line=word.line) for part in done if part or (is_quoted and len(done) == 1)]


def _is_nested(text: str, begin: int, at: int) -> bool:
    """Return True if `at` is within `${...}` or `$(...)`, which have their own quotes."""
    return any(
        text.count(opening, begin, at) > text.count(closing, begin, at) for opening, closing in ("{}", "()")
    )


def _unescaped(text: str) -> str:
    return re.sub(r'\\(["\\`$])', r"\1", text).replace("\v", " ")


def _substitute(text: str, variables: ShellVariables, *, word: Word, path: Path) -> str:
    """Replace arithmetic and references to variables in `text`."""

    def reference(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"] or found["every"]
        value, rest = variables.values.get(name), found["rest"] or ""
        if name in ("@", "*", "#"):
            positional = variables.positional
            value = str(len(positional)) if name == "#" else " ".join(positional)
        modifier = next((one for one in MODIFIERS if rest.startswith(one)), "")
        other = rest.removeprefix(modifier).strip("\"'")
        is_set = value is not None and not (modifier.startswith(":") and value in ("", []))
        if modifier.endswith("+"):
            return _substitute(other, variables, word=word, path=path) if is_set else ""
        if not is_set and modifier.endswith(("-", "=")):
            default = _substitute(other, variables, word=word, path=path)
            if modifier.endswith("="):
                variables.values[name] = default
            return default
        if value is None or (rest and not modifier):
            return found.group()  # a reader that needs the value raises the error
        if isinstance(value, list):
            return " ".join(w.text for w in (value if found["all"] else value[:1]))
        return value

    text = ARITHMETIC.sub(lambda found: _arithmetic(found, variables, word=word, path=path), text)
    return REFERENCE.sub(reference, text)


def _arithmetic(found: re.Match[str], variables: ShellVariables, *, word: Word, path: Path) -> str:
    """Evaluate integer arithmetic; leave it unchanged if a variable in it is not set."""
    expression = NAME_IN_ARITHMETIC.sub(
        lambda name: str(variables.values.get(name[1], name[0])), found["expression"]
    )
    if not re.fullmatch(r"[\d\s+*/%()-]+", expression):
        return found.group()
    return str(evaluate_integer(expression, what=f"{path}:{word.line}"))
