"""Parse a shell script after the grammar of bash. What is not understood raises InputError with its line."""

from __future__ import annotations

import re
from bisect import bisect_left

from meshwright.engines.megatron.shell_scripts.syntax import (
    AndOrList,
    ArithmeticCommand,
    Body,
    CaseCommand,
    Command,
    CountingCommand,
    ForCommand,
    FunctionDefinition,
    GroupCommand,
    HereDocument,
    IfCommand,
    Literal,
    Part,
    ShellArithmetic,
    ShellAssignment,
    ShellOutput,
    ShellParameter,
    ShellPipeline,
    ShellWord,
    SimpleCommand,
    TestCommand,
    WhileCommand,
)
from meshwright.errors import InputError

BLANKS = " \t\r\n"
METACHARACTERS = f"{BLANKS};|&<>()"
SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n|#[^\n]*)+")  # blanks, continued lines and comments

ESCAPED = re.compile(r"\\(.)", re.DOTALL)
SINGLE_QUOTED = re.compile(r"'([^']*)'")
ANSI_QUOTED = re.compile(r"\$('((?:\\.|[^'\\])*)')", re.DOTALL)
ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
BACKQUOTED = re.compile(r"`((?:\\.|[^`\\])*)`", re.DOTALL)
SIMPLE_PARAMETER = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])")
BRACED_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
SUBSCRIPT = re.compile(r"\[([^\]]*)\]")
OPERATIONS = (":-", ":=", ":+", ":?", "-", "=", "+", "?", "##", "#", "%%", "%", "//", "/#", "/%", "/",
              "^^", "^", ",,", ",", ":", "@")  # fmt: skip

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
FUNCTION = re.compile(r"(?:function[ \t]+([\w.:-]+)[ \t]*(?:\([ \t]*\))?|([\w.:-]+)[ \t]*\([ \t]*\))\s*(?=[{(]|\[\[)")
REDIRECTION = re.compile(
    r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\()|(?<![^\s;|&()])&>>|(?<![^\s;|&()])&>)"
)
PLACEHOLDER = re.compile(r"<[^\s<>|&;()$\"'\\][^<>|&;\n()$\"']*(?<!\s)(?<!\s\d)>(?=\s|[;)/]|$)")
COMPOUND = re.compile(r"(if|for|while|until|case|select|coproc|\{|\[\[)(?=[\s;|&()<>]|$)")
CLOSING = re.compile(r"(then|elif|else|fi|do|done|esac|\})(?=[\s;|&()<>]|$)")
PIPELINE_PREFIX = re.compile(r"!(?=\s)|time(\s+-p)?(?=\s)")
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
TEST_OPERATORS = ("&&", "||", "(", ")", "<", ">")


def parse_script(text: str, *, name: str, first_line: int = 1) -> Body:
    """Return the commands of a script. `name` is that of the file."""
    parser = _Parser(text.replace("\r\n", "\n"), name=name, first_line=first_line)
    try:
        body = parser.body()
    except RecursionError:
        raise InputError(f"{name}: commands are nested too deeply") from None
    if not parser.is_done:
        raise parser.error("a word that nothing begins", got=parser.text[parser.at :].split("\n")[0][:40])
    return body


