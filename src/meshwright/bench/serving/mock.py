"""A server with known latencies and faults, to test clients and to measure the ceiling of ours.

    python -m meshwright.bench.serving.mock --port 8000 --ttft 0.05 --itl 0.01

Token k of an answer is due at arrival + ttft + k x itl. Deadlines are absolute, so that late wake-ups do not add up.
A prompt has as many tokens as words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MODEL = "mock"


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


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Latencies and faults of a mock server."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    faults: Mapping[int, MockFault] = field(default_factory=dict)  # by request, the first is 0
    fault_every: int | None = None  # requests: the last of each such group has `fault`
    fault: MockFault = MockFault.HTTP_500
    has_usage: bool = True
    tokens_per_chunk: int = 1
    is_split: bool = False  # each event arrives in several segments
    closes_kept_alive: bool = False  # after an answer, as some servers do
    slow_read_s: float = 0.0  # before the request's body is read
    num_slots: int | None = None  # requests that are answered at the same time; the others queue
    retry_after: str | None = None  # header of an injected HTTP error
    refused_fields: tuple[str, ...] = ()  # of a request: the answer is 400 with the name
    cached_tokens: int | None = None  # of each prompt, as the usage reports them

    def fault_of(self, index: int) -> MockFault | None:
        """The fault of a request, if any."""
        if self.fault_every and index % self.fault_every == self.fault_every - 1:
            return self.fault
        return self.faults.get(index)


class MockServer:
    """State of a running mock server."""

    def __init__(self, behavior: Behavior) -> None:
        self.behavior = behavior
        self.num_requests = 0
        self.num_tokens = 0
        self.token_s: dict[int, list[float]] = {}  # times of each token by request; the first is its arrival
        self._slots = asyncio.Semaphore(behavior.num_slots) if behavior.num_slots else None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the client went away, or sent no HTTP
        finally:
            if task is not None:
                self._tasks.discard(task)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def cancel(self) -> None:
        """End all connections."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: the connection ends."""
        head = await reader.readuntil(b"\r\n\r\n")
        arrived_s = asyncio.get_running_loop().time()
        method, path, *_ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if self.behavior.slow_read_s:
            await asyncio.sleep(self.behavior.slow_read_s)
        body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
        if method == "GET":
            data = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            writer.write(_response(200, data))
            await writer.drain()
            return True
        index, self.num_requests = self.num_requests, self.num_requests + 1
        try:
            request = json.loads(body)
            num_input, is_chat = _num_input(request), path.endswith("/chat/completions")
            num_tokens = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
        except (ValueError, TypeError, AttributeError):
            writer.write(_response(400, json.dumps({"error": {"message": "not a request"}})))
            await writer.drain()
            return True
        if refused := [name for name in self.behavior.refused_fields if name in request]:
            writer.write(_response(400, json.dumps({"error": {"message": f"Unsupported parameter: '{refused[0]}'"}})))
            await writer.drain()
            return True
        answer = _Answer(self.behavior, writer, num_tokens, num_input, is_chat, arrived_s)
        if self._slots is None:
            goes_on = await answer.write(self.behavior.fault_of(index))
        else:
            async with self._slots:
                answer.start_s = asyncio.get_running_loop().time()
                goes_on = await answer.write(self.behavior.fault_of(index))
        self.num_tokens += answer.num_written
        self.token_s[index] = [arrived_s, *answer.written_s]
        return goes_on and not self.behavior.closes_kept_alive


def _num_input(request: dict[str, Any]) -> int:
    messages = request.get("messages")
    text = " ".join(str(m["content"]) for m in messages) if messages else str(request["prompt"])
    return len(text.split())


def _response(status: int, body: str, retry_after: str | None = None) -> bytes:
    data = body.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    head += f"Retry-After: {retry_after}\r\n" if retry_after is not None else ""
    return f"{head}\r\n".encode() + data


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HALF = (
    MockFault.RESET,
    MockFault.CLOSE,
    MockFault.STALL,
    MockFault.NOT_JSON,
    MockFault.NOT_AN_EVENT,
    MockFault.ERROR_EVENT,
)
BAD_EVENTS = {
    MockFault.NOT_JSON: b'data: {"choices": [{"te\n\n',
    MockFault.NOT_AN_EVENT: b"<html>no event</html>\n\n",
    MockFault.ERROR_EVENT: b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
}


