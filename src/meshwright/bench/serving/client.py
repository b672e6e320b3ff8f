"""One request: sent, streamed, timed and classified. Its record is kept also when it fails or is cancelled.

Arrival times are taken when bytes are handed over by the event loop, before they are parsed. Chunks that arrive in
one read have one arrival time.

aiohttp is the client library: docs/reference/bench-serving.md has its measured ceiling beside httpx.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

from meshwright.bench.serving.endpoint import Endpoint, ServingPrompt
from meshwright.bench.serving.events import (
    DONE,
    LARGEST_EVENT_BYTES,
    ChunkKind,
    EventBuffer,
    MalformedEventError,
    error_text,
    read_chunk,
)
from meshwright.json_values import parse_json
from meshwright.records.serving import RequestRecord, RequestStatus, TokenSource

READ_BYTES = 2**18
CONNECT_TIMEOUT_S = 30.0
BYTES_PER_TOKEN = 2**12
"""Of an answer at most, beside one event of the largest size; its chunks are held in memory."""
MOST_TOKENS = 2**53
NO_RETRY = (aiohttp.ClientConnectorError, TimeoutError)
"""Lost connections that a new one would not mend."""
BUSY_STATUSES = (429, 503)
"""Statuses that may come with Retry-After (RFC 9110, section 10.2.3; RFC 6585, section 4)."""
FIRST_WAIT_S = 1.0
"""Wait before a request is sent again where the server names none; twice as long each further time."""

CountTokens = Callable[[str], int]
"""Tokens of a text, by a local tokenizer."""


@asynccontextmanager
async def open_session(endpoint: Endpoint) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP session without a limit of connections. Proxies of the environment are not used."""
    timeout = aiohttp.ClientTimeout(
        total=endpoint.timeout_s, sock_read=endpoint.idle_timeout_s, connect=CONNECT_TIMEOUT_S
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, ttl_dns_cache=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=dict(endpoint.headers), read_bufsize=READ_BYTES
    ) as session:
        yield session


@dataclass
class _Answer:
    """Part of an answer that has arrived so far."""

    has_begun: bool = False  # the server has sent a status
    chunk_s: list[float] = field(default_factory=list)
    answer_s: float | None = None
    texts: list[str] = field(default_factory=list)
    usage: dict[str, object] | None = None
    finish_reason: str | None = None
    is_done: bool = False
    num_malformed: int = 0
    malformed: str = ""
    error: str = ""
    http_status: int | None = None  # other than 200
    retry_after_s: float | None = None
    num_reconnects: int = 0
    num_retries: int = 0

    def take(self, data: bytes, now_s: float) -> None:
        """Add one event; what follows the end is no part of the answer."""
        self.is_done = self.is_done or data.strip() == DONE
        if self.is_done:
            return
        chunk = read_chunk(data)
        if chunk.error is not None:
            self.error = chunk.error
        # Before the first text an empty chunk only says that the answer begins.
        if chunk.kind is not ChunkKind.EMPTY and (chunk.text or self.chunk_s):
            self.chunk_s.append(now_s)
            self.texts.append(chunk.text)
            if chunk.kind is ChunkKind.ANSWER and self.answer_s is None:
                self.answer_s = now_s
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason


