"""Conversations as text: ChatML where a tokenizer has no template of its own, else its own Jinja template.

ChatML writes every message as `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`. Source: OpenAI, chatml.md (2023),
https://github.com/openai/openai-python/blob/v0.28.1/chatml.md. The loss counts the assistant's messages, with
the mark that ends its turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import InputError
from meshwright.training.data import templates
from meshwright.training.data.conversations import ROLES, Conversation, Message
from meshwright.training.data.documents import TextDocument, TextSpan

START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML for transformers."""


@dataclass(frozen=True, kw_only=True)
class ChatML:
    """The default template. It has no way to write tools."""

    def render(self, conversation: Conversation) -> TextDocument:
        """
        >>> talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
        >>> d = ChatML().render(Conversation(messages=talk))
        >>> [d.text[start:stop] for start, stop in d.trained]
        ['yo<|im_end|>']
        """
        if conversation.tools or conversation.settings:
            raise InputError("ChatML writes no tools and has no variables", hint=_OTHER_TOKENIZER)
        text, spans = "", []
        checked = [_checked(message) for message in conversation.messages]
        answers = _trained_answers(conversation)
        for number, (role, content) in enumerate(checked):
            text += f"{START_OF_TURN}{role}\n"
            said = f"{content}{END_OF_TURN}"
            if number in answers:
                spans.append(TextSpan(len(text), len(text) + len(said)))
            text += f"{said}\n"
        return TextDocument(text=text, trained=tuple(spans), is_rendered=True)

    def prompt(self, conversation: Conversation) -> str:
        """The conversation, and the start of the assistant's turn."""
        return f"{self.render(conversation).text}{START_OF_TURN}assistant\n"

    def reads(self, key: str) -> bool:
        """Role and content."""
        return key in ("role", "content")


_OTHER_TOKENIZER = "use a tokenizer whose own chat template writes them"


@dataclass(frozen=True, kw_only=True)
class JinjaChat:
    """A tokenizer's own `chat_template`, in Jinja's sandbox.

    Answers are the template's `{% generation %}` blocks. If the template has no such blocks, an answer is the
    text that it adds between "the assistant is about to speak" and "it has spoken". A template that writes
    early messages differently once later messages follow has no such place and is refused.
    """

    template: str
    marks: Mapping[str, str]  # bos_token, eos_token, ... as templates call them
    tool_template: str | None = None  # for conversations with tools; None: `template`
    end_marks: tuple[str, ...] = ()  # special tokens: white space after one is no part of an answer

    def render(self, conversation: Conversation) -> TextDocument:
        """The conversation in the tokenizer's template. Raises InputError when the template refuses it."""
        for message in conversation.messages:
            _checked(message)
        wanted = _trained_answers(conversation)
        conversation = self._written(conversation)
        whole = self._write(conversation)
        if templates.GENERATION_TAG.search(self._template(conversation)):
            spans = self._generated(conversation, whole=whole, wanted=wanted)
        else:
            spans = [self._answer(conversation, number, whole=whole) for number in wanted]
        return TextDocument(
            text=whole, trained=tuple(span for span in spans if span.stop > span.start), is_rendered=True
        )

    def prompt(self, conversation: Conversation) -> str:
        """The conversation, and the start of the assistant's turn."""
        conversation = self._written(conversation, add_generation_prompt=True)
        return self._write(conversation, add_generation_prompt=True)

    def reads(self, key: str) -> bool:
        """Return True if a template names the key."""
        return key in self.template or (self.tool_template is not None and key in self.tool_template)

    def _generated(self, conversation: Conversation, *, whole: str, wanted: Sequence[int]) -> list[TextSpan]:
        """The generation blocks of the wanted answers."""
        variables = self._variables(conversation, add_generation_prompt=False)
        text, found = templates.generated_spans(self._template(conversation), variables)
        answers = _trained_answers(replace(conversation, trained=None))
        if text != whole or len(found) != len(answers):
            raise InputError(
                "the chat template does not have one generation block for each answer",
                got=f"{len(found)} blocks", allowed=f"{len(answers)} answers",
            )  # fmt: skip
        by_answer = dict(zip(answers, found, strict=True))
        return [TextSpan(*by_answer[number]) for number in wanted]

    def _answer(self, conversation: Conversation, number: int, *, whole: str) -> TextSpan:
        """The characters of one answer, from its beginnings: before it, and with it."""
        messages = conversation.messages
        before = self._write(replace(conversation, messages=messages[:number]), add_generation_prompt=True)
        after = self._write(replace(conversation, messages=messages[: number + 1]))
        start, stop = len(before), len(after)
        if not whole.startswith(after):
            # Some templates end a text, but not a turn, with the end token.
            stop = len(after) - len(self.marks.get("eos_token", ""))
            if stop < start or not whole.startswith(after[:stop]) or after[stop:] != self.marks.get("eos_token"):
                raise _no_place(number, is_last=number == len(messages) - 1)
        if not (after.startswith(before) and whole.startswith(before)):
            raise _no_place(number, is_last=number == len(messages) - 1)
        shown = whole[start:stop].rstrip()
        if shown.endswith(self.end_marks or tuple(self.marks.values()) or ("\0",)):
            stop = start + len(shown)
        return TextSpan(start, stop)

    def _written(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> Conversation:
        """The conversation in the form that the template writes: some join arguments of tool calls as text."""
        if not any(message.get("tool_calls") for message in conversation.messages):
            return conversation
        try:
            self._write(conversation, add_generation_prompt=add_generation_prompt)
        except InputError:
            as_text = replace(
                conversation, messages=[_with_text_arguments(message) for message in conversation.messages]
            )
            try:
                self._write(as_text, add_generation_prompt=add_generation_prompt)
            except InputError:
                return conversation  # the first error is the one to show
            return as_text
        return conversation

    def _write(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        variables = self._variables(conversation, add_generation_prompt=add_generation_prompt)
        return templates.render(self._template(conversation), variables)

    def _template(self, conversation: Conversation) -> str:
        with_tools = self.tool_template if conversation.tools else None
        return self.template if with_tools is None else with_tools

    def _variables(self, conversation: Conversation, *, add_generation_prompt: bool) -> dict[str, Any]:
        own = {
            "messages": list(conversation.messages),
            "tools": list(conversation.tools) if conversation.tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return dict(self.marks) | dict(conversation.settings or {}) | own


def _trained_answers(conversation: Conversation) -> list[int]:
    """Numbers of the messages of the assistant that the loss counts."""
    trained = conversation.trained
    return [
        number
        for number, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and (trained is None or trained[number])
    ]


def _no_place(number: int, *, is_last: bool) -> InputError:
    marks = "mark the assistant's text in the template with {% generation %} and {% endgeneration %}"
    last = "train on the last answer of each conversation: source: NAME?answers=last"
    said = f"the chat template rewrites earlier messages: message {number + 1} has no fixed place"
    return InputError(said, hint=marks if is_last else last)


def _with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its tool calls as JSON text, as OpenAI writes them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        calls.append(dict(call) | {"function": function} if "function" in call else function)
    return dict(message) | {"tool_calls": calls}


def _checked(message: Any) -> tuple[str, str]:
    """Role and content of one message."""
    if not isinstance(message, Mapping):
        raise InputError("a message is an object with role and content", got=type(message).__name__)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError("a message's role", got=role, allowed=", ".join(ROLES))
    if content is None and message.get("tool_calls"):
        return role, ""
    if not isinstance(content, str):
        raise InputError("a message's content is not text", got=type(content).__name__)
    return role, content
