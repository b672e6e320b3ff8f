"""Shell scripts that call Megatron-LM, read without running them: which words reach `pretrain_gpt.py`.

Read are assignments, arrays, `+=`, quotes, continued lines, `${NAME:-word}` and its kin, sums in `$((...))`, and `if`,
`case`, `&&` and `||` on words. A name that nobody has set stands for itself, `$NAME`: who needs its value refuses it,
and a condition takes it to be empty, as the shell does. Sourced files are not read. Loops and functions that set
names or call the program are refused: what they do would be lost silently.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from meshwright.engines.megatron.megatron_lm.arithmetic import whole
from meshwright.engines.megatron.shell_scripts.blocks import without_blocks
from meshwright.errors import InputError

PROGRAM = re.compile(r"(^|/)(pretrain|train|finetune|posttrain)\w*\.py$")
LOOPS = ("for", "while", "until", "select")
TESTS = {"[[": "]]", "[": " ]", "((": "))"}
COMPARED = re.compile(r"(.+?)(<=|>=|==|!=|<|>)(.+)")
INSTEAD = (
    "or put echo before torchrun in a copy, run that, and import what it prints, in a file called NAME.args"
)
BEFORE = ("export", "local", "readonly", "declare", "typeset", "exec", "time", "srun", "eval")
ON_FILES = re.compile(r"[\s\[!]*-[bcdefghkprsuwxLS]\s")
ORDERS = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-lt": (-1,), "-ge": (0, 1), "-le": (-1, 0)}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
REFERENCE = re.compile(
    r"\$(?:\{(?P<braced>\w+|[@*])(?:\[(?P<all>[@*])\])?(?P<rest>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?P<plain>[A-Za-z_]\w*|\d)|(?P<every>[@*#]))"
)
NAME_IN_SUM = re.compile(r"(?<![\w$}])\$?\{?([A-Za-z_]\w*)\}?")
REDIRECTION = re.compile(r"\d*[<>]")
SUM = re.compile(r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")


class Branch(Enum):
    """What becomes of one branch of an `if`."""

    RUNS = "runs"
    WAITS = "waits"  # none ran yet
    DONE = "done"  # another one ran
    UNKNOWN = "unknown"  # asks for files, which are not looked at


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument, and the line that it stands on."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One command as it is written: its words are not expanded yet."""

    words: tuple[Word, ...]
    line: int
    then: str = ""  # `&&` or `||` behind it


