"""Records as documents: their format is found from their keys.

The first record of a file decides; a record of another format, of none, or of several is refused with its line. Keys
that play no part are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from meshwright.errors import InputError, nearest
from meshwright.training.data.conversations import (
    REASONING_KEYS,
    Conversation,
    answer_conversations,
    conversation_of,
    instruction_conversation,
    is_text,
    num_shared,
    prompt_conversation,
)
from meshwright.training.data.documents import Chat, TextDocument, TextSpan

ANSWER_KEYS = {"prompt": ("completion", "response", "answer"), "question": ("answer",)}
"""A key of the prompt, and the keys that may hold its answer."""

MESSAGE_KEYS = ("messages", "conversations", "conversation")
_OUTPUTS, _CONTEXTS = ("output", "response"), ("input", "context")
_KEYS_WITH_MESSAGES = ("system", "tools", "functions", "chat_template_kwargs")


class RecordFormat(StrEnum):
    """Format of records."""

    TEXT = "text"
    PROMPT = "prompt"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PREFERENCE = "preference"
    JUDGED = "judged"


class Answers(StrEnum):
    """Answers of a conversation that are trained on."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class RecordRules:
    """Rules of reading the records of a source. The format is found from the keys where it is None."""

    text_key: str | None = None
    format: RecordFormat | None = None
    answers: Answers = Answers.ALL

    def __post_init__(self) -> None:
        if self.text_key is not None and self.format not in (None, RecordFormat.TEXT):
            raise InputError(f"text={self.text_key} and format={self.format} contradict each other")

    @property
    def identity(self) -> str:
        """A text that differs where the tokens differ."""
        return f"text={self.text_key} format={self.format} answers={self.answers}"


def rules_from_options(options: Mapping[str, str], *, name: str) -> RecordRules:
    """The rules that follow a source's question mark. Raises InputError for an unknown value."""
    values: dict[str, Any] = {"text_key": options.get("text")}
    for key, kind in (("format", RecordFormat), ("answers", Answers)):
        given = options.get(key)
        if given is None:
            continue
        allowed = [value.value for value in kind]
        if given not in allowed:
            near = nearest(given, allowed)
            raise InputError(
                f"{name}: unknown {key}", got=given, allowed=", ".join(allowed),
                hint=f"did you mean {near!r}?" if near else None,
            )  # fmt: skip
        values[key] = kind(given)
    return RecordRules(**values)


@dataclass(kw_only=True)
class RecordCounts:
    """Counts of a reading: records by format, keys that play no part, records without text."""

    formats: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)
    num_empty: int = 0
    num_conversations: int = 0  # records that the chat template writes

    def as_json(self) -> dict[str, Any]:
        """The counts as a mapping, the most frequent key first."""
        return {
            "formats": dict(self.formats.most_common()),
            "unused_keys": dict(self.unused_keys.most_common()),
            "num_empty": self.num_empty,
            "num_conversations": self.num_conversations,
        }


def read_records(
    records: Iterable[tuple[str, Mapping[str, Any]]], *, rules: RecordRules, chat: Chat, counts: RecordCounts
) -> Iterator[TextDocument]:
    """The documents of the records of one file; each record comes with the place that begins its errors.

    >>> from meshwright.training.data.chat import ChatML
    >>> record, counts = {"prompt": "1+1=", "completion": "2", "id": 7}, RecordCounts()
    >>> (d,) = read_records([("x:1", record)], rules=RecordRules(), chat=ChatML(), counts=counts)
    >>> d.text, d.trained, counts.as_json()["unused_keys"]
    ('1+1=2', (TextSpan(start=4, stop=5),), {'id': 1})
    """
    of_file = rules.format
    for where, given in records:
        record = {key: value for key, value in given.items() if value is not None}
        try:
            if rules.text_key is not None:
                documents = (TextDocument(text=_text(record, rules.text_key)),)
                counts.formats[RecordFormat.TEXT.value] += 1
            else:
                of_file = _format(record, of_file, is_forced=rules.format is not None, keys=_keys(given))
                read = _answers if of_file is RecordFormat.PREFERENCE else _document
                documents = read(record, of_file, rules=rules, chat=chat, counts=counts)
                if of_file is RecordFormat.JUDGED:
                    documents = (*documents, replace(documents[0], trained=()))[:: 1 if record["label"] else -1]
                counts.formats[of_file.value] += 1
            for document in documents:
                whole_characters(document.text)
        except InputError as error:
            error.message = f"{where}: {error.message}"
            raise
        counts.num_conversations += documents[0].is_rendered
        if all(document.text for document in documents):
            yield from documents
        else:
            counts.num_empty += 1


