"""The mock server of `bench serve` with faults: what servers do to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from meshwright.bench.serving import mock
from meshwright.bench.serving.mock import Answer, MockServer, respond


class MockFault(StrEnum):
    """A fault of the mock server."""

    HTTP_500 = "http_500"
    HTTP_429 = "http_429"
    HTTP_503 = "http_503"
    RESET = "reset"  # the connection is reset in the middle of the answer
    CLOSE = "close"  # the connection is closed in the middle
    CLOSE_AT_ONCE = "close_at_once"  # before any byte of the answer
    STALL = "stall"  # no byte after the first tokens, and the connection stays open
    NOT_JSON = "not_json"
    NOT_AN_EVENT = "not_an_event"
    NOT_HTTP = "not_http"
    ERROR_EVENT = "error_event"
    NO_FINISH = "no_finish"  # a proper end of the body without finish and [DONE]
    EMPTY = "empty"  # an answer without tokens


BAD_EVENTS = {
    MockFault.NOT_JSON: b'data: {"choices": [{"te\n\n',
    MockFault.NOT_AN_EVENT: b"<html>no event</html>\n\n",
    MockFault.ERROR_EVENT: b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
}
HALF = (MockFault.RESET, MockFault.CLOSE, MockFault.STALL, *BAD_EVENTS)


@dataclass(frozen=True, kw_only=True)
class Behavior(mock.Behavior):
    """Latencies and faults of a mock server."""

    faults: Mapping[int, MockFault] = field(default_factory=dict)  # by request, the first is 0
    fault_every: int | None = None  # requests: the last of each such group has `fault`
    fault: MockFault = MockFault.HTTP_500
    has_usage: bool = True
    tokens_per_chunk: int = 1
    is_split: bool = False  # each event arrives in several segments
    closes_kept_alive: bool = False  # after an answer, as some servers do
    slow_read_s: float = 0.0  # before the request is answered
    retry_after: str | None = None  # header of an injected HTTP error
    refused_fields: tuple[str, ...] = ()  # of a request: the answer is 400 with the name
    cached_tokens: int | None = None  # of each prompt, as the usage reports them
    metrics: Mapping[str, Callable[[int], str]] = field(default_factory=dict)  # by path: text of finished requests

    def fault_of(self, index: int) -> MockFault | None:
        """The fault of a request, if any."""
        if self.fault_every and index % self.fault_every == self.fault_every - 1:
            return self.fault
        return self.faults.get(index)


class FaultyServer(MockServer):
    """A mock server that does to its clients what its behavior says."""

    behavior: Behavior

    async def get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path not in self.behavior.metrics:
            await (super().get(writer, path) if path == "/v1/models" else respond(writer, 404, {}))
            return
        data = self.behavior.metrics[path](len(self.token_s)).encode()
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        await writer.drain()

    async def answer(self, answer: Answer, request: dict[str, Any], index: int) -> bool:
        behavior, writer, fault = self.behavior, answer.writer, self.behavior.fault_of(index)
        await asyncio.sleep(behavior.slow_read_s)
        if refused := [name for name in behavior.refused_fields if name in request]:
            await respond(writer, 400, {"error": {"message": f"Unsupported parameter: '{refused[0]}'"}})
            return True
        match fault:
            case MockFault.HTTP_500 | MockFault.HTTP_429 | MockFault.HTTP_503:
                after = "" if behavior.retry_after is None else f"Retry-After: {behavior.retry_after}\r\n"
                error = {"error": {"message": "an injected error"}}
                await respond(writer, int(fault.removeprefix("http_")), error, headers=after)
                return True
            case MockFault.CLOSE_AT_ONCE:
                return False
            case MockFault.NOT_HTTP:
                writer.write(b"\x00\x01 not HTTP\r\n\r\n")
                await writer.drain()
                return False
        if behavior.is_split:
            answer.send = lambda data: _send_split(writer, data)
        return await self._stream(answer, fault) and not behavior.closes_kept_alive

    async def _stream(self, answer: Answer, fault: MockFault | None) -> bool:
        behavior, writer = self.behavior, answer.writer
        num_tokens = 0 if fault is MockFault.EMPTY else answer.num_tokens
        await answer.begin(behavior)
        first = num_tokens // 2 if fault in HALF else num_tokens
        await answer.tokens(first, behavior, per_chunk=behavior.tokens_per_chunk)
        if fault in BAD_EVENTS:
            await answer.send(BAD_EVENTS[fault])
            await answer.tokens(num_tokens - first, behavior)
        if fault is MockFault.STALL:
            await asyncio.sleep(3600)
        if fault is MockFault.RESET:
            writer.transport.abort()
        if fault in (MockFault.RESET, MockFault.CLOSE):
            return False
        if fault is MockFault.NO_FINISH:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        if not behavior.has_usage:
            send = answer.send

            async def without_usage(data: bytes) -> None:
                if b'"usage"' not in data:
                    await send(data)

            answer.send = without_usage
        cached = {"prompt_tokens_details": {"cached_tokens": behavior.cached_tokens}}
        await answer.finish(**({} if behavior.cached_tokens is None else cached))
        return True


async def _send_split(writer: asyncio.StreamWriter, data: bytes) -> None:
    framed = b"%x\r\n%b\r\n" % (len(data), data)
    for start in range(0, len(framed), 7):
        writer.write(framed[start : start + 7])
        await writer.drain()
        await asyncio.sleep(0)


def mock_server(behavior: Behavior) -> AbstractAsyncContextManager[tuple[MockServer, str]]:
    """Run a faulty server in this event loop; yield it and its address."""
    return mock.mock_server(FaultyServer(behavior))
