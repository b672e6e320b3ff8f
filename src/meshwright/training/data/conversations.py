"""Conversations of records, in the form that chat templates read.

Sources: https://platform.openai.com/docs/guides/supervised-fine-tuning (`weight`, `tool_calls`, `tools`);
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md (ShareGPT, Alpaca, `history`);
https://docs.axolotl.ai/docs/dataset-formats/conversation.html (`train`);
https://huggingface.co/docs/trl/dataset_formats (`chosen`, `rejected`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.json_values import parse_json

Message = Mapping[str, Any]
"""`role`, `content` (text, or None beside tool calls), and other keys that a chat template reads."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "system": "system", "user": "human user", "assistant": "gpt assistant model chatgpt bot function_call",
    "tool": "tool observation function_response",
}  # fmt: skip
SHAREGPT_ROLES = {theirs: ours for ours, names in _SHAREGPT.items() for theirs in names.split()}
TRAINED_KEYS = ("train", "training", "weight")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning. As in transformers, templates find it under the first two."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, each with whether the loss counts it (None: all count); tools as JSON schemas; template variables."""

    messages: Sequence[Message]
    trained: Sequence[bool] | None = None
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] | None = None


def conversation_of(record: Mapping[str, Any], messages: Any) -> Conversation:
    """Read the conversation of a record that holds a list of messages. Raises InputError for other values."""
    messages = _parsed(messages, "messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("a conversation is a list of messages", got=_kind(messages))
    pairs = [_message(message, number) for number, message in enumerate(messages, start=1)]
    system = record.get("system")
    if system:
        if not isinstance(system, str) or pairs[0][0]["role"] == "system":
            raise InputError("system is text beside messages without a system message", got=_kind(system))
        pairs.insert(0, ({"role": "system", "content": system}, False))
    return _conversation(record, pairs)


def instruction_conversation(record: Mapping[str, Any], *, context_key: str, answer_key: str) -> Conversation:
    """The conversation of an Alpaca record: the user says the instruction, a line end and the input."""
    instruction, answer = _text(record, "instruction"), _text(record, answer_key)
    context = _text(record, context_key) if record.get(context_key) is not None else ""
    pairs: list[tuple[dict[str, Any], bool]] = []
    if record.get("system"):
        pairs.append(({"role": "system", "content": _text(record, "system")}, False))
    history: Any = _parsed(record.get("history") or [], "history")
    if not isinstance(history, Sequence):
        raise InputError("history is a list", got=_kind(history))
    for turn in history:
        if not (isinstance(turn, Sequence) and len(turn) == 2 and all(isinstance(said, str) for said in turn)):
            raise InputError("history is a list of pairs: the user's text and the assistant's", got=_kind(turn))
        pairs += [({"role": "user", "content": turn[0]}, False), ({"role": "assistant", "content": turn[1]}, True)]
    asked = f"{instruction}\n{context}" if context else instruction
    pairs += [({"role": "user", "content": asked}, False), ({"role": "assistant", "content": answer}, True)]
    return _conversation(record, pairs)


def prompt_conversation(record: Mapping[str, Any], prompt: Any, completion: Any) -> Conversation:
    """The conversation of a prompt of messages and a completion, a list of them or text; only it is trained."""
    completion = [{"role": "assistant", "content": completion}] if is_text(completion) else completion
    asked, said = conversation_of({}, prompt), conversation_of({}, completion)
    pairs = [(message, False) for message in asked.messages]
    return _conversation(record, [*pairs, *zip(said.messages, said.trained or (), strict=True)])


def answer_conversations(
    record: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any
) -> tuple[Conversation, Conversation]:
    """The conversations of two answers that are lists of messages; the assistant's behind the prompt are trained.

    The prompt is a list of messages, or else the messages with which both answers begin; a text beside them repeats
    what they say. Raises InputError where both say nothing in common and there is only the text.
    """
    good, bad = conversation_of({}, chosen), conversation_of({}, rejected)
    has_own = prompt is not None and not is_text(prompt)
    num = 0 if has_own else num_shared(good.messages, bad.messages)
    asked = conversation_of({}, prompt).messages if has_own else good.messages[:num]
    if prompt is not None and not asked:
        raise InputError("prompt is text, and the answers are lists of messages", hint="make prompt a list of messages")

    def after(talk: Conversation) -> Conversation:
        said = zip(talk.messages[num:], (talk.trained or ())[num:], strict=True)
        return _conversation(record, [*((message, False) for message in asked), *said])

    return after(good), after(bad)


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of what both begin with.

    >>> num_shared("1 + 1 = 2", "1 + 1 = 3")
    8
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def is_text(value: Any) -> bool:
    """True for text that is no list of messages in JSON, which columns of CSV and Parquet hold."""
    return isinstance(value, str) and re.match(r"\s*\[\s*{", value) is None


def _conversation(record: Mapping[str, Any], pairs: Sequence[tuple[Message, bool]]) -> Conversation:
    settings = _parsed(record.get("chat_template_kwargs"), "chat_template_kwargs")
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError("chat_template_kwargs is an object", got=_kind(settings))
    tools = _parsed(record.get("tools") or record.get("functions") or [], "tools")
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("tools is a list of objects", got=_kind(tools))
    wrapped = [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]
    return Conversation(
        messages=tuple(message for message, _ in pairs),
        trained=tuple(is_trained for _, is_trained in pairs),
        tools=tuple(wrapped) or None,
        settings=settings or None,
    )


def _message(message: Any, number: int) -> tuple[dict[str, Any], bool]:
    """A message as templates read it, and whether the loss counts it. `number` counts from 1."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is not an object with role and content", got=_kind(message))
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "from" in found or "value" in found:
        found = _from_sharegpt(found, where)
    role = "tool" if found.get("role") == "function" else found.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: unknown role", got=role, allowed=", ".join(ROLES))
    is_trained = _is_trained(found, role, where)
    found = {key: value for key, value in found.items() if key not in TRAINED_KEYS}
    if call := found.pop("function_call", None):
        if found.get("tool_calls"):
            raise InputError(f"{where} has function_call and tool_calls", hint="keep one of them")
        found["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in found:
        found["tool_calls"] = _tool_calls(found["tool_calls"], where)
        if not found["tool_calls"]:
            del found["tool_calls"]
    content = _content(found.get("content"), where, may_be_absent="tool_calls" in found)
    reasoning = next((found[key] for key in REASONING_KEYS if key in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning} | found | {"reasoning_content": reasoning}
    return found | {"role": role, "content": content}, is_trained


def _from_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    """`from` and `value` as `role` and `content`; a function call becomes a tool call."""
    if "role" in message or message.get("content") is not None:
        raise InputError(f"{where} mixes from and value with role and content", got=", ".join(message))
    speaker, value = message.get("from"), message.get("value")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InputError(f"{where}: unknown speaker", got=speaker, allowed=", ".join(SHAREGPT_ROLES))
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "content")}
    if speaker != "function_call":
        return {"role": role, "content": value} | rest
    calls = _parsed(value, f"{where}: value")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        raise InputError(f"{where}: a function call is JSON with name and arguments", got=_kind(value))
    wrapped = [{"type": "function", "function": call} for call in calls]
    return {"role": role, "content": None, "tool_calls": wrapped} | rest


def _content(content: Any, where: str, *, may_be_absent: bool) -> str | None:
    """The text of a message: itself, or its parts one after the other."""
    if isinstance(content, str) or (content is None and may_be_absent):
        return content
    if not isinstance(content, Sequence):
        raise InputError(f"{where}: content is not text", got=_kind(content))
    texts = []
    for number, part in enumerate(content, start=1):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise InputError(
                f"{where}: part {number} of its content is not text",
                got=kind, allowed="text", hint="images, audio and files are not trained on: remove the record",
            )  # fmt: skip
        texts.append(text)
    return "".join(texts)


def _is_trained(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Assistant messages are trained on unless a flag says no. Flags are true, false, 1 and 0."""
    flags = {key: message[key] for key in TRAINED_KEYS if key in message}
    for key, value in flags.items():
        if value not in (0, 1) or isinstance(value, str):
            raise InputError(f"{where}: {key}", got=value, allowed="true, false, 1, 0")
    if len(set(map(bool, flags.values()))) > 1:
        raise InputError(f"{where}: its flags contradict each other", got=", ".join(flags))
    is_asked = bool(next(iter(flags.values()), role == "assistant"))
    if is_asked and role != "assistant":
        raise InputError(f"{where}: only assistant messages are trained on", got=f"a message of {role}")
    return is_asked


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI writes them as JSON text, templates expect objects."""
    calls = _parsed(calls, f"{where}: tool_calls")
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise InputError(f"{where}: tool_calls is a list of objects", got=_kind(calls))
    checked = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{where}: a tool call needs the name of its function", got=", ".join(call))
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", f"{where}: arguments of {function['name']}")
        named = dict(function) | {"arguments": arguments}
        checked.append(dict(call) | {"function": named} if "function" in call else named)
    return checked


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise InputError(f"{key!r} is not text", got=_kind(value))
    return value


def _parsed(value: object, name: str) -> Any:
    """Columns of CSV and Parquet hold lists and objects as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise InputError(f"{name} is text that is not JSON: {error}") from error


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