def _format(record: Mapping[str, Any], of_file: RecordFormat | None, *, is_forced: bool, keys: str) -> RecordFormat:
    """The format of a record. Raises InputError where it is not the file's, or not exactly one."""
    fitting = list(_fitting(record))
    if is_forced and of_file is not None:
        if of_file not in fitting:
            raise InputError(f"the record is not of the format {of_file}", got=keys)
        return of_file
    if not fitting:
        raise InputError(
            "a record of no known format", got=keys,
            allowed="text; prompt and completion, perhaps with label; messages; conversations; instruction and output; "
            "chosen and rejected",
            hint=("remove the records whose text is null, or " if "(null)" in keys else "")
            + "name the key that holds the text: source: NAME?text=KEY",
        )  # fmt: skip
    if len(fitting) > 1 and of_file not in fitting[1:]:
        names = " and ".join(fitting)
        hint = f"say which one is trained on: source: NAME?format={fitting[0]}"
        raise InputError(f"a record of several formats: {names}", got=keys, hint=hint)
    if of_file is not None and fitting != [of_file]:
        hint = "records of one file have one format: split the file"
        raise InputError(f"a record of the format {fitting[0]} after records of the format {of_file}", hint=hint)
    return fitting[0]


def _fitting(record: Mapping[str, Any]) -> Iterator[RecordFormat]:
    for key in MESSAGE_KEYS:
        if key in record:
            value = record[key]
            first = value[0] if isinstance(value, (list, tuple)) and value else None
            is_sharegpt = (isinstance(first, Mapping) and "from" in first) or (
                first is None and key != "messages" and isinstance(value, str)
            )
            yield RecordFormat.SHAREGPT if is_sharegpt else RecordFormat.MESSAGES
    if "chosen" in record and "rejected" in record:
        yield RecordFormat.PREFERENCE
    if "instruction" in record and any(key in record for key in _OUTPUTS):
        yield RecordFormat.ALPACA
    if _prompt_keys(record):
        yield RecordFormat.JUDGED if isinstance(record.get("label"), bool) else RecordFormat.PROMPT
    if "text" in record:
        yield RecordFormat.TEXT


def _prompt_keys(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(ask, answer) for ask, keys in ANSWER_KEYS.items() for answer in keys if ask in record and answer in record]


def _document(
    record: Mapping[str, Any], kind: RecordFormat, *, rules: RecordRules, chat: Chat, counts: RecordCounts
) -> tuple[TextDocument]:
    used: tuple[str, ...]
    if kind is RecordFormat.TEXT:
        _count_unused(record, ("text",), counts)
        return (TextDocument(text=_text(record, "text")),)
    if kind in (RecordFormat.PROMPT, RecordFormat.JUDGED):
        ask, answer = _only(_prompt_keys(record))
        label = ("label",) if kind is RecordFormat.JUDGED else ()
        if isinstance(record[ask], str):
            _count_unused(record, (ask, answer, *label), counts)
            return (_answered(_text(record, ask), _text(record, answer)),)
        used = (ask, answer, *label, "tools", "chat_template_kwargs")
        conversation = prompt_conversation(record, record[ask], record[answer])
    elif kind is RecordFormat.ALPACA:
        answer = _only([key for key in _OUTPUTS if key in record])
        contexts = [key for key in _CONTEXTS if key in record]
        context = _only(contexts) if contexts else _CONTEXTS[0]
        used = ("instruction", context, answer, "system", "history", "tools", "chat_template_kwargs")
        conversation = instruction_conversation(record, context_key=context, answer_key=answer)
    else:
        key = _only([key for key in MESSAGE_KEYS if key in record])
        used = (key, *_KEYS_WITH_MESSAGES)
        conversation = conversation_of(record, record[key])
    _count_unused(record, used, counts)
    _count_unread(conversation, chat, counts)
    trained = list(conversation.trained or ())
    if rules.answers is Answers.LAST and True in trained:
        last = len(trained) - 1 - trained[::-1].index(True)
        trained = [number == last for number in range(len(trained))]
    return (chat.render(replace(conversation, trained=trained)),)


