"""Chat templates in Jinja's sandbox, with the variables and functions of transformers' `apply_chat_template`.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py.
Only `strftime_now` differs: it is the day of `TEMPLATE_DATE`, so that a corpus has the same tokens every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from threading import local
from typing import Any

from meshwright.errors import InputError, MissingDependencyError

TEMPLATE_DATE = datetime(2024, 7, 26)
"""The day that Llama 3.1's template has where it is given none."""

MOST_ROUNDS, MOST_REPEATED = 1_000_000, 100_000
"""Rounds of all loops of a rendering, and the factor and the length of a repeated text: templates are foreign."""

_rounds = local()

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BEGIN, _END = "\U0010fffe", "\U0010ffff"  # noncharacters: no text has them


def render(template: str, variables: Mapping[str, Any], *, marks_answers: bool = False) -> str:
    """The text of a template. `marks_answers` puts `_BEGIN` and `_END` around its generation blocks.

    Raises InputError when the template cannot be used or refuses the conversation, MissingDependencyError without
    jinja2.
    """
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        message = "this tokenizer's chat template needs jinja2"
        raise MissingDependencyError(message, hint="pip install jinja2") from error
    _rounds.count = 0
    try:
        text = _compiled(template, marks_answers).render(**variables)
    except TemplateError as error:
        raise InputError(f"the chat template cannot be used: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"the chat template cannot write this conversation: {reason}") from error
    return text


def generated_spans(template: str, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a template with `{% generation %}` blocks, and the characters of each."""
    text, spans, begins = "", [], []
    for part in re.split(f"([{_BEGIN}{_END}])", render(template, variables, marks_answers=True)):
        if part == _BEGIN:
            begins.append(len(text))
        elif part == _END:
            spans.append((begins.pop(), len(text)))
        else:
            text += part
    return text, spans


@cache
def _compiled(template: str, marks_answers: bool) -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """`{% generation %}`: the assistant's text."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}" if marks_answers else caller()

    def refuse(message: str) -> None:
        raise InputError(f"the chat template refuses the conversation: {message}")

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's bounds ranges alone: loops have a number of rounds in all, and products and powers a size."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
                sizes = [abs(side) if isinstance(side, int | float) else len(side) for side in (left, right)]
                if max(sizes) > MOST_REPEATED:
                    raise OverflowError(f"{operator} of more than {MOST_REPEATED:,}")
            return super().call_binop(context, operator, left, right)

        def _generate(self, source: Any, *args: Any, **options: Any) -> str:
            for loop in source.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
            return super()._generate(source, *args, **options)

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            _rounds.count += 1
            if _rounds.count > MOST_ROUNDS:
                raise OverflowError(f"its loops take more than {MOST_ROUNDS:,} rounds")
            yield item

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
    sandbox.filters |= {"tojson": _to_json, "counted": counted}
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return sandbox.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