@dataclass(frozen=True, kw_only=True)
class Client:
    """Sends requests to one endpoint and keeps their records.

    `start_s` is the clock's time at which the load begins.
    """

    session: aiohttp.ClientSession
    endpoint: Endpoint
    start_s: float
    records: list[RequestRecord] = field(default_factory=list)  # in order of their ends
    count_tokens: CountTokens | None = None
    clock: Callable[[], float] = time.perf_counter

    async def send(self, prompt: ServingPrompt, *, index: int, due_s: float | None = None) -> RequestRecord:
        """Send one request, keep its record and return it. Raises only CancelledError."""
        answer = _Answer()
        sent_s = self.clock()
        due_s = sent_s - self.start_s if due_s is None else due_s

        def record(status: RequestStatus, reason: str = "") -> RequestRecord:
            made = self._record(prompt, answer, index=index, due_s=due_s, sent_s=sent_s, status=status, reason=reason)
            self.records.append(made)
            return made

        try:
            while True:
                status, reason = await self._try(prompt, answer)
                wait_s = self._retry_wait_s(answer)
                if wait_s is None:
                    return record(status, reason)
                await asyncio.sleep(wait_s)
                answer = _Answer(num_reconnects=answer.num_reconnects, num_retries=answer.num_retries + 1)
        except asyncio.CancelledError:
            record(RequestStatus.CANCELLED, "interrupted")
            raise
        except MalformedEventError as error:
            answer.num_malformed += 1
            return record(RequestStatus.MALFORMED, str(error))
        except TimeoutError as error:  # aiohttp's timeouts are TimeoutErrors
            return record(RequestStatus.TIMED_OUT, _reason(error))
        except aiohttp.ClientConnectorError as error:
            return record(RequestStatus.NOT_CONNECTED, _reason(error))
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            return record(RequestStatus.DROPPED, _reason(error))
        except (aiohttp.ClientError, ValueError) as error:  # an answer that is not HTTP
            return record(RequestStatus.MALFORMED, _reason(error))

    def _retry_wait_s(self, answer: _Answer) -> float | None:
        """Seconds until the request is sent again; None: it is not."""
        if answer.http_status not in BUSY_STATUSES or answer.num_retries >= self.endpoint.num_retries:
            return None
        named_s = answer.retry_after_s
        wait_s = FIRST_WAIT_S * 2.0**answer.num_retries if named_s is None else named_s
        return wait_s if wait_s <= self.endpoint.timeout_s else None

    async def _try(self, prompt: ServingPrompt, answer: _Answer) -> tuple[RequestStatus, str]:
        """`_stream`, and once more on a new connection where the server had closed a kept-alive one."""
        try:
            return await self._stream(self.session, prompt, answer)
        except (aiohttp.ClientConnectionError, OSError) as error:
            if answer.has_begun or isinstance(error, NO_RETRY):
                raise
        answer.num_reconnects += 1
        async with open_session(self.endpoint) as session:
            return await self._stream(session, prompt, answer)

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: ServingPrompt, answer: _Answer
    ) -> tuple[RequestStatus, str]:
        """Send the request and read the whole answer; return its status and a reason."""
        endpoint = self.endpoint
        most_bytes, num_bytes = LARGEST_EVENT_BYTES + prompt.output_tokens * BYTES_PER_TOKEN, 0
        # Another host that answers would be measured with the way to it.
        async with session.post(endpoint.url, json=endpoint.body(prompt), allow_redirects=False) as response:
            answer.has_begun = True
            if response.status != 200:
                answer.http_status = response.status
                answer.retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
                return RequestStatus.HTTP_ERROR, f"{response.status}: {await _error_body(response)}"
            events = EventBuffer()
            async for data in response.content.iter_any():
                now_s = self.clock()
                num_bytes += len(data)
                if num_bytes > most_bytes:
                    raise MalformedEventError(f"the answer is longer than {most_bytes} bytes")
                for event in events.feed(data):
                    answer.take(event, now_s)
            now_s = self.clock()
            for event in events.end():
                answer.take(event, now_s)
        if answer.error:
            return RequestStatus.SERVER_ERROR, answer.error
        if not answer.is_done and answer.finish_reason is None:
            return RequestStatus.DROPPED, "the stream ended without a finish"
        if not answer.chunk_s:
            return RequestStatus.MALFORMED, "the answer has no token"
        return RequestStatus.OK, ""

    def _record(
        self, prompt: ServingPrompt, answer: _Answer, *, index: int, due_s: float, sent_s: float,
        status: RequestStatus, reason: str,
    ) -> RequestRecord:  # fmt: skip
        end_s, start_s = self.clock(), self.start_s
        num_input, num_output, source = self._tokens(prompt, answer)
        return RequestRecord(
            index=index,
            due_s=due_s,
            sent_s=sent_s - start_s,
            end_s=end_s - start_s,
            status=status,
            reason=reason,
            chunk_s=tuple(s - start_s for s in answer.chunk_s),
            answer_s=None if answer.answer_s is None else answer.answer_s - start_s,
            reasoning_tokens=_counted(answer.usage, "completion_tokens_details", "reasoning_tokens"),
            cached_tokens=_counted(answer.usage, "prompt_tokens_details", "cached_tokens"),
            http_status=answer.http_status if status is RequestStatus.HTTP_ERROR else None,
            input_tokens=num_input,
            output_tokens=num_output,
            token_source=source,
            asked_input_tokens=prompt.input_tokens,
            asked_output_tokens=prompt.output_tokens,
            num_reconnects=answer.num_reconnects,
            num_retries=answer.num_retries,
            num_malformed=answer.num_malformed,
            finish_reason=answer.finish_reason,
        )

    def _tokens(self, prompt: ServingPrompt, answer: _Answer) -> tuple[int, int, TokenSource]:
        """Input and output tokens, and who counted them."""
        usage = answer.usage or {}
        num_input, num_output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if num_input is not None and num_output is not None:
            return num_input, num_output, TokenSource.USAGE
        if self.count_tokens is not None:
            text = prompt.text or " ".join(str(m.get("content", "")) for m in prompt.messages or ())
            return (self.count_tokens(text), self.count_tokens("".join(answer.texts)), TokenSource.TOKENIZER)
        return prompt.input_tokens, len(answer.chunk_s), TokenSource.CHUNKS


def _reason(error: BaseException) -> str:
    """Text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")[:300]


async def _error_body(response: aiohttp.ClientResponse) -> str:
    """The message in the body of an answer with an error status, or the address that it redirects to."""
    if address := response.headers.get("Location"):
        return error_text(f"it redirects to {address}")
    text = (await response.content.read(4096)).decode("utf-8", errors="replace")
    try:
        found = parse_json(text)
    except ValueError:
        return error_text(text)
    return error_text(found.get("error", found.get("message", found)) if isinstance(found, dict) else found)


def _counted(usage: dict[str, object] | None, details_key: str, key: str) -> int | None:
    """A count in the details of the usage; None where the server does not count it."""
    details = (usage or {}).get(details_key)
    return _count(details.get(key)) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _retry_after_s(text: str | None) -> float | None:
    """Seconds until the time that a Retry-After header names, by its count of seconds or its date; None without one."""
    if text is None:
        return None
    if re.fullmatch(r"\s*-?[0-9]+\s*", text):
        return max(0.0, float(text))
    with suppress(ValueError):
        found = parsedate_to_datetime(text)
        return max(0.0, (found.replace(tzinfo=found.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None