def _answered(prompt: str, answer: str) -> TextDocument:
    return TextDocument(text=prompt + answer, trained=(TextSpan(len(prompt), len(prompt) + len(answer)),))


def _answers(
    record: Mapping[str, Any], kind: RecordFormat, *, rules: RecordRules, chat: Chat, counts: RecordCounts
) -> tuple[TextDocument, TextDocument]:
    """The chosen and the rejected answer, each behind the prompt: the record's, or else what both begin with."""
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if is_text(chosen):
        _count_unused(record, ("prompt", "chosen", "rejected"), counts)
        chosen, rejected = _text(record, "chosen"), _text(record, "rejected")
        if prompt is None:
            split = num_shared(chosen, rejected)
            split -= split > 0 and chosen[split - 1] == " "  # a space belongs to the word behind it
            prompt, chosen, rejected = chosen[:split], chosen[split:], rejected[split:]
        else:
            prompt = _text(record, "prompt")
        return _answered(prompt, chosen), _answered(prompt, rejected)
    used = ("chosen", "rejected", "tools", "chat_template_kwargs")
    _count_unused(record, used if prompt is None or is_text(prompt) else ("prompt", *used), counts)
    good, bad = answer_conversations(record, prompt, chosen, rejected)
    for conversation in (good, bad):
        _count_unread(conversation, chat, counts)
    return chat.render(good), chat.render(bad)


def _count_unused(record: Mapping[str, Any], used: tuple[str, ...], counts: RecordCounts) -> None:
    counts.unused_keys.update(str(key) for key in record if key not in used)


def _count_unread(conversation: Conversation, chat: Chat, counts: RecordCounts) -> None:
    """Count keys of messages that the chat template does not write; refuse the loss of tools."""
    if conversation.tools and not chat.reads("tools"):
        raise InputError("the record has tools, which the chat template does not write")
    for message in conversation.messages:
        if "tool_calls" in message and not chat.reads("tool_calls"):
            raise InputError("a message has tool_calls, which the chat template does not write")
        unread = {key for key in message if key not in ("role", "content") and not chat.reads(key)}
        if unread.isdisjoint(REASONING_KEYS) or any(map(chat.reads, REASONING_KEYS)):
            unread -= set(REASONING_KEYS)
        else:
            unread = unread - set(REASONING_KEYS) | {REASONING_KEYS[0]}
        counts.unused_keys.update(f"messages[].{key}" for key in sorted(unread))


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        got = type(value).__name__ if key in record else f"the keys {_keys(record)}"
        raise InputError(f"{key!r} is not text", got=got)
    return value


def whole_characters(text: str, *, place: str = "") -> str:
    """Return `text`. Refuses half a character: JSON can say "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"U+{ord(error.object[error.start]):04X}"
        raise InputError(f"half a character{place}, which is not text", got=got) from error
    return text


def _only(found: list[Any]) -> Any:
    if len(found) > 1:
        names = ", ".join(key if isinstance(key, str) else " and ".join(key) for key in found)
        raise InputError("a record in which several keys may be meant", got=names, hint="keep one of them")
    return found[0]


def _keys(record: Mapping[str, Any]) -> str:
    """The first keys of a record, and which of them are null."""
    shown = [f"{str(key)[:40]}{' (null)' if value is None else ''}" for key, value in list(record.items())[:12]]
    return (", ".join(shown) + (", ..." if len(record) > 12 else "")) or "no keys"
