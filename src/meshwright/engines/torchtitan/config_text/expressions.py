"""Expressions of a program that is read as text: their values where the text states them, `Outside` elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator, KeysView
from enum import Enum
from pathlib import Path
from typing import Any, cast

from meshwright.engines.torchtitan.config_text import natives
from meshwright.engines.torchtitan.config_text.calls import Calls, said
from meshwright.engines.torchtitan.config_text.values import (
    Function,
    NameScope,
    NotReadError,
    Outside,
    ProgramObject,
    is_class,
    source_of,
)


class Expressions(Calls):
    """Values of expressions."""

    def value(self, node: ast.expr | None, scope: NameScope) -> Any:
        """Return the value of an expression; None for none."""
        if node is None:
            return None
        self.spend()
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method is None:
            return Outside(source_of(node), is_call=True)
        return method(node, scope)

    def is_true(self, value: Any, node: ast.expr) -> bool:
        """Return the truth of a value. Raises NotReadError for an unknown one."""
        if isinstance(value, Outside) and value.is_call:
            raise NotReadError(
                f"{self.place}: the configuration depends on a value that its text does not state",
                got=f"{source_of(node)[:200]}, with {value.name[:200]}",
            )
        return bool(value)

    def test(self, node: ast.expr, scope: NameScope) -> bool:
        """Return the truth of an expression."""
        return self.is_true(self.value(node, scope), node)

    # ---- names and literals

    def _of_constant(self, node: ast.Constant, scope: NameScope) -> Any:
        return node.value

    def _of_name(self, node: ast.Name, scope: NameScope) -> Any:
        name, inside = node.id, scope
        while True:
            if name in inside.names:
                return self.resolved(inside.names, name)
            if inside.parent is None:
                break
            inside = inside.parent if inside.is_class or not inside.parent.is_class else inside.parent.enclosing()
        if name in self._functions:
            return self._functions[name]
        if name == "super":
            owner, above = scope.function and scope.function.owner, cast("Any", super)
            return (lambda *_: above(owner, scope.first)) if owner else Outside(name)
        if name == "print" or inside.outside_star or name in ("os", "open", "exec", "eval", "__import__", "compile"):
            return Outside(name)
        raise NameError(f"name {name!r} is not defined")

    def _items(self, nodes: list[ast.expr], scope: NameScope) -> list[Any]:
        made: list[Any] = []
        for one in nodes:
            if isinstance(one, ast.Starred):
                made.extend(self.iterated(self.value(one.value, scope)))
            else:
                made.append(self.value(one, scope))
        return made

    def _of_list(self, node: ast.List, scope: NameScope) -> list[Any]:
        return self._items(node.elts, scope)

    def _of_tuple(self, node: ast.Tuple, scope: NameScope) -> tuple[Any, ...]:
        return tuple(self._items(node.elts, scope))

    def _of_set(self, node: ast.Set, scope: NameScope) -> set[Any]:
        return {self.key(one) for one in self._items(node.elts, scope)}

    def _of_dict(self, node: ast.Dict, scope: NameScope) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                made |= self._mapping(self.value(value, scope))
            else:
                made[self.key(self.value(key, scope))] = self.value(value, scope)
        return made

    def _mapping(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise NotReadError(f"{self.place}: keywords that the text does not state", got=said(value))
        self.spend(len(value))
        return value

    def _of_joinedstr(self, node: ast.JoinedStr, scope: NameScope) -> Any:
        parts = [self.value(one, scope) for one in node.values]
        if unknown := next((one for one in parts if isinstance(one, Outside)), None):
            return unknown
        self.spend(sum(len(part) for part in parts))
        return "".join(parts)

    def _of_formattedvalue(self, node: ast.FormattedValue, scope: NameScope) -> Any:
        value, form = self.value(node.value, scope), self.value(node.format_spec, scope) or ""
        if isinstance(value, Outside) and value.is_call:
            return value
        if not isinstance(form, str) or not natives.FORMAT.fullmatch(form):
            return Outside(source_of(node), is_call=True)
        if not isinstance(value, int | float | str | None):
            self.weigh(value)
            value = said(value)
        return format(repr(value) if node.conversion == ord("r") else value if form else str(value), form)

    def _of_lambda(self, node: ast.Lambda, scope: NameScope) -> Function:
        return self.function(node, "<lambda>", scope)

    def function(self, node: ast.FunctionDef | ast.Lambda, name: str, scope: NameScope) -> Function:
        """Return the function that a statement or expression defines."""
        a = node.args
        positional = [*a.posonlyargs, *a.args]
        given = positional[len(positional) - len(a.defaults) :]
        pairs = [*zip(given, a.defaults, strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]
        return Function(
            name=name, qualname=f"{scope.names.get('<qualname>', '')}{name}", arguments=a, body=node.body,
            scope=scope.enclosing(), call=self.call_function,
            defaults={arg.arg: self.value(one, scope) for arg, one in pairs if one is not None},
        )  # fmt: skip

    # ---- operators

    def _of_binop(self, node: ast.BinOp, scope: NameScope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        return self.operated(type(node.op), left, right, node)

    def operated(self, kind: type[ast.operator], left: Any, right: Any, node: ast.AST) -> Any:
        """Return LEFT operator RIGHT."""
        if kind is ast.BitOr and any(isinstance(one, type) for one in (left, right)):
            return tuple(part for one in (left, right) for part in (one if isinstance(one, tuple) else (one,)))
        function = natives.OPERATORS.get(kind)
        known = int | float | str | list | tuple | dict | set | frozenset | KeysView | Path
        if (
            function is None
            or not (isinstance(left, known) and isinstance(right, known))
            or (kind is ast.Mod and isinstance(left, str))
        ):
            if isinstance(left, ProgramObject) or isinstance(right, ProgramObject):
                raise NotReadError(f"{self.place}: an operator of a class", got=source_of(node)[:200])
            return Outside(source_of(node), is_call=True)
        self.spend(natives.weight(function, left, right))
        return function(left, right)

    def _of_unaryop(self, node: ast.UnaryOp, scope: NameScope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(value, Outside) and value.is_call:
            return value
        if isinstance(node.op, ast.Not):
            return not self.is_true(value, node.operand)
        if not isinstance(value, int | float):
            return Outside(source_of(node), is_call=True)
        return -value if isinstance(node.op, ast.USub) else +value if isinstance(node.op, ast.UAdd) else ~int(value)

    def _of_boolop(self, node: ast.BoolOp, scope: NameScope) -> Any:
        stops_at = isinstance(node.op, ast.Or)
        value: Any = None
        for one in node.values:
            value = self.value(one, scope)
            if one is not node.values[-1] and self.is_true(value, one) is stops_at:
                break
        return value

    def _of_ifexp(self, node: ast.IfExp, scope: NameScope) -> Any:
        return self.value(node.body if self.test(node.test, scope) else node.orelse, scope)

    def _of_namedexpr(self, node: ast.NamedExpr, scope: NameScope) -> Any:
        scope.names[node.target.id] = value = self.value(node.value, scope)
        return value

    def _of_compare(self, node: ast.Compare, scope: NameScope) -> Any:
        left = self.value(node.left, scope)
        for kind, other in zip(node.ops, node.comparators, strict=True):
            right = self.value(other, scope)
            if not isinstance(kind, ast.Is | ast.IsNot):
                self.weigh(left)
                self.weigh(right)
            if any(isinstance(one, Outside) and one.is_call for one in (left, right)):
                return Outside(source_of(node), is_call=True)
            if not natives.COMPARISONS[type(kind)](left, right):
                return False
            left = right
        return True

    # ---- comprehensions, items and attributes

    def _of_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: NameScope) -> list[Any]:
        return [self.value(node.elt, inside) for inside in self._rounds(node.generators, scope)]

    def _of_generatorexp(self, node: ast.GeneratorExp, scope: NameScope) -> Iterator[Any]:
        return iter(self._of_listcomp(node, scope))

    def _of_setcomp(self, node: ast.SetComp, scope: NameScope) -> set[Any]:
        return {self.key(one) for one in self._of_listcomp(node, scope)}

    def _of_dictcomp(self, node: ast.DictComp, scope: NameScope) -> dict[Any, Any]:
        rounds = self._rounds(node.generators, scope)
        return {self.key(self.value(node.key, one)): self.value(node.value, one) for one in rounds}

    def _rounds(self, generators: list[ast.comprehension], scope: NameScope) -> Iterator[NameScope]:
        if not generators:
            yield scope
            return
        first, *others = generators
        inside = NameScope(names={}, parent=scope, file=scope.file, module=scope.module, function=scope.function,
                       first=scope.first)  # fmt: skip
        for item in self.iterated(self.value(first.iter, scope)):
            self.assign(first.target, item, inside)
            if all(self.test(one, inside) for one in first.ifs):
                yield from self._rounds(others, inside)

    def _of_subscript(self, node: ast.Subscript, scope: NameScope) -> Any:
        of, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(of, str | list | tuple | dict | range):
            if isinstance(key, slice):
                self.spend(len(of))
            return of[self.key(key)]
        if is_class(of) and issubclass(of, Enum) and key in of.__members__:
            return of[key]
        if isinstance(of, type):
            return of  # List[int]
        self.spend(len(of.name) // 64 if isinstance(of, Outside) else 1)
        # an item of a class is a type: `Callable[..., int]`
        is_type = isinstance(of, Outside) and not of.is_call and of.name.rpartition(".")[2][:1].isupper()
        return Outside(f"{said(of)}[{said(key)}]", is_call=not is_type)

    def _of_slice(self, node: ast.Slice, scope: NameScope) -> slice:
        return slice(*(self.value(one, scope) for one in (node.lower, node.upper, node.step)))

    def _of_attribute(self, node: ast.Attribute, scope: NameScope) -> Any:
        return self.attribute(self.value(node.value, scope), node.attr)

    def assign(self, target: ast.expr, value: Any, scope: NameScope) -> None:
        """Bind a name, an attribute, an item, or several of them."""
        match target:
            case ast.Name():
                names = scope.of_module.names if target.id in scope.globals_ else scope.names
                names[target.id] = value
            case ast.Attribute():
                self.set_attribute(self.value(target.value, scope), target.attr, value)
            case ast.Subscript():
                of, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(of, list | dict) and not isinstance(key, slice):
                    of[self.key(key)] = value
                elif not isinstance(of, Outside):
                    raise NotReadError(f"{self.place}: an assignment to an item", got=source_of(target))
            case ast.Tuple() | ast.List():
                values = [*self.iterated(value)]
                if len(values) != len(target.elts) or any(isinstance(one, ast.Starred) for one in target.elts):
                    raise NotReadError(f"{self.place}: an assignment to several names", got=source_of(target))
                for one, part in zip(target.elts, values, strict=True):
                    self.assign(one, part, scope)
            case _:
                raise NotReadError(f"{self.place}: an assignment", got=source_of(target))

    def _of_call(self, node: ast.Call, scope: NameScope) -> Any:
        function = self.value(node.func, scope)
        positional = self._items(node.args, scope)
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            named |= {keyword.arg: value} if keyword.arg else self._mapping(value)
        place = self.place
        made = self.call(function, tuple(positional), named)
        self.place = place
        return made