@dataclass(kw_only=True)
class Names:
    """What is set while a script is read: text, or an array's words."""

    values: dict[str, list[Word] | str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # their bodies

    @property
    def positional(self) -> list[str]:
        """What stands in `$@`."""
        return [str(self.values[str(k)]) for k in range(1, len(self.values) + 1) if str(k) in self.values]

    def shift(self) -> None:
        """Every positional argument takes the place of the one before it."""
        kept = self.positional[1:]
        for k in range(len(kept) + 1):
            self.values.pop(str(k + 1), None)
        self.values |= {str(k): value for k, value in enumerate(kept, start=1)}


def words_of(text: str, *, path: Path, given: Iterable[str] = ()) -> list[Word]:
    """The arguments behind the training program. `given` are NAME=value and positional arguments of the script.

    Raises InputError, with the line, for a script that calls none or holds what is not read.
    """
    names = Names()
    position = 0
    for word in given:
        name, equals, value = word.partition("=")
        position += not equals
        names.values[name if equals else str(position)] = value if equals else word
    try:
        text, names.functions = without_blocks(text)
        words = _run(statements(text, path=path), names, path=path)
    except InputError as error:
        raise InputError(error.message, hint=error.hint or INSTEAD) from None
    if words is None:
        raise InputError(
            f"{path} calls no pretrain_gpt.py", hint="files of arguments alone are called NAME.args"
        )
    return words


def statements(text: str, *, path: Path) -> list[Statement]:
    """A script's commands in order; an array's parentheses belong to the word that sets it."""
    text = text.replace("\\\n", "\v")  # which still counts a line
    found: list[Statement] = []
    words: list[Word] = []
    at, line = 0, 1

    def end() -> None:
        nonlocal words
        if words:
            then = text[at : at + 2] if text[at : at + 2] in ("&&", "||") else ""
            found.append(Statement(words=tuple(words), line=words[0].line, then=then))
        words = []

    while at < len(text):
        letter = text[at]
        if letter in "\n;|&":
            end()
        if letter in " \t\r\v\n;|&":
            line += letter in "\n\v"
            at += 1
        elif letter == "#":
            stop = min(k for k in (text.find("\n", at), text.find("\v", at), len(text)) if k >= 0)
            at = stop
        else:
            stop = _end_of_test(text, at) if not words else 0
            stop = stop or _end_of_word(text, at, line=line, path=path)
            words.append(Word(text=text[at:stop], line=line))
            line += sum(text.count(mark, at, stop) for mark in "\n\v")
            at = stop
            if words[-1].text in ("then", "else", "do"):
                end()
            elif words[-1].text in ("if", "elif") and len(words) == 1:
                at = _condition(text, at, words, line)
    end()
    return found


def _condition(text: str, at: int, words: list[Word], line: int) -> int:
    """Takes the words up to `; then` as one; returns where they end."""
    found = re.compile(r"\s*(.*?)\s*(?:;|\n|\v)\s*(?=then\b)", re.DOTALL).match(text, at)
    if found is None:
        return at
    words.append(Word(text=found.group(1).replace("\v", " "), line=line))
    return found.end(1)


def _end_of_test(text: str, at: int) -> int:
    """Where the test ends that begins at `at` as a command: `[ ... ]`, `[[ ... ]]`, `((...))`; 0: there is none."""
    for opening, closing in TESTS.items():
        begins = text.startswith(opening, at) and (opening == "((" or text[at + len(opening)].isspace())
        if begins and (stop := text.find(closing, at + len(opening))) >= 0:
            return stop + len(closing)
    return 0


def _end_of_word(text: str, at: int, *, line: int, path: Path) -> int:
    """Where the word that begins at `at` ends; quotes, `$(...)`, `${...}` and an array's list are inside."""
    array = ASSIGNMENT.match(text, at)
    if array and text[array.end() : array.end() + 1] == "(":
        return _closing(text, array.end(), ")", line=line, path=path)
    while at < len(text) and text[at] not in " \t\r\n\v;|&":
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`":
            at = _closing(text, at, text[at], line=line, path=path)
        elif text.startswith(("$(", "${"), at):
            at = _closing(text, at + 1, ")" if text[at + 1] == "(" else "}", line=line, path=path)
        elif text[at] in "()":
            raise InputError(f"{path}:{line}: functions and subshells are not supported")
        else:
            at += 1
    return at


def _closing(text: str, at: int, closing: str, *, line: int, path: Path) -> int:
    """Behind the bracket or quote that closes the one at `at`."""
    opening, k = text[at], at + 1
    while k < len(text):
        if text[k] == "\\" and opening != "'":
            k += 2
        elif text[k] == closing:
            return k + 1
        elif opening == "(" and text[k] == "#" and text[k - 1] in " \t\n\v":
            k = min(end for end in (text.find("\n", k), text.find("\v", k), len(text)) if end >= 0)
        elif opening in "({" and text[k] in "'\"":
            k = _closing(text, k, text[k], line=line, path=path)
        elif opening in '("' and text.startswith(("$(", "${"), k):
            k = _closing(text, k + 1, ")" if text[k + 1] == "(" else "}", line=line, path=path)
        elif opening == "(" and text[k] == "(":
            k = _closing(text, k, ")", line=line, path=path)
        else:
            k += 1
    raise InputError(f"{path}:{line}: {opening} is not closed")


def _run(script: list[Statement], names: Names, *, path: Path) -> list[Word] | None:
    """Takes the assignments; returns the words behind the training program where one is called."""
    branches: list[Branch] = []  # of every `if` around
    before: Statement | None = None
    held: bool | None = True  # whether the statement before it succeeded; None: that is not known
    loops = 0
    for statement in script:
        first = statement.words[0].text
        loops += (first in LOOPS) - (first == "done")
        is_skipped = before is not None and bool(before.then) and held is not (before.then == "&&")
        before = statement
        if first in ("if", "elif", "else", "fi", "then"):
            _branch(first, statement, branches, names, path=path)
            continue
        is_unknown = Branch.UNKNOWN in branches or (is_skipped and held is None)
        words = list(statement.words)
        while words and (
            words[0].text in BEFORE or (len(words) < len(statement.words) and words[0].text[0] == "-")
        ):
            words.pop(0)
        if words and ASSIGNMENT.match(words[0].text) and is_unknown:
            raise InputError(f"{path}:{statement.line}: is set by what files there are", got=words[0].text)
        if is_skipped or any(branch is not Branch.RUNS for branch in branches):
            continue
        if first.startswith(tuple(TESTS)):
            held = _truth(first, names, line=statement.line, path=path)
            continue
        held = True
        if loops or first in names.functions:
            inside = names.functions.get(first) or " ".join(word.text for word in words)
            if ASSIGNMENT.search(inside) or ".py" in inside:
                what = "loops and functions that set names or call the program are not supported"
                raise InputError(f"{path}:{statement.line}: {what}", got=first)
            continue
        if first == "shift":
            names.shift()
        while words and (found := ASSIGNMENT.match(words[0].text)):
            _assign(found, words.pop(0), names, path=path)
        if words := called([w for word in words for w in expand(word, names, path=path)]):
            return words
    return None


def called(words: list[Word]) -> list[Word] | None:
    """What stands behind the training program, also where the whole command is one word of `sh -c`."""
    pieces = [
        Word(text=piece, line=word.line)
        for word in words
        for piece in (word.text.split() if ".py " in word.text else [word.text])
    ]
    for k, word in enumerate(pieces):
        if PROGRAM.search(word.text):
            stop = (at for at in range(k, len(pieces)) if REDIRECTION.match(pieces[at].text))
            return pieces[k + 1 : next(stop, len(pieces))]
    return None


def _branch(kind: str, statement: Statement, branches: list[Branch], names: Names, *, path: Path) -> None:
    if kind == "then":
        return
    if kind != "if" and not branches:
        raise InputError(f"{path}:{statement.line}: {kind} without if")
    if kind == "fi":
        branches.pop()
        return
    around = branches if kind == "if" else branches[:-1]
    before = Branch.WAITS if kind == "if" else branches.pop()
    if before is Branch.WAITS and all(branch is Branch.RUNS for branch in around):
        before = Branch.RUNS if kind == "else" else _condition_of(statement, names, path=path)
    elif before is Branch.RUNS:
        before = Branch.DONE
    branches.append(before)


def _condition_of(statement: Statement, names: Names, *, path: Path) -> Branch:
    """What becomes of the branch below a condition on words; one on files or programs is not known."""
    held = _truth(statement.words[-1].text, names, line=statement.line, path=path)
    return Branch.UNKNOWN if held is None else Branch.RUNS if held else Branch.WAITS


def _truth(text: str, names: Names, *, line: int, path: Path) -> bool | None:
    """Whether a condition holds; None: it asks for files or runs a program."""
    if found := re.match(r"case (\S+) in (.*)", text):
        value = _known(found[1].strip("\"'"), names, line=line, path=path)
        return any(fnmatchcase(value, pattern.strip(" \"'")) for pattern in found[2].split("|"))
    result, joined = False, "||"
    for part in re.split(
        r"(\|\||&&)", re.sub(r"\s-([ao])\s", lambda f: " && " if f[1] == "a" else " || ", text)
    ):
        if part in ("||", "&&"):
            joined = part
            continue
        if ON_FILES.match(part) or not (
            text.startswith(tuple(TESTS)) or part.lstrip("! ").startswith(tuple(TESTS))
        ):
            return None
        test = _compared if text.startswith("((") else _test
        held = test(part.strip(), names, line=line, path=path)
        result = (result or held) if joined == "||" else (result and held)
    return result


def _compared(text: str, names: Names, *, line: int, path: Path) -> bool:
    """A comparison of sums, or whether one is not 0; what nobody has set is 0."""
    filled = NAME_IN_SUM.sub(lambda name: str(names.values.get(name[1]) or 0), text.strip("() "))
    found, what = COMPARED.fullmatch(filled), f"{path}:{line}"
    if found is None:
        return whole(filled, what=what) != 0
    left, right = whole(found[1], what=what), whole(found[3], what=what)
    order = (left > right) - (left < right)
    return order in {"<": (-1,), ">": (1,), "<=": (-1, 0), ">=": (0, 1), "==": (0,), "!=": (-1, 1)}[found[2]]


def _test(text: str, names: Names, *, line: int, path: Path) -> bool:
    inside = text.removeprefix("[[").removesuffix("]]").removeprefix("[").removesuffix("]")
    try:
        pieces = shlex.split(inside)
    except ValueError:
        pieces = []
    negated = bool(pieces) and pieces[0] == "!"
    pieces = pieces[negated:]
    if pieces and pieces[0] in ("-z", "-n"):
        is_empty = not (pieces[1:] and _known(pieces[1], names, line=line, path=path))
        return (is_empty == (pieces[0] == "-z")) != negated
    if len(pieces) == 3:
        left, right = (_known(pieces[k], names, line=line, path=path) for k in (0, 2))
        if pieces[1] in ("=", "==", "!="):
            return (fnmatchcase(left, right) == (pieces[1] != "!=")) != negated
        if pieces[1] in ORDERS and left.isdigit() and right.isdigit():
            order = (int(left) > int(right)) - (int(left) < int(right))
            return (order in ORDERS[pieces[1]]) != negated
    raise InputError(f"{path}:{line}: a condition that is not supported", got=text)


def _known(text: str, names: Names, *, line: int, path: Path) -> str:
    """A word of a condition; what nobody has set is empty."""
    return REFERENCE.sub(
        "", " ".join(w.text for w in expand(Word(text=f'"{text}"', line=line), names, path=path))
    )


def _assign(found: re.Match[str], word: Word, names: Names, *, path: Path) -> None:
    name, more, value = found.group(1), found.group(2), word.text[found.end() :]
    before = names.values.get(name)
    if value.startswith("("):
        items = [
            w for part in _list(value[1:-1], word.line, path=path) for w in expand(part, names, path=path)
        ]
        old = before if isinstance(before, list) else [Word(text=before, line=word.line)] if before else []
        names.values[name] = [*old, *items] if more else items
        return
    text = " ".join(w.text for w in expand(word, names, path=path, begin=found.end(), split=False))
    if more and isinstance(before, list):
        raise InputError(f"{path}:{word.line}: text is added to an array", got=word.text)
    names.values[name] = f"{before or ''}{text}" if more else text


def _list(text: str, line: int, *, path: Path) -> list[Word]:
    """The words of an array; lines do not end it."""
    return [
        Word(text=word.text, line=word.line + line - 1)
        for statement in statements(text, path=path)
        for word in statement.words
    ]


def expand(word: Word, names: Names, *, path: Path, begin: int = 0, split: bool = True) -> list[Word]:
    """The words that one becomes. Unquoted text is divided at blanks, and `"${ARRAY[@]}"` into its elements."""
    text = word.text[begin:]
    if text in ('"$@"', '"${@}"'):
        return [Word(text=one, line=word.line) for one in names.positional]
    array = re.fullmatch(r'"\$\{(\w+)\[@\]\}"', text)
    if array and isinstance(found := names.values.get(array.group(1)), list):
        return found
    done: list[str] = [""]
    begun = False
    at = 0
    while at < len(text):
        if text[at] == "\\":
            done[-1] += text[at + 1 : at + 2]
            begun, at = True, at + 2
            continue
        if text[at] in "'\"":
            stop = _closing(text, at, text[at], line=word.line, path=path)
            inside = text[at + 1 : stop - 1]
            done[-1] += (
                inside if text[at] == "'" else _filled(_unescaped(inside), names, word=word, path=path)
            )
            begun, at = True, stop
            continue
        stop = next(
            (k for k in range(at, len(text)) if text[k] in "'\"\\" and not _inside(text, at, k)), len(text)
        )
        filled = _filled(text[at:stop], names, word=word, path=path)
        if split:
            parts = re.split(r"\s+", filled)
            done[-1] += parts[0]
            done += parts[1:]
        else:
            done[-1] += filled
        at = stop
    return [Word(text=part, line=word.line) for part in done if part or (begun and len(done) == 1)]


def _inside(text: str, begin: int, at: int) -> bool:
    """Whether `at` is within `${...}` or `$(...)`, whose quotes are their own."""
    return any(
        text.count(opening, begin, at) > text.count(closing, begin, at) for opening, closing in ("{}", "()")
    )


def _unescaped(text: str) -> str:
    return re.sub(r'\\(["\\`$])', r"\1", text).replace("\v", " ")


