"""Values in the text of a Python program: literals, names that are assigned once, and defaults. Nothing is executed."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

from meshwright.engines.torchtitan.config_text import natives

OPERATORS = {kind: one for kind, one in natives.OPERATORS.items() if kind not in (ast.Pow, ast.LShift)}
OPERATORS |= natives.COMPARISONS
UNARY = {ast.Not: operator.not_, ast.USub: operator.neg}
CHANGING = (".update", ".requires_grad_", ".append", ".extend", ".pop", ".setdefault")
CASTS = {"int": int, "float": float, "str": str, "bool": bool}
FORMATS = ("float32", "bfloat16", "float16", "CAUSAL_LM")
OPTIONS = ("parse_args", "parse_known_args")
MOST_STEPS = 200
TRUE_HERE = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available", "cuda.is_available")
"""Functions that are true on a device with 16-bit formats."""


class UnstatedError(Exception):
    """The text of the program does not decide a value."""


class ProgramValues:
    """The calls of a program, and the values of their arguments.

    Attributes:
        calls: calls that the text does not rule out.
        conditional: those of them behind a condition that the text does not decide.
        changed: names and attributes, `args.lr`, that the program changes.
        bound: expressions by the names to which they are assigned, once.
        fields: defaults of fields by their class, and of options by OPTIONS[0].
        defaults: values that were looked up and that a caller of the program can change, by name.

    Raises SyntaxError or ValueError for a text that is not Python.
    """

    def __init__(self, text: str):
        self.calls: list[ast.Call] = []
        self.conditional: set[ast.Call] = set()
        self.changed: set[str] = set()
        self.fields: dict[str, dict[str, ast.expr]] = {OPTIONS[0]: {}}
        self.defaults: dict[str, Any] = {}
        self.bound: dict[str, ast.expr] = {}
        self._steps = 0
        tree = ast.parse(text)
        nodes = [*ast.walk(tree)]
        for node in nodes:
            self._note(node)
        options = {name for name, made in self.bound.items() if _maker(made).endswith(OPTIONS)}
        stores = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        stores.update(node.arg for node in nodes if isinstance(node, ast.arg) and node.arg not in options)
        self.bound = {name: value for name, value in self.bound.items() if stores[name] == 1}
        self._reach(tree.body, is_conditional=False)
        self.defaults.clear()

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression. Raises UnstatedError."""
        self._steps = 0
        try:
            return self._value(node)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
            raise UnstatedError from None

    def _note(self, node: ast.AST) -> None:
        """Note what a node assigns, changes, or has for a default."""
        match node:
            case ast.AugAssign(target=target):
                self.changed.add(dotted_name(target))
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                self.changed |= {dotted_name(node), dotted_name(node.value)}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.bound[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.bound[name] = value
            case ast.ClassDef(name=name, body=body):
                parts = [one for one in body if isinstance(one, ast.Assign | ast.AnnAssign)]
                targets = [one.targets[0] if isinstance(one, ast.Assign) else one.target for one in parts]
                pairs = zip(targets, parts, strict=True)
                self.fields[name] = {dotted_name(key): one.value for key, one in pairs if one.value}
            case ast.Call(func=func, args=args, keywords=keywords):
                name, given = dotted_name(func), {one.arg: one.value for one in keywords}
                if name.endswith(CHANGING):
                    self.changed |= {name.rpartition(".")[0], name.rstrip("_")}
                if name.endswith("add_argument") and args and isinstance(args[-1], ast.Constant):
                    is_switch = getattr(given.get("action"), "value", "") == "store_true"
                    key = str(args[-1].value).lstrip("-").replace("-", "_")
                    self.fields[OPTIONS[0]][key] = given.get(
                        "default", ast.Constant(value=False if is_switch else None)
                    )

    def _reach(self, body: Iterable[ast.AST], *, is_conditional: bool) -> None:
        """Collect the calls of statements or expressions, without branches that the text rules out."""
        for node in body:
            inner = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.ExceptHandler)]
            is_open = isinstance(node, ast.For | ast.While | ast.comprehension)
            if isinstance(node, ast.If | ast.IfExp):
                try:
                    branch = node.body if self.value(node.test) else node.orelse
                    inner = branch if isinstance(branch, list) else [branch]
                except UnstatedError:
                    is_open = True
            if isinstance(node, ast.Call):
                self.calls.append(node)
                self.conditional |= {node} if is_conditional else set()
            self._reach(inner, is_conditional=is_conditional or is_open)

    def _value(self, node: ast.AST) -> Any:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise UnstatedError
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(one) for one in parts]
            case ast.Dict(keys=keys, values=values):
                return {self._value(key or node): self._value(one) for key, one in zip(keys, values, strict=True)}
            case ast.Name(id="__name__"):
                return "__main__"
            case ast.Name(id=name) if name in self.bound and name not in self.changed:
                return self._value(self.bound[name])
            case ast.UnaryOp(op=op, operand=one):
                return UNARY[type(op)](self._value(one))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                first, second = self._value(left), self._value(right)
                if isinstance(node, ast.BinOp) and not isinstance(first, int | float):
                    raise UnstatedError  # of texts and lists, which arithmetic can make large
                return OPERATORS[type(op)](first, second)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test) else other)
            case ast.Subscript(value=whole, slice=part):
                return self._value(whole)[self._value(part)]
            case ast.Attribute(value=ast.Name(id="torch" | "TaskType"), attr=name) if name in FORMATS:
                return name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return self._of_object(self.bound.get(owner), owner, name)
            case ast.Call(func=func, args=[one]) if cast := CASTS.get(dotted_name(func)):
                return cast(self._value(one))
            case ast.Call(func=func, args=[key, other]) if dotted_name(func) in ("os.environ.get", "os.getenv"):
                self.defaults[str(self._value(key))] = found = self._value(other)
                return found
            case ast.Call(func=func) if dotted_name(func).endswith(TRUE_HERE):
                return True
        raise UnstatedError

    def _of_object(self, made: ast.expr | None, name: str, attribute: str) -> Any:
        """Return an attribute of a class of the program or of its object, or the default of an option."""
        if any(one.rpartition(".")[2] == attribute for one in self.changed):
            raise UnstatedError
        given = {one.arg: one.value for one in made.keywords} if isinstance(made, ast.Call) else {}
        if attribute in given:
            return self._value(given[attribute])
        of = _maker(made) or name
        self.defaults[attribute] = found = self.default(
            self.fields[OPTIONS[0] if of.endswith(OPTIONS) else of][attribute]
        )
        return found

    def default(self, value: ast.expr) -> Any:
        """Return the default of a field of a class, `field(default=1)`, or another value. Raises UnstatedError."""
        if isinstance(value, ast.Call) and dotted_name(value.func).endswith("field"):
            given = {one.arg: one.value for one in value.keywords}
            value = given.get("default") or getattr(given.get("default_factory"), "body", value)
        return self.value(value)


def _maker(node: ast.expr | None) -> str:
    return dotted_name(node.func) if isinstance(node, ast.Call) else ""


def dotted_name(node: ast.AST) -> str:
    """Return a name with dots, `torch.cuda.is_available`; parts that are no names are empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return dotted_name(node.value) if isinstance(node, ast.Subscript) else getattr(node, "id", "")
