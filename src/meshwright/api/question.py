"""A question: a public function whose `Annotated` parameters serve the argument's check, the option and the documents.

    @question("meshwright.mlperf.results:score_sets")
    def mlperf_score(
        *paths: Annotated[PathLike, AnyPath("Folders of sets.", least=1)],
        num_runs: Annotated[int | None, Count("Score the first runs only.", flag="--runs")] = None,
    ) -> BenchmarkScores:
        '''Score sets of runs.'''
        return answered_by_body()

A call checks every argument that is not its default, and passes all of them on by name to the function that is named
in the decorator, which is imported then. `meshwright.cli.question` makes the options of a command from the same
parameters. The section "Args" of the docstring is added when the module is imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin

from meshwright.api import arguments
from meshwright.errors import InputError
from meshwright.targets import load

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_NO_DEFAULT = object()
_FIRST_SECTION = re.compile(r"^    (?:Returns|Raises|Example):$", re.MULTILINE)


@dataclass(frozen=True)
class QuestionParameter:
    """A parameter of a question. One of `*names` or of a `Sequence` takes a list, and its option may be repeated.

    Attributes:
        about: a sentence for the help of its option and for the documentation.
        unset: the value that holds where the argument is absent, in words.
        flag: its option. Default: `--` and its name with dashes.
        key: the key of the run file that it sets.
        metavar: name of its value in the help of the command.
        least: fewest items of a list.
        is_joined: True if the option of a list takes all of it at once, separated by commas.
    """

    about: str
    _: KW_ONLY
    unset: str = ""
    flag: str = ""
    key: str = ""
    metavar: str = ""
    least: int = 0
    is_joined: bool = False

    example = '["text"]'
    takes_list = False
    """True if it takes a list of whatever type it is annotated with."""

    def listed(self, name: str, value: object) -> tuple[Any, ...]:
        """Return each item of `value` as the body takes it. Raises InputError."""
        found = tuple(self.one(name, item) for item in arguments.items(name, value, example=self.example))
        if len(found) < self.least:
            raise InputError(f"{name} are missing", allowed=f"{self.least} or more")
        return found

    def one(self, name: str, value: object) -> Any:
        """Return one value as the body takes it. Raises InputError."""
        raise TypeError(f"{type(self).__name__} checks no value")

    def option(self, name: str) -> str:
        """The option of the parameter of this name."""
        return self.flag or f"--{name.replace('_', '-')}"

    def documented(self, name: str) -> str:
        """The parameter's lines of a docstring's section "Args"."""
        unset = f" Default: {self.unset}." if self.unset else ""
        return f"{name}: {self.about}{unset}"


@dataclass(frozen=True)
class PlainText(QuestionParameter):
    """Text of at least one character."""

    def one(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise InputError(name, got=value, allowed="text")
        return value


@dataclass(frozen=True, kw_only=True)
class AnyPath(QuestionParameter):
    """A path. `is_file` and `is_folder` exclude the other one; `exists` demands that it is there."""

    is_file: bool = True
    is_folder: bool = True
    exists: bool = False

    example = '["runs/p1"]'

    def one(self, name: str, value: object) -> Path:
        return arguments.path(name, value)


@dataclass(frozen=True, kw_only=True)
class Folders(AnyPath):
    """Folders: one, or a list of them."""

    is_file: bool = False

    takes_list = True

    def listed(self, name: str, value: object) -> tuple[Path, ...]:
        return super().listed(name, [value] if isinstance(value, str | os.PathLike) else value)


@dataclass(frozen=True)
class AnyName(QuestionParameter):
    """A name or a path that the body looks up: a catalogue's entry, a file, a name on a hub. Passed on as text."""

    def one(self, name: str, value: object) -> str:
        return str(arguments.path(name, value))


@dataclass(frozen=True)
class PathOrText(QuestionParameter):
    """A path, or text that may be one. Text is passed on as it is, and a path as text."""

    def one(self, name: str, value: object) -> str:
        return value if isinstance(value, str) and value else str(arguments.path(name, value))


