"""Text to tokens and back, for the tokenizers a run file can name.

A document becomes: its start token where the tokenizer uses one, its text, and the end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import write_atomically
from meshwright.hub import fetch, is_hub_name
from meshwright.json_values import load_json, parse_json
from meshwright.training.data.chat import ChatML, JinjaChat
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.documents import Chat

HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files of a repository of the hub that `tokenizer_from_path` reads."""

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")
"""Names of the end token, tried in this order where `tokenizer_config.json` does not say."""


MARKS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of `tokenizer_config.json` that chat templates may read."""

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""Names of a tokenizer's chat templates in transformers: the second one is for conversations with tools."""


class Aligned(NamedTuple):
    """Tokens, and where each ends in the text."""

    ids_N: np.ndarray
    stops_N: np.ndarray  # characters; one past the token's last one, 0 for a token without text


class Tokenizer(Protocol):
    """The interface of tokenizers in the data pipeline."""

    name: str
    vocab: int  # one more than the largest token
    start: int | None  # put before every document
    end: int  # put after every document
    fingerprint: str  # changes whenever any text could become other tokens
    chat: Chat

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each text, without start and end."""
        ...

    def align(self, text: str) -> Aligned:
        """Tokens of one text and the characters they stand for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, without start, end and other marks."""
        ...


class ByteTokenizer:
    """256 bytes and an end token.

    >>> tokens = ByteTokenizer().encode(["né"])[0]; tokens.tolist(), ByteTokenizer().decode(tokens)
    ([110, 195, 169], 'né')
    """

    name: str = "bytes"
    vocab: int = 257
    start: int | None = None
    end: int = 256
    fingerprint: str = "bytes-1"
    chat: Chat = ChatML()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """UTF-8."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def align(self, text: str) -> Aligned:
        """Every byte of a character ends where the character ends."""
        (ids_N,) = self.encode([text])
        is_first_N = (ids_N & 0xC0) != 0x80  # the other bytes of a character are 10xxxxxx
        return Aligned(ids_N, np.cumsum(is_first_N))

    def decode(self, ids: Sequence[int]) -> str:
        """UTF-8; a broken character, as at the end of a sample, becomes U+FFFD."""
        return bytes(int(i) for i in ids if i < self.end).decode(errors="replace")


class JsonTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    `config` is the content of the `tokenizer_config.json` in its `folder`: it names the end token and may
    hold a chat template. The start token is the token that the tokenizer itself puts before an empty text.
    """

    def __init__(
        self, text: str, *, name: str, config: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> None:
        tokenizers = require_tokenizers()
        config = config or {}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise InputError(f"not a tokenizer.json: {error}", got=name) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known: Mapping[str, int] = self._tokenizer.get_vocab()
        end = _end_token(known, config, name)
        marks = {key: mark for key in MARKS if (mark := _content(config.get(key))) is not None}
        marks = {"bos_token": "", "eos_token": ""} | marks
        added = parse_json(text).get("added_tokens") or ()
        special = tuple(token["content"] for token in added if token.get("special"))
        templates = _chat_templates(config.get("chat_template"), name)
        before = self._tokenizer.encode("").ids
        self.name, self.folder, self.config = name, folder, config
        self.vocab = max(known.values()) + 1
        self.end = known[end]
        self.end_text = end
        self.start: int | None = before[0] if before and before[0] != self.end else None
        self.chat: Chat = ChatML()
        if templates:
            self.chat = JinjaChat(
                template=templates[DEFAULT_TEMPLATE], tool_template=templates.get(TOOL_TEMPLATE),
                marks=marks, end_marks=special,
            )  # fmt: skip
        self.text = text
        content = json.dumps([text, end, templates, marks if templates else None]).encode()
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files that `tokenizer_from_path`, and transformers, read."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self.whole_config(), indent=2, ensure_ascii=False)
        write_atomically(folder / "tokenizer.json", self.text)
        write_atomically(folder / "tokenizer_config.json", config + "\n")

    def whole_config(self) -> dict[str, Any]:
        """`tokenizer_config.json` with the class and the start and end tokens; its own values stay."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(self.config)
        if _content(config.get("eos_token")) is None:
            config["eos_token"] = self.end_text
        if self.start is not None and _content(config.get("bos_token")) is None:
            config["bos_token"] = self._tokenizer.id_to_token(self.start)
        return config

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """All texts at once, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def align(self, text: str) -> Aligned:
        """Offsets of the library, in characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        stops = [stop for _, stop in encoding.offsets]
        return Aligned(np.array(encoding.ids, dtype=np.int64), np.array(stops, dtype=np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def tokenizer_from_path(path: Path) -> JsonTokenizer:
    """A `tokenizer.json` or the folder that holds it. Raises InputError when it cannot be read or used."""
    file = path / "tokenizer.json" if path.is_dir() else path
    config_file, map_file = file.with_name("tokenizer_config.json"), file.with_name("special_tokens_map.json")
    try:
        text = file.read_text(encoding="utf-8")
        config = load_json(config_file) if config_file.is_file() else {}
        marks = load_json(map_file) if map_file.is_file() else {}
    except OSError as error:
        raise InputError(f"cannot read the tokenizer: {error.strerror}", got=str(file)) from error
    except ValueError as error:
        raise InputError(f"the tokenizer is not JSON: {error}", got=str(file)) from error
    for document, place in ((config, config_file), (marks, map_file)):
        if not isinstance(document, dict):
            raise InputError("the tokenizer's config is not a JSON object", got=str(place))
    if "added_tokens_decoder" not in config:  # with it, transformers does not read the map
        config |= {key: marks[key] for key in MARKS if marks.get(key) is not None}
    if files := _template_files(file.parent):
        found = _chat_templates(config.get("chat_template"), str(path)) | files
        listed = [{"name": key, "template": value} for key, value in found.items()]
        config["chat_template"] = listed if len(listed) > 1 else listed[0]["template"]
    return JsonTokenizer(text, name=str(path), config=config, folder=file.parent)


def with_added_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer with further special tokens behind its own, as transformers' `add_special_tokens` adds them."""
    if not tokens:
        return tokenizer
    if not isinstance(tokenizer, JsonTokenizer):
        raise InputError(
            f"data.added_tokens: the tokenizer {tokenizer.name} takes none", got=", ".join(tokens),
            allowed="a tokenizer.json or its folder, a name on the hub, bpe:SIZE",
        )  # fmt: skip
    library = require_tokenizers()
    grown = library.Tokenizer.from_str(tokenizer.text)
    grown.add_special_tokens([library.AddedToken(token, special=True, normalized=False) for token in tokens])
    return JsonTokenizer(grown.to_str(), name=tokenizer.name, config=tokenizer.config, folder=tokenizer.folder)


def tokenizer_from_hub(name: str) -> JsonTokenizer:
    """A tokenizer of the Hugging Face hub, OWNER/NAME[@REVISION], from its local copy where there is one."""
    if not is_hub_name(name):
        raise InputError(
            "no such tokenizer", got=name,
            allowed="bytes, bpe:SIZE, a tokenizer.json or its folder, OWNER/NAME[@REVISION] on the Hugging Face hub",
        )  # fmt: skip
    folder = fetch(name, patterns=HUB_FILES, what="the tokenizer")
    found = tokenizer_from_path(folder)
    found.name = name
    return found


def require_tokenizers() -> Any:
    """The `tokenizers` library. Raises MissingDependencyError when it is absent."""
    try:
        import tokenizers
    except ImportError as error:
        message = "this tokenizer needs the tokenizers library"
        hint = "pip install tokenizers (or set data.tokenizer: bytes, which needs nothing)"
        raise MissingDependencyError(message, hint=hint) from error
    return tokenizers


def _template_files(folder: Path) -> dict[str, str]:
    """Templates in files of their own by name. They precede the config's templates, as in transformers."""
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a chat template: {error}", got=str(folder)) from error


def _chat_templates(given: Any, name: str) -> dict[str, str]:
    """Chat templates by name: a config has one, or a list of named ones."""
    if given is None:
        return {}
    listed = [{"name": DEFAULT_TEMPLATE, "template": given}] if isinstance(given, str) else given
    try:
        found = {str(one["name"]): str(one["template"]) for one in listed}
        found[DEFAULT_TEMPLATE]
    except (TypeError, KeyError) as error:
        raise InputError(
            f"the chat template of the tokenizer {name} cannot be read",
            got=type(given).__name__, allowed="text, or a list of named templates with one called default",
        ) from error  # fmt: skip
    return found


def _end_token(known: Mapping[str, int], config: Mapping[str, Any], name: str) -> str:
    named = _content(config.get("eos_token"))
    candidates = (named,) if named is not None else END_TOKENS
    found = next((token for token in candidates if token in known), None)
    if found is None:
        raise InputError(
            f"the tokenizer {name} has no end-of-document token", allowed=", ".join(map(str, candidates)),
            hint="name it as eos_token in tokenizer_config.json, beside tokenizer.json",
        )  # fmt: skip
    return found


def notes_on_end(tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Note on an end token that was found by its name, as no file of the tokenizer names one."""
    if not isinstance(tokenizer, JsonTokenizer) or _content(tokenizer.config.get("eos_token")) is not None:
        return ()
    return (f"the tokenizer {tokenizer.name} names no eos_token: {tokenizer.end_text}, a token of it, ends documents",)


def _content(token: Any) -> str | None:
    """A special token is written as text, or as an object that holds it."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


# --- the end of an answer ---

_MARK = "MESHWRIGHT"


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """End of an answer in the chat template: tokens of its own, or text."""

    tokens: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()


def turn_end(tokenizer: Tokenizer) -> TurnEnd:
    """The end of an answer in the tokenizer's chat template: a special token, or the first line of text."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    try:
        after = tokenizer.chat.render(Conversation(messages=messages)).text.rpartition(_MARK)[2].strip()
    except InputError:  # a template for other conversations: the end tokens are all that ends an answer
        return TurnEnd()
    if not after:
        return TurnEnd()
    first = int(tokenizer.encode([after])[0][0])
    if not tokenizer.decode([first]):
        return TurnEnd(tokens=(first,))
    return TurnEnd(stops=(after.splitlines()[0],))