class _Parser:
    """A position in a script, with the here-documents whose text follows at the next line."""

    def __init__(self, text: str, *, name: str, first_line: int) -> None:
        self.text, self.name, self.first_line = text, name, first_line
        self.at = 0
        self.pending: list[HereDocument] = []
        self._ends = [k for k, letter in enumerate(text) if letter == "\n"]

    @property
    def line(self) -> int:
        return self._line_of(self.at)

    def _line_of(self, at: int) -> int:
        return self.first_line + bisect_left(self._ends, at)

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.text)

    def error(self, message: str, *, got: object = None) -> InputError:
        return InputError(f"{self.name}:{self.line}: {message}", got=got)

    def _next_is(self, *texts: str) -> str:
        """Return the first of `texts` that stands here, or an empty text."""
        return next((text for text in texts if self.text.startswith(text, self.at)), "")

    def _take(self, *texts: str) -> str:
        """Pass the first of `texts` that stands here, and return it."""
        found = self._next_is(*texts)
        self.at += len(found)
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Pass what `pattern` matches here."""
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def _inner(self, text: str, line: int) -> _Parser:
        return _Parser(text, name=self.name, first_line=line)

    def _skip_lines(self) -> None:
        """Skip blanks, comments and ends of lines."""
        self._match(SKIPPED)
        while self._next_is("\n"):
            self._newline()
            self._match(SKIPPED)

    def _newline(self) -> None:
        """Pass the end of a line and read the here-documents that begin after it."""
        self.at += 1
        waiting, self.pending = self.pending, []
        for document in waiting:
            self._read_document(document)

    def _read_document(self, document: HereDocument) -> None:
        lines, line = [], self.line
        while not self.is_done:
            text, _, _ = self.text[self.at :].partition("\n")
            self.at = min(self.at + len(text) + 1, len(self.text))
            text = text.lstrip("\t") if document.strips_tabs else text
            if text.rstrip("\r") == document.end:
                break
            lines.append(text)
        content = "".join(f"{text}\n" for text in lines)
        if document.is_literal:
            document.parts = (Literal(text=content, is_quoted=True),)
        else:
            document.parts = self._inner(content, line).double_quoted(until="", quotes_are_literal=True)

    # Words

    def _word(self, *, stop: str = METACHARACTERS) -> ShellWord | None:
        """Parse the word that stands here; None: there is none."""
        line, parts = self.line, tuple(self._unquoted(stop))
        return ShellWord(parts=parts, line=line) if parts else None

    def _word_or_placeholder(self) -> ShellWord | None:
        """Parse a word; `<your path>`, which the shell would take for redirections, stands for a value in it."""
        parts: list[Part] = []
        line = self.line
        while True:
            if found := self._match(PLACEHOLDER):
                parts.append(Literal(text=found.group(), is_quoted=True))
            elif word := self._word():
                parts += word.parts
            else:
                return ShellWord(parts=tuple(parts), line=line) if parts else None

    def _unquoted(self, stop: str) -> list[Part]:
        parts: list[Part] = []
        plain = re.compile(rf"[^{re.escape(stop)}\\'\"$`]*")
        while not self.is_done:
            if found := self._match(ESCAPED):
                parts += [] if found[1] == "\n" else [Literal(text=found[1], is_quoted=True)]
            elif self._next_is(*stop):
                break
            elif self._next_is("'"):
                if (found := self._match(SINGLE_QUOTED)) is None:
                    raise self.error("' is not closed")
                parts.append(Literal(text=found[1], is_quoted=True))
            elif self._next_is("$'"):
                parts.append(Literal(text=self._ansi_quoted(), is_quoted=True))
            elif self._take('"', '$"'):
                parts += self.double_quoted(until='"') or [Literal(text="", is_quoted=True)]
            elif self._next_is("$", "`"):
                parts.append(self._expansion(is_quoted=False))
            else:
                begin = self.at
                self.at += 1  # a backslash at the end, or a letter
                self._match(plain)
                parts.append(Literal(text=self.text[begin : self.at]))
        return parts

    def _ansi_quoted(self) -> str:
        r"""Return the text in `$'...'` with its escapes, such as `\n`, replaced."""
        if (found := self._match(ANSI_QUOTED)) is None:
            raise self.error("$' is not closed")
        if re.search(r"\\[xuUc0-7]", found[2]):
            raise self.error("an escape that is not supported", got=found[1])
        return ESCAPED.sub(lambda one: ANSI_ESCAPES.get(one[1], one[1]), found[2])

    def double_quoted(self, *, until: str, quotes_are_literal: bool = False) -> tuple[Part, ...]:
        """Parse text in which only `$`, a backquote and a backslash have a meaning, up to and with `until`.

        An empty `until` is the end of the text.
        """
        parts: list[Part] = []
        begin = self.at
        meant = '$`"\\}' if until == "}" else "$`\\" if quotes_are_literal else '$`"\\'

        def flush() -> None:
            if self.at > begin:
                parts.append(Literal(text=self.text[begin : self.at], is_quoted=True))

        while not self.is_done and not (until and self._next_is(until)):
            if self._next_is("\\"):
                flush()
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped != "\n":
                    text = escaped if escaped and escaped in meant else f"\\{escaped}"
                    parts.append(Literal(text=text, is_quoted=True))
                self.at = begin = min(self.at + 2, len(self.text))
            elif self._next_is("$", "`"):
                flush()
                parts.append(self._expansion(is_quoted=True))
                begin = self.at
            elif until == "}" and self._next_is('"'):  # "${NAME:-"word"}": the quotes are removed
                flush()
                self.at += 1
                parts += self.double_quoted(until='"')
                begin = self.at
            else:
                self.at += 1
        if until and self.is_done:
            raise self.error(f"{until} is not closed")
        flush()
        self.at += len(until)
        return tuple(parts)

    def _expansion(self, *, is_quoted: bool) -> Part:
        """Parse what begins with `$` or a backquote."""
        begin = self.at
        if self._next_is("`"):
            if (found := BACKQUOTED.match(self.text, begin)) is None:
                raise self.error("` is not closed")
            text = re.sub(r"\\([$`\\])", r"\1", found[1])
            commands = self._inner(f"{text})", self.line).body()
            self.at = found.end()
            return ShellOutput(commands=commands, source=found.group(), is_quoted=is_quoted)
        if self._next_is("$((") and (expression := self._double_brackets(begin + 3)) is not None:
            source = self.text[begin : self.at]
            return ShellArithmetic(expression=expression, source=source, is_quoted=is_quoted)
        if self._take("$("):
            commands = self._bracketed("$(")
            return ShellOutput(commands=commands, source=self.text[begin : self.at], is_quoted=is_quoted)
        if self._take("${"):
            return self._braced(begin, is_quoted=is_quoted)
        if found := self._match(SIMPLE_PARAMETER):
            return ShellParameter(name=found[1], source=found.group(), is_quoted=is_quoted)
        self.at += 1
        return Literal(text="$", is_quoted=is_quoted)

    def _bracketed(self, opened: str) -> Body:
        """Parse commands and the `)` behind them."""
        commands = self.body()
        if not self._take(")"):
            raise self.error(f"{opened} is not closed")
        return commands

    def _double_brackets(self, begin: int) -> tuple[Part, ...] | None:
        """Parse the rest of `((expression))` from `begin` on; None, without moving, for a subshell in a subshell."""
        depth, at = 0, begin
        while at < len(self.text):
            depth += (self.text[at] == "(") - (self.text[at] == ")")
            if depth < 0:
                break
            at += 1
        if self.text[at : at + 2] != "))":
            return None
        parts = self._expression(begin, at)
        self.at = at + 2
        return parts

    def _expression(self, begin: int, stop: int) -> tuple[Part, ...]:
        """Parse an arithmetic expression, in which quotes are removed."""
        inner = self._inner(self.text[begin:stop].replace('"', ""), self._line_of(begin))
        return inner.double_quoted(until="", quotes_are_literal=True)

    def _braced(self, begin: int, *, is_quoted: bool) -> ShellParameter:
        """Parse the rest of `${NAME...}`, which begins at `begin`."""
        prefix = "" if self._next_is("#}", "!}", "#:", "#-") else self._take("#", "!")
        name = self._match(BRACED_NAME)
        subscript = self._match(SUBSCRIPT) if name else None
        if name and not subscript and self._next_is("["):
            raise self.error("[ is not closed")
        operation = self._take(*OPERATIONS) if name else ""
        if name is None or (not operation and not self._next_is("}")):
            raise self.error("an expansion that is not supported", got=self.text[begin : begin + 20])
        if is_quoted:
            operand = self.double_quoted(until="}")
        else:
            operand = tuple(self._unquoted("}"))
            if not self._take("}"):
                raise self.error("${ is not closed")
        return ShellParameter(
            name=name.group(), source=self.text[begin : self.at], subscript=subscript[1] if subscript else "",
            prefix=prefix, operation=operation, operand=operand, is_quoted=is_quoted,
        )  # fmt: skip

    # Commands

    def body(self) -> Body:
        """Parse commands up to a word or bracket that closes them, which is left."""
        found: list[AndOrList] = []
        while True:
            self._skip_lines()
            if self.is_done or self._next_is(")", ";;", ";&") or CLOSING.match(self.text, self.at):
                return tuple(found)
            found.append(self._and_or())
            self._match(SKIPPED)
            if not self._next_is(";;", ";&"):
                self._take(";")

    def _and_or(self) -> AndOrList:
        first, rest = self._pipeline(), []
        self._match(SKIPPED)
        while joined := self._take("&&", "||"):
            self._skip_lines()
            rest.append((joined, self._pipeline()))
            self._match(SKIPPED)
        is_background = not self._next_is("&>") and bool(self._take("&"))
        return AndOrList(first=first, rest=tuple(rest), is_background=is_background)

    def _pipeline(self) -> ShellPipeline:
        is_negated = False
        self._match(SKIPPED)
        while prefix := self._match(PIPELINE_PREFIX):
            is_negated = is_negated != (prefix.group() == "!")
            self._match(SKIPPED)
        commands = [self._command()]
        self._match(SKIPPED)
        while not self._next_is("||") and self._take("|&", "|"):
            self._skip_lines()
            commands.append(self._command())
            self._match(SKIPPED)
        return ShellPipeline(commands=tuple(commands), is_negated=is_negated)

    def _command(self) -> Command:
        if found := FUNCTION.match(self.text, self.at):
            line = self.line
            for _ in range(found.group().count("\n")):
                self.at = self.text.index("\n", self.at)
                self._newline()
            self.at = max(self.at, found.end())
            return FunctionDefinition(name=found[1] or found[2], body=self._command(), line=line)
        if (compound := self._compound()) is None:
            return self._simple()
        self._match(SKIPPED)
        while self._redirection([]):
            self._match(SKIPPED)
        return compound

    def _simple(self) -> SimpleCommand:
        line = self.line
        assignments: list[ShellAssignment] = []
        words: list[ShellWord | ShellAssignment] = []
        documents: list[HereDocument] = []
        while True:
            self._match(SKIPPED)
            if self.is_done or self._next_is("\n", ";", "|", ")") or (self._next_is("&") and not self._next_is("&>")):
                break
            if not PLACEHOLDER.match(self.text, self.at) and self._redirection(documents):
                continue
            begin = self.at
            if self._take("<(", ">("):
                self._bracketed("(")
                words.append(
                    ShellWord(parts=(Literal(text=self.text[begin : self.at], is_quoted=True),), line=self.line)
                )
                continue
            if self._next_is("("):
                raise self.error("a bracket that is not quoted")
            first = words[0] if words else None
            declares = isinstance(first, ShellWord) and first.bare in DECLARATIONS
            if (not words or declares) and (found := self._match(ASSIGNMENT)):
                (words if words else assignments).append(self._assignment(found))
            elif word := self._word_or_placeholder():
                words.append(word)
            else:
                raise self.error("a letter that is not supported", got=self.text[self.at])
        if not (assignments or words or line != self.line) and self._next_is(";", "|", "&"):
            raise self.error("a command is missing", got=self.text[self.at : self.at + 2])
        return SimpleCommand(assignments=tuple(assignments), words=tuple(words), documents=tuple(documents), line=line)

    def _assignment(self, found: re.Match[str]) -> ShellAssignment:
        line = self._line_of(found.start())
        value = self._array() if self._take("(") else self._word_or_placeholder() or ShellWord(parts=(), line=line)
        name, subscript, appended = found.groups()
        return ShellAssignment(name=name, subscript=subscript or "", is_appended=bool(appended), value=value, line=line)

    def _array(self) -> tuple[ShellWord, ...]:
        items: list[ShellWord] = []
        while True:
            self._skip_lines()
            if self.is_done:
                raise self.error("( is not closed")
            if self._take(")"):
                return tuple(items)
            if (word := self._word_or_placeholder()) is None:
                raise self.error("a letter that is not supported in an array", got=self.text[self.at])
            items.append(word)

    def _redirection(self, documents: list[HereDocument]) -> bool:
        """Parse a redirection, if there is one. Its target does not concern the arguments."""
        if (found := self._match(REDIRECTION)) is None:
            return False
        self._match(SKIPPED)
        begin = self.at
        if self._take("<(", ">("):
            self._bracketed("(")
            return True
        if self._word_or_placeholder() is None:
            raise self.error("a redirection without a file", got=found.group())
        if found[1] in ("<<", "<<-"):
            written = self.text[begin : self.at]
            document = HereDocument(
                end=re.sub(r"[\"'\\]", "", written),
                is_literal=any(mark in written for mark in "\"'\\"),
                strips_tabs=found[1] == "<<-",
            )
            self.pending.append(document)
            documents.append(document)
        return True

    # Compound commands

    def _compound(self) -> Command | None:
        """Parse the compound command that stands here; None: it is none."""
        line = self.line
        if self._next_is("((") and (expression := self._double_brackets(self.at + 2)) is not None:
            return ArithmeticCommand(expression=expression, line=line)
        if kind := self._next_is("((", "("):
            self.at += 1
            return GroupCommand(body=self._closed(")", kind), is_subshell=True)
        if (found := self._match(COMPOUND)) is None:
            return None
        kind = found.group()
        match kind:
            case "{":
                return GroupCommand(body=self._closed("}", kind))
            case "[[":
                return TestCommand(tokens=self._test(), line=line)
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for":
                return self._for(line)
            case "while" | "until":
                condition = self._closed("do", kind)
                body = self._closed("done", kind)
                return WhileCommand(condition=condition, body=body, is_until=kind == "until", line=line)
        raise self.error("a command that is not supported", got=kind)

    def _keyword(self, *keywords: str) -> str:
        """Pass one of `keywords` if it stands here, and return it."""
        for one in keywords:
            if self._match(re.compile(rf"{re.escape(one)}(?![\w-])")):
                return one
        return ""

    def _closed(self, end: str, kind: str) -> Body:
        """Parse commands and the word that ends them."""
        body = self.body()
        if not self._keyword(end):
            raise self.error(f"{kind} is not closed by {end}")
        return body

    def _if(self) -> IfCommand:
        branches: list[tuple[Body, Body]] = []
        while True:
            condition = self._closed("then", "if")
            branches.append((condition, self.body()))
            end = self._keyword("elif", "else", "fi")
            if not end:
                raise self.error("if is not closed by fi")
            if end != "elif":
                otherwise = self._closed("fi", "if") if end == "else" else ()
                return IfCommand(branches=tuple(branches), otherwise=otherwise)

    def _case(self) -> CaseCommand:
        self._match(SKIPPED)
        word, clauses = self._word(), []
        self._skip_lines()
        if word is None or not self._keyword("in"):
            raise self.error("case without in")
        self._skip_lines()
        while not self._keyword("esac"):
            patterns = self._patterns()
            body = self.body()
            end = self._take(";;&", ";;", ";&")
            clauses.append((patterns, body, end or ";;"))
            self._skip_lines()
            if not end and not re.compile(r"esac\b").match(self.text, self.at):
                raise self.error("a case that is not closed or not supported")
        return CaseCommand(word=word, clauses=tuple(clauses))

    def _patterns(self) -> tuple[ShellWord, ...]:
        """Parse the patterns of a clause of `case`, and the `)` behind them."""
        patterns: list[ShellWord] = []
        self._take("(")
        end = "|"
        while end == "|":
            self._match(SKIPPED)
            pattern = self._word()
            self._match(SKIPPED)
            end = self._next_is("|", ")")
            if pattern is None or not end:
                raise self.error("a case that is not closed or not supported")
            patterns.append(pattern)
            self.at += 1
        return tuple(patterns)

    def _for(self, line: int) -> ForCommand | CountingCommand:
        self._match(SKIPPED)
        if self._next_is("(("):
            return self._counting(line)
        name = self._word()
        if name is None or name.bare is None:
            raise self.error("for without a name")
        words: tuple[ShellWord, ...] | None = None
        self._skip_lines()
        if self._keyword("in"):
            self._match(SKIPPED)
            words = ()
            while word := self._word():
                words = (*words, word)
                self._match(SKIPPED)
        return ForCommand(name=name.bare, words=words, body=self._loop(), line=line)

    def _counting(self, line: int) -> CountingCommand:
        begin = self.at + 2
        if self._double_brackets(begin) is None:
            raise self.error("for (( is not closed")
        text = self.text[begin : self.at - 2]
        bounds = [begin]
        for one in text.split(";"):
            bounds.append(bounds[-1] + len(one) + 1)
        if len(bounds) != 4:
            raise self.error("for (( needs three expressions", got=text)
        expressions = tuple(self._expression(bounds[k], bounds[k + 1] - 1) for k in range(3))
        return CountingCommand(expressions=expressions, body=self._loop(), line=line)

    def _loop(self) -> Body:
        self._match(SKIPPED)
        self._take(";")
        self._skip_lines()
        if self._take("{"):
            return self._closed("}", "for")
        if not self._keyword("do"):
            raise self.error("for without do")
        return self._closed("done", "for")

    def _test(self) -> tuple[ShellWord | str, ...]:
        """Parse the words and operators up to `]]`."""
        tokens: list[ShellWord | str] = []
        while True:
            self._skip_lines()
            if self.is_done:
                raise self.error("[[ is not closed")
            if self._take("]]"):
                return tuple(tokens)
            before = tokens[-1] if tokens else ""
            is_expression = isinstance(before, ShellWord) and before.bare == "=~"
            operator = "" if is_expression else self._take(*TEST_OPERATORS)
            if operator:
                tokens.append(operator)
            elif word := self._word(stop=BLANKS if is_expression else METACHARACTERS):
                tokens.append(word)
            else:
                raise self.error("a condition that is not supported", got=self.text[self.at])
