"""An OpenAI-compatible endpoint, and the body of a request to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from meshwright.errors import InputError


class Interface(StrEnum):
    """Interface that requests use."""

    COMPLETIONS = "completions"
    CHAT = "chat"


PATHS = {Interface.COMPLETIONS: "/v1/completions", Interface.CHAT: "/v1/chat/completions"}


OPTIONAL_FIELDS = ("max_tokens", "temperature", "stream_options", "ignore_eos")
"""Fields of a request that may have another name, or be left out: a server answers without them."""
NEW_NAMES = {"max_tokens": "max_completion_tokens"}
"""Names that newer interfaces have for a field."""
NOT_TAKEN = re.compile(r"un(supported|known|recogni[sz]ed|expected)|not (supported|permitted|allowed)|extra|additional")
"""Words of a message that refuses a field itself, and not its value."""


def field_hint(reason: str) -> str | None:
    """The option that mends a refusal of a field of the request; None where the message refuses none.

    >>> field_hint("400: Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    '--request-field max_tokens=max_completion_tokens'
    >>> field_hint("422: Extra inputs are not permitted: ignore_eos"), field_hint("400: max_tokens is too large")
    ('--omit-field ignore_eos', None)
    """
    if not NOT_TAKEN.search(reason.lower()):
        return None
    name = next((name for name in OPTIONAL_FIELDS if re.search(rf"\b{name}\b", reason)), None)
    if name is None:
        return None
    return f"--request-field {name}={NEW_NAMES[name]}" if name in NEW_NAMES else f"--omit-field {name}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server's address and how to ask it."""

    base_url: str  # without /v1
    model: str
    interface: Interface = Interface.COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    ignore_eos: bool = True  # generate the asked length even past an end token
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys of the body
    renamed: Mapping[str, str] = field(default_factory=dict)  # of `OPTIONAL_FIELDS`, to the names that the server has
    omitted: tuple[str, ...] = ()  # of `OPTIONAL_FIELDS`
    num_retries: int = 0  # times that a request is sent again when the server is too busy
    timeout_s: float = 600.0  # of one request
    idle_timeout_s: float = 120.0  # without any byte

    @property
    def url(self) -> str:
        return self.base_url + PATHS[self.interface]

    def body(self, prompt: ServingPrompt) -> dict[str, Any]:
        """JSON body of one request."""
        found: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            found["ignore_eos"] = True
        if self.interface is Interface.CHAT:
            found["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
        else:
            found["prompt"] = prompt.text
        kept = {self.renamed.get(name, name): value for name, value in found.items() if name not in self.omitted}
        return kept | dict(self.extra)


@dataclass(frozen=True, kw_only=True)
class ServingPrompt:
    """Text of one request and its lengths in tokens; `input_tokens` is 0 where it is not known beforehand."""

    text: str
    input_tokens: int
    output_tokens: int
    messages: list[dict[str, Any]] | None = None


def base_url(text: str) -> str:
    """Base of a server's address, from the forms that people write. Raises InputError.

    >>> base_url("localhost:8000"), base_url("http://host:8000/v1/"), base_url("https://host/api/v1/completions")
    ('http://localhost:8000', 'http://host:8000', 'https://host/api')
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        has_host = bool(parts.hostname) and (parts.port is None or 0 < parts.port < 65536)
    except ValueError:
        has_host = False
    if parts.scheme not in ("http", "https") or not has_host or parts.query or parts.fragment:
        raise InputError("not the address of a server", got=text, allowed="http(s)://HOST[:PORT][/v1]")
    path = parts.path.rstrip("/")
    for ending in (*PATHS.values(), "/v1/models", "/v1"):
        if path.endswith(ending):
            path = path[: -len(ending)]
            break
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
