"""Variables of a shell script: text, arrays, and values that are not known without running programs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.engines.megatron.shell_scripts.syntax import Command, Word
from meshwright.errors import InputError


@dataclass(frozen=True, kw_only=True)
class UnknownText:
    """A value that depends on files, programs, the machine, or variables that are not set."""

    reason: str
    text: str = ""  # of the value, with `$NAME` and `$(...)` for what is not known
    if_empty: str | None = None  # the value if only variables are missing, and they are empty
    choices: tuple[str | tuple[Word, ...] | None, ...] = ()  # all that it may be, None for not set; empty: anything


def either_of(*values: ShellValue | None) -> tuple[str | tuple[Word, ...] | None, ...]:
    """Return all that a variable with one of these values may be; empty: anything."""
    found = [(one.choices or (one.text,)) if isinstance(one, UnknownText) else (one,) for one in values]
    is_known = not any(isinstance(one, UnknownText) and not (one.choices or one.text) for one in values)
    return sum(found, ()) if is_known and sum(map(len, found)) <= MAX_CHOICES else ()


ShellValue = str | tuple[Word, ...] | UnknownText
MAX_CHOICES = 8
MAX_LENGTH = 10**6  # letters of text, words of an array, bytes of another script
OF_THE_MACHINE = (
    "PWD", "OLDPWD", "HOME", "USER", "HOSTNAME", "RANDOM", "SECONDS", "EPOCHSECONDS", "UID", "EUID", "PPID", "BASHPID",
    "BASH", "BASH_SOURCE", "BASH_VERSION", "LINENO", "PATH", "SHELL", "OSTYPE", "?", "$", "-",
)  # fmt: skip


@dataclass(kw_only=True)
class ShellVariables:
    """State of a shell. A name without a value may come from the environment."""

    name: str  # of the script, `$0`
    values: dict[str, ShellValue] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    functions: dict[str, Command] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)  # by `unset` and `local`: not of the environment
    readonly: set[str] = field(default_factory=set)
    locals: list[dict[str, ShellValue | None]] = field(default_factory=list)  # values to restore, by function
    missing: dict[str, None] = field(default_factory=dict)  # names that the current condition reads without a value

    def get(self, name: str) -> ShellValue | None:
        """Return the value of a variable or positional argument; None: it is not set."""
        if name.isdigit():
            if name == "0":
                return self.name
            k = int(name)
            if k <= len(self.positional):
                return self.positional[k - 1]
            self.missing[name] = None
            return None
        if name == "#":
            self.missing |= {} if self.positional else {name: None}
            return str(len(self.positional))
        if name in ("@", "*"):
            return tuple(Word(text=one, line=0) for one in self.positional)
        if name in self.values:
            return self.values[name]
        if name in OF_THE_MACHINE:
            return UnknownText(reason=f"${name} depends on the machine")
        self.missing[name] = None
        return None

    def set(self, name: str, value: ShellValue) -> None:
        if name == "IFS" and value != " \t\n":
            raise InputError(f"{self.name}: another IFS is not supported")
        if name in self.readonly and value != self.values.get(name):
            raise InputError(f"{self.name}: {name} is readonly, and is assigned again")
        if len(value.text if isinstance(value, UnknownText) else value) > MAX_LENGTH:
            raise InputError(f"{self.name}: the value of {name} is too long", allowed=f"<= {MAX_LENGTH:,}")
        self.values[name] = value

    def make_local(self, name: str) -> None:
        """Restore the variable at the end of the current function."""
        if self.locals:
            self.locals[-1].setdefault(name, self.values.get(name))

    def put_back(self, before: dict[str, ShellValue | None]) -> None:
        """Give variables their earlier values; None: they were not set."""
        for name, value in before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def unset(self, name: str) -> None:
        """Remove a variable, which from then on is empty rather than one of the environment."""
        self.values.pop(name, None)
        self.removed.add(name)

    def subshell(self) -> ShellVariables:
        """Return a copy whose changes end with it."""
        return replace(
            self, values=dict(self.values), functions=dict(self.functions), exported=set(self.exported),
            removed=set(self.removed), locals=[dict(one) for one in self.locals],
        )  # fmt: skip

    def child(self, positional: tuple[str, ...]) -> ShellVariables:
        """Return the state of another shell that this one starts: exported variables only."""
        values = {name: value for name, value in self.values.items() if name in self.exported}
        return ShellVariables(name=self.name, values=values, positional=positional, exported=set(self.exported))
