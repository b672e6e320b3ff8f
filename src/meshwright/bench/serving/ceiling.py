"""The client's own ceiling: chunks per second of CPU time that it reads when the server costs nearly nothing.

CPU time, because other programs would lower the ceiling of a busy machine at the moment of the self-test only.
The mock server runs in the same thread and writes one chunk per stream in turn, so every chunk is read separately and
the cost of the server is inside the result: the ceiling is a lower bound. A measurement above half of it shows the
client rather than the server, and is refused.
"""

from __future__ import annotations

import time
from dataclasses import replace

from meshwright.bench.serving.client import Client, open_session
from meshwright.bench.serving.endpoint import Endpoint, ServingPrompt
from meshwright.bench.serving.loads import run_load
from meshwright.bench.serving.mock import MODEL, mock_server
from meshwright.records.serving import Load, ServingPoint

REFUSED_RATIO = 0.5
"""Share of the ceiling above which a result is refused."""

MOST_STREAMS, TOKENS, LEAST_S = 64, 100, 0.3

LEAST_ROUNDS = 3
"""The first round imports and opens connections; on a busy machine it alone may take longer than `LEAST_S`."""


async def client_ceiling(concurrency: int, *, least_s: float = LEAST_S) -> float:
    """Chunks per second of the client with `concurrency` streams, 64 at most, measured for `least_s` at least."""
    streams = max(1, min(MOST_STREAMS, concurrency))
    prompt = ServingPrompt(text="ceiling", input_tokens=1, output_tokens=TOKENS)
    async with mock_server() as (_, url):
        endpoint = Endpoint(base_url=url, model=MODEL)
        async with open_session(endpoint) as session:
            best, spent_s, num_rounds = 0.0, 0.0, 0
            while spent_s < least_s or num_rounds < LEAST_ROUNDS:
                begin_s = time.thread_time()
                client = Client(session=session, endpoint=endpoint, start_s=time.perf_counter())
                outcome = await run_load(client, Load(concurrency=streams), [prompt] * streams, num_requests=streams)
                num_chunks = sum(len(record.chunk_s) for record in outcome.records)
                cpu_s = max(time.thread_time() - begin_s, 1e-6)
                best = max(best, num_chunks / cpu_s)
                spent_s += max(cpu_s, outcome.wall_s)
                num_rounds += 1
    return best


def judged(point: ServingPoint, ceiling: float) -> ServingPoint:
    """Return the point with the client's ceiling, refused if it was too near."""
    return replace(point, client_ceiling_chunks_per_s=ceiling, refusal=refusal(point.chunks_per_s, ceiling))


def refusal(chunks_per_s: float, ceiling: float) -> str:
    """The reason to refuse a result; empty if the client was fast enough."""
    if chunks_per_s <= REFUSED_RATIO * ceiling:
        return ""
    return (
        f"{chunks_per_s:,.0f} chunks/s are above half of this client's ceiling of {ceiling:,.0f}: "
        "the client may have limited the result"
    )