class _Answer:
    """One answer that is being written."""

    def __init__(
        self, behavior: Behavior, writer: asyncio.StreamWriter, num_tokens: int, num_input: int,
        is_chat: bool, start_s: float,
    ) -> None:  # fmt: skip
        self.behavior, self.writer, self.num_input, self.is_chat = behavior, writer, num_input, is_chat
        self.num_tokens, self.num_written, self.start_s = num_tokens, 0, start_s
        self.written_s: list[float] = []
        text = {"delta": {"content": " tok"}} if is_chat else {"text": " tok"}
        self.event = _event({"choices": [{"index": 0, "finish_reason": None, **text}]})

    async def write(self, fault: MockFault | None) -> bool:
        """Write the answer, or the fault; False: the connection ends."""
        writer = self.writer
        match fault:
            case MockFault.HTTP_500 | MockFault.HTTP_429 | MockFault.HTTP_503:
                status = int(fault.removeprefix("http_"))
                body = json.dumps({"error": {"message": "an injected error"}})
                writer.write(_response(status, body, self.behavior.retry_after))
                await writer.drain()
                return True
            case MockFault.CLOSE_AT_ONCE:
                return False
            case MockFault.NOT_HTTP:
                writer.write(b"\x00\x01 not HTTP\r\n\r\n")
                await writer.drain()
                return False
        await self._sleep_until(self.start_s + self.behavior.ttft_s)
        writer.write(HEAD)
        if self.is_chat:
            await self._send(_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}))
        if fault is MockFault.EMPTY:
            self.num_tokens = 0
        await self._tokens(self.num_tokens // 2 if fault in HALF else self.num_tokens)
        if fault is not None and fault in BAD_EVENTS:
            await self._send(BAD_EVENTS[fault])
            await self._tokens(self.num_tokens - self.num_written)
        if fault is MockFault.STALL:
            await asyncio.sleep(3600)
        if fault is MockFault.RESET:
            writer.transport.abort()
        if fault in (MockFault.RESET, MockFault.CLOSE):
            return False
        if fault is not MockFault.NO_FINISH:
            await self._finish()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _tokens(self, count: int) -> None:
        """Write `count` tokens, each chunk at its time."""
        last = self.num_written + count
        while self.num_written < last:
            await self._sleep_until(self.start_s + self.behavior.ttft_s + self.num_written * self.behavior.itl_s)
            self.written_s.append(asyncio.get_running_loop().time())
            await self._send(self.event)
            self.num_written += min(self.behavior.tokens_per_chunk, last - self.num_written)

    async def _finish(self) -> None:
        text: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        await self._send(_event({"choices": [{"index": 0, "finish_reason": "length", **text}]}))
        if self.behavior.has_usage:
            usage: dict[str, Any] = {
                "prompt_tokens": self.num_input, "completion_tokens": self.num_written,
                "total_tokens": self.num_input + self.num_written,
            }  # fmt: skip
            if self.behavior.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.behavior.cached_tokens}
            await self._send(_event({"choices": [], "usage": usage}))
        await self._send(b"data: [DONE]\n\n")

    async def _send(self, event: bytes) -> None:
        framed = b"%x\r\n%b\r\n" % (len(event), event)
        if self.behavior.is_split:
            for start in range(0, len(framed), 7):
                self.writer.write(framed[start : start + 7])
                await self.writer.drain()
                await asyncio.sleep(0)
        else:
            self.writer.write(framed)
            await self.writer.drain()

    async def _sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))


def _event(document: dict[str, Any]) -> bytes:
    is_chat = any("delta" in choice for choice in document["choices"])
    head = {
        "id": "mock", "object": "chat.completion.chunk" if is_chat else "text_completion", "created": 0,
        "model": MODEL,
    }  # fmt: skip
    return b"data: " + json.dumps({**head, **document}).encode() + b"\n\n"


@asynccontextmanager
async def mock_server(behavior: Behavior | None = None, *, port: int = 0) -> AsyncIterator[tuple[MockServer, str]]:
    """Run a mock server in this event loop; yield it and its address."""
    state = MockServer(behavior or Behavior())
    server = await asyncio.start_server(state.handle, "127.0.0.1", port)
    try:
        yield state, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        state.cancel()
        await asyncio.sleep(0)


async def _serve(behavior: Behavior, port: int) -> None:
    async with mock_server(behavior, port=port) as (_, url):
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument("--itl", type=float, default=0.005, metavar="SECONDS")
    parser.add_argument("--slots", type=int, metavar="N", help="requests answered at the same time")
    parser.add_argument("--fault", type=MockFault, choices=list(MockFault), default=MockFault.HTTP_500)
    parser.add_argument("--fault-every", type=int, metavar="N", help="every N-th request has the fault")
    asked = parser.parse_args()
    behavior = Behavior(
        ttft_s=asked.ttft, itl_s=asked.itl, num_slots=asked.slots, fault=asked.fault, fault_every=asked.fault_every
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(behavior, asked.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