@dataclass(frozen=True, kw_only=True)
class Count(QuestionParameter):
    """A whole number from `low` to `high`."""

    low: int = 1
    high: int = arguments.MAX_COUNT

    example = "[64, 128]"

    def one(self, name: str, value: object) -> int:
        return arguments.count(name, value, least=self.low, most=self.high)


@dataclass(frozen=True, kw_only=True)
class NamedCounts(QuestionParameter):
    """Whole numbers by name: a mapping. `options`: the names, each an option, with its help."""

    options: Mapping[str, str]

    def one(self, name: str, value: object) -> dict[str, int]:
        if not isinstance(value, Mapping):
            allowed = f'a mapping such as {{"{next(iter(self.options))}": 8}}'
            raise InputError(name, got=type(value).__name__, allowed=allowed)
        chosen = {arguments.choice(name, key, self.options): number for key, number in value.items()}
        return {key: arguments.count(f"{name}: {key}", number) for key, number in chosen.items()}


@dataclass(frozen=True)
class Number(QuestionParameter):
    """A finite number; the body checks its range."""

    def one(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(name, got=value, allowed="a number")
        return value


@dataclass(frozen=True, kw_only=True)
class Amount(QuestionParameter):
    """A number above 0, up to `high`."""

    high: float = arguments.MAX_NUMBER

    def one(self, name: str, value: object) -> float:
        return arguments.number(name, value, most=self.high)


@dataclass(frozen=True, kw_only=True)
class Flag(QuestionParameter):
    """True or False. `off`: the option that makes it False where True is its default."""

    off: str = ""

    def one(self, name: str, value: object) -> bool:
        return arguments.flag(name, value)


@dataclass(frozen=True, kw_only=True)
class OneOf(QuestionParameter):
    """One of `values`. `synonyms`: other names of the first."""

    values: tuple[str, ...]
    synonyms: tuple[str, ...] = ()

    def one(self, name: str, value: object) -> str:
        return arguments.choice(name, self.values[0] if value in self.synonyms else value, self.values)


@dataclass(frozen=True)
class Step(QuestionParameter):
    """A step of a checkpoint, or "best"."""

    def one(self, name: str, value: object) -> int | str | None:
        return arguments.checkpoint_step(value)


@dataclass(frozen=True, kw_only=True)
class Parsed(QuestionParameter):
    """A list of whatever type it is annotated with, as `parse` takes it by the name of the parameter."""

    parse: Callable[[str, Any], Any]

    takes_list = True

    def listed(self, name: str, value: object) -> Any:
        return self.parse(name, value)


@dataclass(frozen=True)
class ShellCommand(PlainText):
    """Words of a command. The option takes the command as a shell does."""

    example = '["srun", "--nodes=2"]'


@dataclass(frozen=True)
class Unchecked(QuestionParameter):
    """A value that the body checks."""

    def one(self, name: str, value: object) -> Any:
        return value


class Hook(Unchecked):
    """Anything that only the Python function takes, such as a function to call: passed on as it is."""


@dataclass(frozen=True)
class Question:
    """The parameters of a public function, and the function that answers it."""

    name: str
    body: str  # "module:function"
    is_about_run: bool
    prepare: Callable[..., dict[str, Any]]
    signature: inspect.Signature
    parameters: Mapping[str, QuestionParameter]

    def ask(self, given: Mapping[str, object], **hooks: Any) -> Any:
        """Return the body's answer to arguments by name. `hooks` go to the body unchecked, such as a progress bar."""
        asked = self.checked(given)
        if self.is_about_run:
            asked = load("meshwright.api.runs:with_run")(asked, may_replace="run" not in self.defaults)
        return load(self.body)(**self.prepare(**asked, **hooks))

    def meant(self, name: str) -> str | None:
        """The parameter that an unknown one stands for: by its option, by its name in other tools, or by its spelling.

        A name of a key stands for the parameter that sets it.
        """
        key = load("meshwright.runfile.synonyms:key_for")(name)
        for known, parameter in self.parameters.items():
            if name == parameter.option(known).lstrip("-").replace("-", "_") or (key and key == parameter.key):
                return known
        return next(iter(get_close_matches(name, self.parameters, n=1)), None)

    def checked(self, given: Mapping[str, object]) -> dict[str, Any]:
        """Return arguments by name as the body takes them. Raises InputError."""
        return {name: self._checked(name, value) for name, value in given.items()}

    def _checked(self, name: str, value: object) -> Any:
        parameter, default = self.parameters[name], self.defaults.get(name, _NO_DEFAULT)
        if value is default or (type(value) is type(default) and value == default):
            return value
        return parameter.listed(name, value) if name in self.repeated else parameter.one(name, value)

    @functools.cached_property
    def repeated(self) -> frozenset[str]:
        """The names of the parameters that take a list."""
        found = self.signature.parameters.values()
        return frozenset(
            p.name
            for p in found
            if p.kind is p.VAR_POSITIONAL or p.annotation.startswith("Sequence[") or self.parameters[p.name].takes_list
        )

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of each parameter that has one."""
        return {p.name: p.default for p in self.signature.parameters.values() if p.default is not p.empty}


def question(
    body: str, *, is_about_run: bool = False, prepare: Callable[..., dict[str, Any]] = dict
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Make a function of annotated parameters and a docstring a question that `body`, "module:function", answers.

    `is_about_run`: the body takes `run`, its overrides and the keys of the run file as one `Run`. Keys replace those of
    a run that must be given, and describe one that may be left out. `prepare` makes the arguments of the body from the
    checked ones.
    """

    def declare(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        signature, parameters = _read(function)
        found = Question(getattr(function, "__name__", ""), body, is_about_run, prepare, signature, parameters)

        @functools.wraps(function)
        def asked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                hint = next((found.meant(name) for name in kwargs if name not in signature.parameters), None)
                raise TypeError(f"{found.name}() {error}" + (f"; did you mean {hint}?" if hint else "")) from None
            bound.apply_defaults()
            return found.ask(bound.arguments)

        asked.__doc__ = _with_arguments(function.__doc__ or "", parameters)
        asked.__dict__["__signature__"], asked.__dict__["__question__"] = signature, found
        return asked

    return declare


def ask(function: Callable[..., Answer], asked: Mapping[str, object], **hooks: Any) -> Answer:
    """Ask the question of a decorated function with arguments by name; `hooks` as in `Question.ask`."""
    return question_of(function).ask(asked, **hooks)


def answered_by_body() -> Any:
    """End a question's function, which nothing calls: the decorator calls the body that it names."""
    raise TypeError("a question is answered by the body that its decorator names")


def question_of(function: Callable[..., Any]) -> Question:
    """The question that a decorated function asks."""
    return function.__dict__["__question__"]


def _read(function: Any) -> tuple[inspect.Signature, dict[str, QuestionParameter]]:
    """The signature without what `Annotated` adds, as its author wrote the types, and the parameters by name."""
    parameters, plain = {}, []
    written = inspect.signature(function)
    for parameter in written.parameters.values():
        annotation = parameter.annotation
        found = eval(annotation, function.__globals__)
        if get_origin(found) is not Annotated:
            raise TypeError(f"{function.__qualname__}: {parameter.name} is not Annotated")
        parameters[parameter.name] = next(item for item in get_args(found)[1:] if isinstance(item, QuestionParameter))
        subscript = ast.parse(annotation, mode="eval").body
        assert isinstance(subscript, ast.Subscript)
        assert isinstance(subscript.slice, ast.Tuple)
        plain.append(parameter.replace(annotation=ast.unparse(subscript.slice.elts[0])))
    return written.replace(parameters=plain), parameters


def _with_arguments(docstring: str, parameters: Mapping[str, QuestionParameter]) -> str:
    """The docstring with its section "Args" before the first other section."""
    lines = "".join(f"        {p.documented(name)}\n" for name, p in parameters.items())
    section = f"    Args:\n{lines}\n"
    found = _FIRST_SECTION.search(docstring)
    at = found.start() if found else len(docstring)
    return f"{docstring[:at]}{section}{docstring[at:]}"
