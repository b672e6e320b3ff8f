"""Conversations as text: ChatML where a tokenizer has no template of its own, else its own Jinja template.

ChatML writes every message as `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`. Source: OpenAI, chatml.md (2023),
https://github.com/openai/openai-python/blob/v0.28.1/chatml.md. What the loss counts is what the assistant says, with
the mark that ends its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data.documents import TextDocument, TextSpan

START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class ChatML:
    """The default template."""

    def render(self, messages: list[Mapping[str, Any]]) -> TextDocument:
        """
        >>> d = ChatML().render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
        >>> [d.text[start:stop] for start, stop in d.trained]
        ['yo<|im_end|>']
        """
        text, spans = "", []
        for role, content in map(_checked, messages):
            text += f"{START_OF_TURN}{role}\n"
            said = f"{content}{END_OF_TURN}"
            if role == "assistant":
                spans.append(TextSpan(len(text), len(text) + len(said)))
            text += f"{said}\n"
        return TextDocument(text=text, trained=tuple(spans), is_rendered=True)


@dataclass(frozen=True, kw_only=True)
class JinjaChat:
    """A tokenizer's own `chat_template`, in Jinja's sandbox.

    An answer is what the template adds between "the assistant is about to speak" and "it has spoken", so a
    template that writes early messages differently once later ones follow has no such place and is refused.
    """

    template: str
    marks: Mapping[str, str]  # bos_token and eos_token, as templates call them

    def render(self, messages: list[Mapping[str, Any]]) -> TextDocument:
        """The conversation in the tokenizer's template. Raises InputError when the template refuses it."""
        roles = [role for role, _ in map(_checked, messages)]
        whole = self._write(messages)
        spans = []
        for i, role in enumerate(roles):
            if role == "assistant":
                before = self._write(messages[:i], add_generation_prompt=True)
                after = self._write(messages[: i + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    raise InputError(
                        "the chat template rewrites earlier messages: its answers have no fixed place"
                    )
                spans.append(TextSpan(len(before), len(after)))
        return TextDocument(text=whole, trained=tuple(spans), is_rendered=True)

    def _write(self, messages: list[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            message = "this tokenizer's chat template needs jinja2"
            raise MissingDependencyError(message, hint="pip install jinja2") from error

        def refuse(message: str) -> None:
            raise InputError(f"the chat template refuses the conversation: {message}")

        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.globals["raise_exception"] = refuse
        try:
            return sandbox.from_string(self.template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.marks
            )
        except TemplateError as error:
            raise InputError(f"the chat template cannot be used: {error}") from error


def _checked(message: Any) -> tuple[str, str]:
    """Role and content of one message."""
    if not isinstance(message, Mapping):
        raise InputError("a message is an object with role and content", got=type(message).__name__)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError("a message's role", got=role, allowed=", ".join(ROLES))
    if not isinstance(content, str):
        raise InputError("a message's content is not text", got=type(content).__name__)
    return role, content
