"""A server with known latencies, to measure the ceiling of our client.

    python -m meshwright.bench.serving.mock --port 8000 --ttft 0.05 --itl 0.01

Token k of an answer is due at arrival + ttft + k x itl. Deadlines are absolute, so that late wake-ups do not add up.
A prompt has as many tokens as words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

MODEL = "mock"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Latencies of a mock server."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    num_slots: int | None = None  # requests that are answered at the same time; the others queue


class Answer:
    """One answer that is being written."""

    def __init__(self, writer: asyncio.StreamWriter, request: dict[str, Any], *, is_chat: bool, start_s: float) -> None:
        messages = request.get("messages")
        text = " ".join(str(m["content"]) for m in messages) if messages else str(request["prompt"])
        self.writer, self.is_chat, self.start_s, self.num_input = writer, is_chat, start_s, len(text.split())
        self.num_tokens = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
        self.num_written, self.written_s = 0, list[float]()
        token = {"delta": {"content": " tok"}} if is_chat else {"text": " tok"}
        self.event = event({"choices": [{"index": 0, "finish_reason": None, **token}]})

    async def write(self, behavior: Behavior) -> bool:
        """Write the answer; False: the connection ends."""
        await self.begin(behavior)
        await self.tokens(self.num_tokens, behavior)
        await self.finish()
        return True

    async def begin(self, behavior: Behavior) -> None:
        """Write what comes before the first token."""
        await _sleep_until(self.start_s + behavior.ttft_s)
        self.writer.write(HEAD)
        if self.is_chat:
            await self.send(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}))

    async def tokens(self, count: int, behavior: Behavior, *, per_chunk: int = 1) -> None:
        """Write `count` tokens, each chunk at its time."""
        last = self.num_written + count
        while self.num_written < last:
            await _sleep_until(self.start_s + behavior.ttft_s + self.num_written * behavior.itl_s)
            self.written_s.append(asyncio.get_running_loop().time())
            await self.send(self.event)
            self.num_written += min(per_chunk, last - self.num_written)

    async def finish(self, **usage: Any) -> None:
        """Write what comes after the last token, with more entries of the usage."""
        text: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        await self.send(event({"choices": [{"index": 0, "finish_reason": "length", **text}]}))
        counts = {"prompt_tokens": self.num_input, "completion_tokens": self.num_written}
        await self.send(event({"choices": [], "usage": counts | {"total_tokens": sum(counts.values())} | usage}))
        await self.send(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        """Write one chunk of HTTP."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()


class MockServer:
    """State of a running mock server."""

    def __init__(self, behavior: Behavior) -> None:
        self.behavior = behavior
        self.num_requests = 0
        self.num_tokens = 0
        self.token_s: dict[int, list[float]] = {}  # times of each token by request; the first is its arrival
        self._slots = asyncio.Semaphore(behavior.num_slots) if behavior.num_slots else nullcontext()
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
        """Answer one HTTP request; False: the connection ends."""
        head = await reader.readuntil(b"\r\n\r\n")
        arrived_s = asyncio.get_running_loop().time()
        method, path, *_ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
        if method == "GET":
            await self.get(writer, path)
            return True
        try:
            request = json.loads(body)
            answer = Answer(writer, request, is_chat=path.endswith("/chat/completions"), start_s=arrived_s)
        except (ValueError, TypeError, AttributeError, KeyError):
            await respond(writer, 400, {"error": {"message": "not a request"}})
            return True
        index, self.num_requests = self.num_requests, self.num_requests + 1
        async with self._slots:
            if self.behavior.num_slots:
                answer.start_s = asyncio.get_running_loop().time()
            goes_on = await self.answer(answer, request, index)
        self.num_tokens += answer.num_written
        self.token_s[index] = [arrived_s, *answer.written_s]
        return goes_on

    async def get(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Answer a request without a body."""
        await respond(writer, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def answer(self, answer: Answer, request: dict[str, Any], index: int) -> bool:
        """Answer the request of that number; False: the connection ends."""
        return await answer.write(self.behavior)


async def _sleep_until(due_s: float) -> None:
    await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))


async def respond(writer: asyncio.StreamWriter, status: int, document: dict[str, Any], *, headers: str = "") -> None:
    """Write a response of HTTP with JSON; each of `headers` ends with its line."""
    data = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def event(document: dict[str, Any]) -> bytes:
    """A server-sent event of an answer."""
    is_chat = any("delta" in choice for choice in document["choices"])
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return (
        b"data: %b\n\n" % json.dumps({"id": "mock", "object": kind, "created": 0, "model": MODEL} | document).encode()
    )


@asynccontextmanager
async def mock_server(state: MockServer | None = None, *, port: int = 0) -> AsyncIterator[tuple[MockServer, str]]:
    """Run a mock server in this event loop; yield it and its address."""
    state = state or MockServer(Behavior())
    server = await asyncio.start_server(state.handle, "127.0.0.1", port)
    try:
        yield state, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        state.cancel()
        await asyncio.sleep(0)


async def _serve(behavior: Behavior, port: int) -> None:
    async with mock_server(MockServer(behavior), port=port) as (_, url):
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument("--itl", type=float, default=0.005, metavar="SECONDS")
    parser.add_argument("--slots", type=int, metavar="N", help="requests answered at the same time")
    asked = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(Behavior(ttft_s=asked.ttft, itl_s=asked.itl, num_slots=asked.slots), asked.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
