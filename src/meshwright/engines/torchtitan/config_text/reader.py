"""Modules and statements of a program, read with the values that its text states. Nothing of the program runs.

A part of the program with an unknown value gives an `Outside`. The reader stops where it would have to know one:
`NotReadError` says where. Errors of the program are those of Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from types import new_class
from typing import Any

from meshwright.engines.torchtitan.config_text import natives
from meshwright.engines.torchtitan.config_text.calls import is_special, said
from meshwright.engines.torchtitan.config_text.expressions import Expressions
from meshwright.engines.torchtitan.config_text.modules import ProjectModules
from meshwright.engines.torchtitan.config_text.values import (
    Function,
    Lazy,
    ModuleName,
    NameScope,
    NotReadError,
    Outside,
    ProgramObject,
    is_class,
    once,
    source_of,
)

RETURN, BREAK, CONTINUE = "return", "break", "continue"
Signal = tuple[str, Any] | None
KINDS: dict[str, Any] = {
    "property": property,
    "cached_property": property,
    "staticmethod": staticmethod,
    "classmethod": classmethod,
}
"""Functions of a class by their decorators."""


class Reader(Expressions):
    """Reads the modules of one configuration."""

    def __init__(self, modules: ProjectModules) -> None:
        super().__init__()
        self._modules = modules
        self._loaded: dict[str, NameScope] = {}
        self._outsides: dict[str, type] = {}

    def module(self, name: str) -> NameScope | None:
        """Return the names of a module; None: its text is not at hand."""
        if name not in self._loaded and (found := self._modules.find(name)):
            scope = NameScope(
                names={"__name__": name, "__file__": found.file}, parent=None, file=found.file,
                module=name if found.is_package else name.rpartition(".")[0],
                outside_star=name if found.is_part else "",
            )  # fmt: skip
            self._loaded[name] = scope
            self.spend(len(found.text) // 10)
            before = self.place
            for statement in _parsed(found.text, found.file).body:
                self._of_module(statement, scope)
            self.place = before
        return self._loaded.get(name)

    def _of_module(self, statement: ast.stmt, scope: NameScope) -> None:
        """Read a statement of a module; names that it binds and that cannot be read are unknown."""
        try:
            self._statement(statement, scope)
        except Exception as error:  # a program may raise any exception
            is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            bound = [
                one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            ]
            for name in [statement.name] if is_definition else bound:
                scope.names[name] = Outside(f"{name} ({said(error)})", is_call=True)

    def found(self, module: str, name: str) -> Any:
        """Return a name of a module, which may be a module below it."""
        scope = self.module(module)
        if scope is not None and name in scope.names:
            return self.resolved(scope.names, name)
        whole = f"{module}.{name}"
        if self._modules.find(whole):
            return ModuleName(whole)
        if whole in self.of_packages:
            return self.of_packages[whole]
        if scope is None or scope.outside_star:
            return Outside(whole)
        raise ImportError(f"cannot import name {name!r} from {module!r}")

    # ---- statements

    def body(self, statements: list[ast.stmt], scope: NameScope) -> Signal:
        """Read statements one after the other; return what leaves them early."""
        for statement in statements:
            if signal := self._statement(statement, scope):
                return signal
        return None

    def _statement(self, node: ast.stmt, scope: NameScope) -> Signal:
        self.spend()
        self.place = f"{scope.file}:{node.lineno}"
        method = getattr(self, f"_read_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotReadError(f"{self.place}: a statement that is not read", got=type(node).__name__.lower())
        signal: Signal = method(node, scope)
        return signal

    def _read_pass(self, node: ast.Pass, scope: NameScope) -> None: ...

    def _read_global(self, node: ast.Global, scope: NameScope) -> None:
        scope.globals_ |= {*node.names}

    def _read_expr(self, node: ast.Expr, scope: NameScope) -> None:
        if isinstance(node.value, ast.Yield | ast.YieldFrom):
            made = self.value(node.value.value, scope)
            scope.names["<yielded>"].extend([made] if isinstance(node.value, ast.Yield) else made)
            return
        value = self.value(node.value, scope)
        if (
            isinstance(value, Outside)
            and value.is_call
            and not natives.WITHOUT_EFFECT.search(value.name)
            and any(isinstance(one, ProgramObject | list | dict) for one in (*value.positional, *value.named.values()))
        ):
            raise NotReadError(
                f"{self.place}: a call that may change the configuration, whose text is not at hand", got=value.name
            )

    def _read_assign(self, node: ast.Assign, scope: NameScope) -> None:
        value = self.value(node.value, scope)
        for target in node.targets:
            self.assign(target, value, scope)

    def _read_annassign(self, node: ast.AnnAssign, scope: NameScope) -> None:
        if scope.is_class and isinstance(node.target, ast.Name):
            scope.names.setdefault("<annotated>", {})[node.target.id] = source_of(node.annotation)
        if node.value is not None:
            self.assign(node.target, self.value(node.value, scope), scope)

    def _read_augassign(self, node: ast.AugAssign, scope: NameScope) -> None:
        target = once(node, "read", lambda: ast.parse(source_of(node.target), mode="eval").body)
        value = self.operated(type(node.op), self.value(target, scope), self.value(node.value, scope), node)
        self.assign(node.target, value, scope)

    def _read_return(self, node: ast.Return, scope: NameScope) -> Signal:
        return RETURN, self.value(node.value, scope)

    def _read_break(self, node: ast.Break, scope: NameScope) -> Signal:
        return BREAK, None

    def _read_continue(self, node: ast.Continue, scope: NameScope) -> Signal:
        return CONTINUE, None

    def _read_if(self, node: ast.If, scope: NameScope) -> Signal:
        return self.body(node.body if self.test(node.test, scope) else node.orelse, scope)

    def _read_for(self, node: ast.For, scope: NameScope) -> Signal:
        items = self.iterated(self.value(node.iter, scope))
        return self._repeated(node, scope, turns=(self.assign(node.target, item, scope) for item in items))

    def _read_while(self, node: ast.While, scope: NameScope) -> Signal:
        return self._repeated(node, scope, turns=iter(lambda: bool(self.test(node.test, scope)), False))

    def _repeated(self, node: ast.For | ast.While, scope: NameScope, *, turns: Iterable[object]) -> Signal:
        """Read the body once for each of `turns`, which prepare it; then the `else`, unless a break ended them."""
        for _ in turns:
            if signal := self.body(node.body, scope):
                if signal[0] == RETURN:
                    return signal
                if signal[0] == BREAK:
                    return None
        return self.body(node.orelse, scope)

    def _read_with(self, node: ast.With, scope: NameScope) -> Signal:
        for item in node.items:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Outside(source_of(item.context_expr), is_call=True), scope)
        return self.body(node.body, scope)

    def _read_assert(self, node: ast.Assert, scope: NameScope) -> None:
        if not self.test(node.test, scope):
            message = self.value(node.msg, scope) if node.msg else source_of(node.test)
            raise AssertionError(message if isinstance(message, str) else said(message))

    def _read_raise(self, node: ast.Raise, scope: NameScope) -> None:
        error = self.value(node.exc, scope)
        if isinstance(error, Exception) or (isinstance(error, type) and issubclass(error, Exception)):
            raise error
        raise NotReadError(f"{self.place}: an exception of another package", got=source_of(node))

    def _read_try(self, node: ast.Try, scope: NameScope) -> Signal:
        try:
            signal = self.body(node.body, scope)
        except NotReadError:
            raise
        except Exception as error:
            for handler in node.handlers:
                kinds = self.value(handler.type, scope) if handler.type else Exception
                kinds = tuple(k for k in (kinds if isinstance(kinds, tuple) else (kinds,)) if isinstance(k, type))
                if isinstance(error, kinds):
                    if handler.name:
                        scope.names[handler.name] = error
                    return self.body([*handler.body, *node.finalbody], scope)
            raise
        return signal or self.body([*node.orelse, *node.finalbody], scope)

    def _read_import(self, node: ast.Import, scope: NameScope) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            scope.names[alias.asname or name] = ModuleName(name) if self._modules.find(name) else Outside(name)

    def _read_importfrom(self, node: ast.ImportFrom, scope: NameScope) -> None:
        package = scope.of_module.module
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name != "*":
                scope.names[alias.asname or alias.name] = Lazy(module, alias.name)
            elif other := self.module(module):
                public = other.names.get("__all__") or [name for name in other.names if not name.startswith("_")]
                scope.names |= {name: Lazy(module, name) for name in public}
            else:
                scope.of_module.outside_star = module

    def _read_functiondef(self, node: ast.FunctionDef, scope: NameScope) -> None:
        function: Any = self.function(node, node.name, scope)
        for decorator in reversed(node.decorator_list):
            name = source_of(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if (kind := name.rpartition(".")[2]) in KINDS:
                function = KINDS[kind](function)
            elif name.endswith(".setter"):
                function = scope.names[node.name]
            elif kind not in natives.KEPT:
                try:
                    function = self.call(self.value(decorator, scope), (function,), {})
                except NotReadError as error:
                    function = Outside(f"{source_of(decorator)} ({error.message})")
        scope.names[node.name] = function

    def _read_classdef(self, node: ast.ClassDef, scope: NameScope) -> None:
        qualname = scope.names.get("<qualname>", "") + node.name
        inside = NameScope(names={"<qualname>": f"{qualname}."}, parent=scope, file=scope.file, module=scope.module,
                       is_class=True)  # fmt: skip
        bases = [base for one in node.bases if (base := self._base(self.value(one, scope))) is not object]
        self.body(node.body, inside)
        names = {
            name: value for name, value in inside.names.items() if not name.startswith("<") and not is_special(name)
        }
        if any(issubclass(one, Enum) for one in bases):
            mixed = tuple(one for one in bases if not issubclass(one, ProgramObject))
            cls: Any = new_class(node.name, mixed, exec_body=lambda content: content.update(names))
        else:
            read = [one if is_class(one) else self._outside(one.__name__) for one in bases]
            cls = type(node.name, (*read,) or (ProgramObject,), names)
        cls.__qualname__ = qualname
        self.spend(len(cls.__mro__))
        for value in names.values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, Function) and function.owner is None:
                function.owner = cls
        for mark in node.decorator_list:
            if source_of(mark).partition("(")[0].rpartition(".")[2] == "dataclass":
                self._make_dataclass(cls, inside.names.get("<annotated>", {}), mark)
        config: Any = names.get("Config")
        if is_class(config) and any(one.__name__ == "Configurable" for one in cls.__mro__):
            config._owner = cls
        scope.names[node.name] = cls

    def _base(self, value: Any) -> type:
        """Return a class above another one, made here if its text is not read."""
        if isinstance(value, Outside) and value.name.endswith("Enum"):
            return {"StrEnum": StrEnum, "IntEnum": IntEnum}.get(value.name.rpartition(".")[2], Enum)
        return value if isinstance(value, type) else self._outside(said(value))

    def _outside(self, name: str) -> type:
        return self._outsides.setdefault(name, type(name, (ProgramObject,), {"<outside>": Outside(name)}))

    def _make_dataclass(self, cls: Any, annotated: dict[str, str], mark: ast.expr) -> None:
        """Make a dataclass of a class; its types are not read."""
        others = ("ClassVar", "typing.ClassVar", "KW_ONLY")
        kinds = {name: kind.lstrip("'\"") for name, kind in annotated.items() if not is_special(name)}
        names = [name for name, kind in kinds.items() if not kind.startswith(others)]
        cls.__annotations__ = dict.fromkeys(names, object)
        self.spend(len(names) + len(getattr(cls, "__dataclass_fields__", ())))
        keywords = mark.keywords if isinstance(mark, ast.Call) else []
        flags = {one.arg: one.value.value for one in keywords if isinstance(one.value, ast.Constant)}
        dataclass(**{name: bool(flags[name]) for name in ("init", "eq", "kw_only") if name in flags})(cls)


def _parsed(text: str, file: str) -> ast.Module:
    """Return the syntax of a text. Raises NotReadError for text that is no Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{file}:{error.lineno or 1}: not Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError) as error:
        reason = "it is nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise NotReadError(f"{file}: not Python: {reason}") from None
