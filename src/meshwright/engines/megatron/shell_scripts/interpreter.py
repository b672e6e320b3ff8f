"""Execute a shell script without running programs, and collect the calls of training programs.

What depends on files or programs is not known. Both branches of such a condition are followed: a variable that is set
there has no known value from then on, and `exit` there is an error of the script, which is assumed not to happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from meshwright.engines.megatron.shell_scripts import programs
from meshwright.engines.megatron.shell_scripts.builtins import BUILTINS, SUCCEEDING, Leave, script_file, script_text
from meshwright.engines.megatron.shell_scripts.conditions import negated, test_holds
from meshwright.engines.megatron.shell_scripts.expansion import Expander
from meshwright.engines.megatron.shell_scripts.integers import UnknownValueError
from meshwright.engines.megatron.shell_scripts.parsing import parse_script
from meshwright.engines.megatron.shell_scripts.state import ShellValue, ShellVariables, UnknownText, either_of
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
    IfCommand,
    Part,
    ShellAssignment,
    ShellPipeline,
    ShellWord,
    SimpleCommand,
    TestCommand,
    WhileCommand,
    Word,
)
from meshwright.errors import InputError

PREFIXES = ("command", "builtin", "exec", "nohup")
MAX_ROUNDS = 1000  # of a loop
MAX_COMMANDS = 100_000
MAX_DEPTH = 50  # of functions and scripts in each other
Status = bool | None  # of a command; None: it depends on files or programs


@dataclass(kw_only=True)
class Findings:
    """Arguments of each training program, commands that were not followed, and here-documents that `cat` copies."""

    program_at: Callable[[list[Word]], int | None]
    environment: tuple[str, ...] = ()
    calls: list[list[Word]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    num_commands: int = 0


@dataclass(kw_only=True)
class Interpreter:
    """A shell. Those of subshells share `found`."""

    variables: ShellVariables
    found: Findings
    depth: int = 0
    uncertain: str = ""  # why it is not known that the current commands run
    repeats: bool = False  # the uncertain commands may run several times
    assigned: set[str] = field(default_factory=set)  # variables that all uncertain commands set, if they run
    output: list[str] | None = None  # of `$(...)`

    @property
    def expander(self) -> Expander:
        return Expander(variables=self.variables, output_of=self.output_of)

    def where(self, line: int) -> str:
        return f"{self.variables.name}:{line}"

    def output_of(self, commands: Body) -> str | UnknownText:
        """Return the output of commands that only print; unknown for all others."""
        inner = self.nested(self.variables.subshell())
        inner.output = []
        with suppress(Leave):
            inner.run(commands)
        if inner.output is None or inner.uncertain:
            return UnknownText(reason="it is the output of a program")
        return "".join(inner.output).rstrip("\n")

    def nested(self, variables: ShellVariables) -> Interpreter:
        """Return an interpreter with other variables."""
        if self.depth >= MAX_DEPTH:
            raise InputError(f"{self.variables.name}: functions or scripts call each other without end")
        return replace(self, variables=variables, depth=self.depth + 1, output=None, assigned=set())

    def run(self, body: Body) -> Status:
        """Execute commands; return the status of the last one."""
        status: Status = True
        for one in body:
            status = self._and_or(one)
        return status

    def run_uncertain(self, body: Iterable[AndOrList], reason: str, *, repeats: bool = False) -> set[str]:
        """Execute commands of which it is not known whether they run; return the variables that they set in any case.

        `repeats`: they may run several times, after which variables can have any value.
        """
        before = (self.uncertain, self.repeats, self.assigned)
        self.uncertain, self.repeats, self.assigned = self.uncertain or reason, self.repeats or repeats, set()
        try:
            self.run(tuple(body))
        except Leave:
            pass  # assumed not to happen: an error of the script, or the end of a loop that is refused elsewhere
        finally:
            found = self.assigned
            self.uncertain, self.repeats, self.assigned = before
        return found

    def _and_or(self, one: AndOrList) -> Status:
        if one.is_background:
            inner = self.nested(self.variables.subshell())
            with suppress(Leave):
                inner._and_or(AndOrList(first=one.first, rest=one.rest))
            return True
        self.variables.missing.clear()
        status = self._pipeline(one.first)
        asks = bool(self.variables.missing)
        for joined_by, pipeline in one.rest:
            if status is None:
                self.run_uncertain((AndOrList(first=pipeline),), "a program")
            elif status is (joined_by == "&&"):
                try:
                    status = self._pipeline(pipeline)
                except Leave as leave:
                    status = self._assumed(leave, asks=asks)
        return status

    def _pipeline(self, pipeline: ShellPipeline) -> Status:
        if len(pipeline.commands) == 1:
            status = self.command(pipeline.commands[0])
            return negated(status) if pipeline.is_negated else status
        status: Status = None
        for command in pipeline.commands:
            inner = self.nested(self.variables.subshell())
            try:
                status = inner.command(command)
            except Leave:
                status = None
        self.output = None
        return negated(status) if pipeline.is_negated else status

    def command(self, command: Command) -> Status:
        """Execute a command; return its status."""
        self.found.num_commands += 1
        if self.found.num_commands > MAX_COMMANDS:
            raise InputError(f"{self.variables.name}: more than {MAX_COMMANDS:,} commands")
        match command:
            case SimpleCommand():
                return self._simple(command)
            case IfCommand():
                return self._if(command)
            case CaseCommand():
                return self._case(command)
            case ForCommand():
                return self._for(command)
            case CountingCommand() | WhileCommand():
                return self._while(command)
            case GroupCommand():
                return self._group(command)
            case FunctionDefinition():
                if self.uncertain:
                    raise InputError(f"{self.where(command.line)}: a function depends on {self.uncertain}")
                self.variables.functions[command.name] = command.body
                return True
            case TestCommand():
                return test_holds(command.tokens, self.expander, line=command.line)
            case ArithmeticCommand():
                return self._arithmetic(command.expression, command.line)

    def _arithmetic(self, expression: tuple[Part, ...], line: int) -> Status:
        text = self.expander.joined(ShellWord(parts=expression, line=line))
        if isinstance(text, UnknownText):
            return None
        try:
            before = dict(self.variables.values)
            value = self.expander.at(line).integer(text, unset_is_zero=True)
        except UnknownValueError:
            return None
        self.blur(before, line=line)
        return value != 0

    def _assumed(self, leave: Leave, *, asks: bool) -> Status:
        """Return an unknown status for an `exit` for want of a variable, which the environment may set."""
        if not asks or leave.kind != "exit" or leave.status is not False:
            raise leave
        return None

    def _if(self, command: IfCommand) -> Status:
        for k, (condition, body) in enumerate(command.branches):
            self.variables.missing.clear()
            status = self.run(condition)
            asks = bool(self.variables.missing)
            if status:
                try:
                    return self.run(body)
                except Leave as leave:
                    self._assumed(leave, asks=asks)
                    continue
            if status is None:
                reason = "files or programs"
                rest = [(*other_condition, *other) for other_condition, other in command.branches[k + 1 :]]
                names = [self.run_uncertain(one, reason) for one in (body, *rest, command.otherwise)]
                for name in set.intersection(*names):  # one of the branches has set it
                    self.assigned.add(name)
                    if isinstance(old := self.variables.get(name), UnknownText):
                        self.variables.set(name, replace(old, choices=tuple(x for x in old.choices if x is not None)))
                return None
        return self.run(command.otherwise)

    def _case(self, command: CaseCommand) -> Status:
        expander = replace(self.expander, unset_is_empty=True)
        text = expander.joined(command.word)
        falls_through = False
        for patterns, body, end in command.clauses:
            held: Status = falls_through
            for pattern in patterns if not falls_through else ():
                one = expander.pattern(pattern)
                if isinstance(text, UnknownText) or isinstance(one, UnknownText):
                    held = None
                elif fnmatchcase(text, one):
                    held = True
                    break
            if held is None:
                self.run_uncertain(body, "files or programs")
            elif held:
                status = self.run(body)
                if end == ";;":
                    return status
                falls_through = end == ";&"
        return True if not isinstance(text, UnknownText) else None

    def _for(self, command: ForCommand) -> Status:
        if command.words is None:
            items = [Word(text=one, line=command.line) for one in self.variables.positional]
        else:
            items = [one for word in command.words for one in self.expander.words(word)]
        if any(one.unknown or re.search(r"[*?]", one.text) for one in items):
            self.variables.set(command.name, UnknownText(reason=f"{command.name} depends on files or programs"))
            self.run_uncertain(command.body, "files or programs", repeats=True)
            return None
        for item in items:
            self._set(command.name, item.text, line=command.line)
            if self._round(command.body):
                break
        return True

    def _while(self, command: WhileCommand | CountingCommand) -> Status:
        if isinstance(command, CountingCommand):
            self._arithmetic(command.expressions[0], command.line)
        for _ in range(MAX_ROUNDS):
            if isinstance(command, CountingCommand):
                status = not command.expressions[1] or self._arithmetic(command.expressions[1], command.line)
            else:
                status = self.run(command.condition)
                status = negated(status) if command.is_until else status
            if status is None:
                self.run_uncertain(command.body, "files or programs", repeats=True)
                return None
            if not status or self._round(command.body):
                return True
            if isinstance(command, CountingCommand):
                self._arithmetic(command.expressions[2], command.line)
        raise InputError(f"{self.where(command.line)}: a loop that does not end")

    def _round(self, body: Body) -> bool:
        """Execute the body of a loop once; return True if it ends the loop."""
        try:
            self.run(body)
        except Leave as leave:
            if leave.kind not in ("break", "continue"):
                raise
            if leave.count > 1:
                leave.count -= 1
                raise
            return leave.kind == "break"
        return False

    def _group(self, command: GroupCommand) -> Status:
        if not command.is_subshell:
            return self.run(command.body)
        inner = self.nested(self.variables.subshell())
        inner.output = self.output
        try:
            status = inner.run(command.body)
        except Leave as leave:
            status = leave.status
        self.output = inner.output
        return status

    def assign(self, assignment: ShellAssignment) -> None:
        """Carry out an assignment."""
        before, name, line = self.variables.get(assignment.name), assignment.name, assignment.line
        if assignment.subscript:
            self._set(name, self._with_element(before, assignment), line=line)
            return
        value: ShellValue
        if isinstance(assignment.value, tuple):
            items = tuple(one for word in assignment.value for one in self.expander.words(word))
            if any(re.match(r"\[[^\]]+\]=", one.text) for one in items):
                value = UnknownText(reason=f"{name} is an associative array")
            elif not assignment.is_appended or not before:
                value = items
            elif isinstance(before, UnknownText):
                longer = [(*one, *items) for one in before.choices if isinstance(one, tuple)]
                value = replace(before, choices=tuple(longer) if len(longer) == len(before.choices) else ())
            else:
                old = (Word(text=before, line=line),) if isinstance(before, str) else before
                value = (*old, *items)
        else:
            value = self.expander.as_written(assignment.value)
            if assignment.is_appended and before is not None:
                value = self._appended(before, value, assignment)
        self._set(name, value, line=line)

    def _with_element(self, before: ShellValue | None, assignment: ShellAssignment) -> ShellValue:
        """Return an array after `NAME[subscript]=word`; unknown for one with gaps or with keys that are text."""
        name, line = assignment.name, assignment.line
        refused = UnknownText(reason=f"{name}[{assignment.subscript}]= is not supported")
        if isinstance(before, UnknownText) or isinstance(assignment.value, tuple) or assignment.is_appended:
            return before if isinstance(before, UnknownText) else refused
        items = [] if not before else list(before) if isinstance(before, tuple) else [Word(text=before, line=line)]
        if not re.fullmatch(r"\d+|\$?[A-Za-z_]\w*", assignment.subscript):
            return refused
        try:
            index = self.expander.at(line).integer(assignment.subscript.removeprefix("$"))
        except UnknownValueError:
            return refused
        if not 0 <= index <= len(items):
            return refused
        written = self.expander.as_written(assignment.value)
        if isinstance(written, str):
            item = Word(text=written, line=line)
        else:
            item = Word(text=written.text, line=line, unknown=written.reason)
        return (*items[:index], item, *items[index + 1 :])

    def _appended(self, before: ShellValue, value: ShellValue, assignment: ShellAssignment) -> ShellValue:
        if isinstance(before, tuple):
            raise InputError(f"{self.where(assignment.line)}: text is added to an array", got=assignment.name)
        if isinstance(before, str) and isinstance(value, str):
            return f"{before}{value}"
        parts = [one if isinstance(one, UnknownText) else UnknownText(reason="", text=str(one), if_empty=str(one))
                 for one in (before, value)]  # fmt: skip
        if any(one.reason and not one.text for one in parts):
            return replace(next(one for one in parts if one.reason and not one.text), choices=())
        empties = [one.if_empty for one in parts]
        return UnknownText(
            reason=parts[0].reason or parts[1].reason,
            text=parts[0].text + parts[1].text,
            if_empty=None if None in empties else "".join(map(str, empties)),
        )

    def assign_text(self, name: str, text: str, *, line: int, unknown: str) -> None:
        """Set a variable to text, or to an unknown value for a reason."""
        self._set(name, UnknownText(reason=unknown) if unknown else text, line=line)

    def blur(self, before: dict[str, ShellValue], *, line: int) -> None:
        """Make variables unknown that have changed since `before`, if the commands may not run."""
        for name, value in list(self.variables.values.items()) if self.uncertain else ():
            if value != before.get(name):
                self.assign_text(name, "", line=line, unknown=self._reason(name, line))

    def _set(self, name: str, value: ShellValue, *, line: int) -> None:
        """Set a variable; its value is not known if the commands may not run."""
        if self.uncertain:
            self.assigned.add(name)
            if (before := self.variables.get(name)) == value:
                return
            choices = () if self.repeats else either_of(before, value)
            value = UnknownText(reason=self._reason(name, line), choices=choices)
        self.variables.set(name, value)

    def _reason(self, name: str, line: int) -> str:
        return f"{name} depends on {self.uncertain} (line {line})"

    def _simple(self, command: SimpleCommand) -> Status:
        words: list[Word] = []
        for word in command.words:
            if isinstance(word, ShellWord):
                words += self.expander.words(word)
        is_last = False
        while len(words) > 1 and words[0].text in PREFIXES and not words[1].text.startswith("-"):
            is_last = is_last or words.pop(0).text == "exec"
        if not words:
            for assignment in command.assignments:
                self.assign(assignment)
            return True
        status = self._named(command, words)
        if is_last:
            raise Leave("exit", status=status)
        return status

    def _named(self, command: SimpleCommand, words: list[Word]) -> Status:
        """Execute a function, a command of the shell or a program."""
        name = words[0].text
        is_function = name in self.variables.functions
        if is_function or name in ("eval", "source", "."):
            before = {one.name: self.variables.values.get(one.name) for one in command.assignments}
            for assignment in command.assignments:
                self.assign(assignment)
            try:
                return self._function(name, words) if is_function else BUILTINS[name](self, command, words)
            finally:
                self.assigned -= before.keys()
                self.variables.put_back(before)
        if builtin := BUILTINS.get(name):
            return builtin(self, command, words)
        self.output = None
        self._program(command, words)
        return True if name in SUCCEEDING else None

    def _function(self, name: str, words: list[Word]) -> Status:
        """Call a function with arguments."""
        if self.depth >= MAX_DEPTH:
            raise InputError(f"{self.variables.name}: functions call each other without end", got=name)
        before = self.variables.positional
        self.variables.positional = tuple(one.text for one in words[1:])
        self.variables.locals.append({})
        self.depth += 1
        try:
            return self.command(self.variables.functions[name])
        except Leave as leave:
            if leave.kind != "return":
                raise
            return leave.status
        finally:
            self.depth -= 1
            self.assigned -= self.variables.locals[-1].keys()
            self.variables.put_back(self.variables.locals.pop())
            self.variables.positional = before

    def _program(self, command: SimpleCommand, words: list[Word]) -> None:
        """Follow a command that may run a training program."""
        name = words[0].text.rpartition("/")[2]
        if name in programs.NEVER_RUNNING:
            self.found.documents += [self._document_text(one.parts) for one in command.documents]
            return
        inner = programs.shell_text(words, command.documents)
        if inner is not None:
            text = inner.text if inner.document is None else self._document_text(inner.document)
            child = self._child(command, inner.positional, name=self.variables.name)
            child.run_text(text, line=words[0].line)
        elif (k := self.found.program_at(words)) is not None:
            if name == "xargs":
                raise InputError(f"{self.where(words[0].line)}: arguments from xargs are not known")
            if k >= 0 and programs.OTHER_MODELS.search(words[k].text):
                what = f"{self.where(words[k].line)}: a program with other options than pretrain_gpt.py"
                hint = "import configurations of decoder-only models that pretrain_gpt.py trains"
                raise InputError(what, got=words[k].text, allowed="pretrain_gpt.py", hint=hint)
            if any(one.text.startswith(("<(", ">(")) for one in words):
                raise InputError(f"{self.where(words[0].line)}: process substitution is not supported")
            values = self._child(command, (), name="").variables.values if self.found.environment else {}
            stated = [(one, values[one]) for one in self.found.environment if one in values]
            before = [f"{one}={value if isinstance(value, str) else '$'}" for one, value in stated]
            self.found.calls.append([*(Word(text=one, line=words[0].line) for one in before), *words[k + 1 :]])
        elif (k := programs.script_at(words)) is not None and (path := script_file(self, words[k])) is not None:
            is_itself = str(path) == self.variables.name and k == len(words) - 1 and not command.assignments
            if is_itself and name == "sbatch":
                return  # submits itself: the rest is what the job runs
            self._child(command, tuple(one.text for one in words[k + 1 :]), name=str(path)).run_text(
                script_text(self, path, line=words[k].line), line=1
            )

    def _child(self, command: SimpleCommand, positional: tuple[str, ...], *, name: str) -> Interpreter:
        """Return another shell with the exported variables, and those before the command that starts it."""
        before = self.nested(self.variables.subshell())
        for assignment in command.assignments:
            before.variables.exported.add(assignment.name)
            before.assign(assignment)
        return self.nested(replace(before.variables.child(positional), name=name))

    def _document_text(self, parts: tuple[Part, ...]) -> str:
        written = self.expander.as_written(ShellWord(parts=parts, line=0))
        return written if isinstance(written, str) else written.text

    def run_nested(self, body: Body) -> Status:
        """Execute the commands of `eval` or of another script in this shell."""
        if self.depth >= MAX_DEPTH:
            raise InputError(f"{self.variables.name}: scripts call each other without end")
        self.depth += 1
        try:
            return self.run(body)
        finally:
            self.depth -= 1

    def run_text(self, text: str, *, line: int) -> Status:
        """Execute text as a script, after which this shell ends."""
        try:
            return self.run(parse_script(text, name=self.variables.name, first_line=line))
        except Leave as leave:
            return leave.status