def _filled(text: str, names: Names, *, word: Word, path: Path) -> str:
    def reference(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"] or found["every"]
        value, rest = names.values.get(name), found["rest"] or ""
        if name in ("@", "*", "#"):
            value = str(len(names.positional)) if name == "#" else " ".join(names.positional)
        kind = next(
            (kind for kind in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(kind)), ""
        )
        other = rest.removeprefix(kind).strip("\"'")
        is_set = value is not None and not (kind.startswith(":") and value in ("", []))
        if kind.endswith("+"):
            return _filled(other, names, word=word, path=path) if is_set else ""
        if not is_set and kind.endswith(("-", "=")):
            filled = _filled(other, names, word=word, path=path)
            if kind.endswith("="):
                names.values[name] = filled
            return filled
        if value is None or (rest and not kind):
            return found.group()  # who needs its value refuses it
        if isinstance(value, list):
            return " ".join(w.text for w in (value if found["all"] else value[:1]))
        return value

    text = SUM.sub(lambda found: _sum(found, names, word=word, path=path), text)
    return REFERENCE.sub(reference, text)


def _sum(found: re.Match[str], names: Names, *, word: Word, path: Path) -> str:
    """Whole-number arithmetic, left as it stands where a name in it is not set."""
    inside = NAME_IN_SUM.sub(lambda name: str(names.values.get(name[1], name[0])), found["sum"])
    if not re.fullmatch(r"[\d\s+*/%()-]+", inside):
        return found.group()
    return str(whole(inside, what=f"{path}:{word.line}"))
