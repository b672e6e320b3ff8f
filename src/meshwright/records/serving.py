"""Records of serving: `serving.csv` with one line per load and repeat, `requests.jsonl` with one line per request.

    serving.csv     rates and latencies of a load, in one repeat
    requests.jsonl  every request with the arrival time of each of its chunks: all rates can be computed again
    serving.json    sidecar: endpoint, server, client and its ceiling, definitions

Two definitions of inter-token latency are kept apart, because they differ by factors on the same requests:

    chunk_gap  seconds between two chunks of an answer, pooled over all requests (vLLM, SGLang: "ITL")
    tpot       (end - first token) / (output tokens - 1) of each request (AIPerf, genai-perf: "inter token latency")
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import InputError
from meshwright.files import append, write_atomically
from meshwright.json_values import parse_json
from meshwright.records.fields import Fields
from meshwright.records.files import Recorder, RowTable, SidecarFields, differing, read_sidecar, unfinished, whole_lines

if TYPE_CHECKING:
    from meshwright.arrays import FloatArray

Gaps = TypeVar("Gaps", float, "FloatArray")

SCHEMA = "meshwright bench serving 1"
CSV_NAME, REQUESTS_NAME, SIDECAR_NAME = "serving.csv", "requests.jsonl", "serving.json"
MADE_BY = "meshwright bench serve"


class RequestStatus(StrEnum):
    """End of one request."""

    OK = "ok"
    NOT_CONNECTED = "not_connected"  # no connection could be opened
    HTTP_ERROR = "http_error"  # a status other than 200
    SERVER_ERROR = "server_error"  # an error inside the stream
    MALFORMED = "malformed"  # an event that is not what the interface says
    DROPPED = "dropped"  # the connection ended before the answer did
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"  # in flight when the measurement was interrupted


FAILURES = tuple(status for status in RequestStatus if status is not RequestStatus.OK)


class TokenSource(StrEnum):
    """Origin of the token counts."""

    USAGE = "usage"  # the server's own count
    TOKENIZER = "tokenizer"  # counted here
    CHUNKS = "chunks"  # one token per chunk assumed, and the input as asked
    MIXED = "mixed"  # of several requests with different origins


class Arrivals(StrEnum):
    """Times at which requests are sent."""

    CLOSED = "closed"  # a request begins when another ends
    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"  # at the times of a file


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load on a server: requests in flight (closed loop), or requests per second (open loop)."""

    arrivals: Arrivals = Arrivals.CLOSED
    concurrency: int | None = None  # the most requests in flight; None: no limit
    offered_per_s: float | None = None
    shape: float | None = None  # of gamma arrivals; 1 is Poisson, below 1 burstier

    @property
    def name(self) -> str:
        """Text of the load in tables.

        >>> Load(concurrency=4).name, Load(arrivals=Arrivals.POISSON, offered_per_s=2.5).name
        ('4 in flight', '2.5/s poisson')
        """
        if self.arrivals is Arrivals.CLOSED:
            return f"{self.concurrency} in flight"
        rate = "" if self.offered_per_s is None else f"{self.offered_per_s:g}/s "
        return f"{rate}{self.arrivals}"


def due_times(load: Load, count: int, *, seed: int) -> Iterator[float]:
    """Yield the seconds at which requests of an open loop are due; the first after one gap.

    Gamma gaps have mean 1 / rate and squared coefficient of variation 1 / shape.
    """
    return accumulate(gap_seconds(load, gap) for gap in islice(drawn_gaps(load, seed=seed), count))


def drawn_gaps(load: Load, *, seed: int) -> Iterator[float]:
    """Yield gaps of an open loop, without end and of no unit: `gap_seconds` scales them by the rate."""
    rng, shape = random.Random(f"arrivals {seed}"), load.shape or 1.0
    while True:
        match load.arrivals:
            case Arrivals.CONSTANT:
                yield 1.0
            case Arrivals.GAMMA:
                yield rng.gammavariate(shape, 1.0)
            case _:
                yield rng.expovariate(1.0)


def gap_seconds(load: Load, gaps: Gaps) -> Gaps:
    """Seconds of drawn gaps."""
    if load.offered_per_s is None:
        raise InputError("an open loop needs requests per second")
    if load.arrivals is Arrivals.GAMMA:
        return gaps * (1 / (load.offered_per_s * (load.shape or 1.0)))
    return gaps / load.offered_per_s


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Distribution of a time, in seconds. The median has a 95 % interval from order statistics.

    Results of other clients may lack all but the median.
    """

    n: int
    mean: float | None
    median: float
    median_low: float | None
    median_high: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    low: float | None
    high: float | None


def sum_known(counts: Iterable[int | None]) -> int | None:
    """Sum of the counts that are known; None where none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds since the first request of its load was due."""

    index: int
    sent_s: float
    due_s: float  # when it should have been sent
    end_s: float
    status: RequestStatus
    reason: str = ""
    chunk_s: tuple[float, ...] = ()  # arrival of each chunk that carries tokens
    answer_s: float | None = None  # arrival of the first chunk that is not reasoning
    input_tokens: int = 0
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.USAGE
    asked_input_tokens: int = 0
    asked_output_tokens: int = 0
    num_reconnects: int = 0  # kept-alive connections that the server had closed
    num_malformed: int = 0  # events that could not be read
    finish_reason: str | None = None
    reasoning_tokens: int | None = None  # of the output tokens, as the server counts them
    http_status: int | None = None  # of an HTTP error
    num_retries: int = 0  # times that it was sent again because the server was too busy
    cached_tokens: int | None = None  # of the input tokens, as the server counts those of its prefix cache

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def num_reasoning(self) -> int:
        """Output tokens before the answer: the server's count, else the output tokens by the share of such chunks."""
        if self.reasoning_tokens is not None:
            return self.reasoning_tokens
        first = float("inf") if self.answer_s is None else self.answer_s
        before = sum(s < first for s in self.chunk_s)
        return round(self.output_tokens * before / len(self.chunk_s)) if self.chunk_s else 0

    @property
    def first_answer_s(self) -> float | None:
        """Seconds from sending to the first token of the answer, where reasoning came before it."""
        if self.answer_s is None or not self.chunk_s or self.answer_s <= self.chunk_s[0]:
            return None
        return self.answer_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token; to the end if there is none."""
        return (self.chunk_s[-1] if self.chunk_s else self.end_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None below two tokens or two chunks."""
        if self.output_tokens < 2 or len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """Measurement of one load in one repeat: one line of `serving.csv`. Rates count successful requests only."""

    load: Load
    repeat: int  # the first is 1
    started: str  # ISO 8601, UTC
    interrupted: bool = False
    refusal: str = ""  # reason why the rates must not be used
    wall_s: float
    num_requests: int
    num_ok: int
    errors: Mapping[str, int] = field(default_factory=dict, metadata={"counted": FAILURES})  # by status
    num_reconnects: int = 0
    num_malformed_events: int = 0
    num_short: int = 0  # successful, with fewer output tokens than asked for
    token_source: TokenSource = TokenSource.USAGE
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    lost_output_tokens: int = 0  # delivered by requests that failed afterwards
    requests_per_s: float = 0.0
    input_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    steady_s: float | None = None  # time in which at least 90 % of the peak was in flight
    steady_output_tokens_per_s: float | None = None
    steady_total_tokens_per_s: float | None = None
    mean_in_flight: float = 0.0  # from the client's own counter
    peak_in_flight: int = 0
    littles_law_ratio: float | None = None  # mean in flight over rate times mean latency
    tokens_per_chunk: float | None = None
    ttft_s: Latency | None = None
    chunk_gap_s: Latency | None = None
    tpot_s: Latency | None = None
    e2e_s: Latency | None = None
    send_delay_s: Latency | None = None  # sent later than due: lag of the client, or of its limit in flight
    good_requests_per_s: float | None = None  # within all bounds
    good_ratio: float | None = None  # of all requests
    chunks_per_s: float = 0.0  # load of the client
    client_ceiling_chunks_per_s: float | None = None
    reasoning_tokens: int = 0  # of the output tokens
    first_answer_s: Latency | None = None  # from sending to the first token that is not reasoning
    server_wait_ratio: float | None = None  # of the time its busiest thread was ready: without a processor
    http_statuses: Mapping[str, int] = field(default_factory=dict, metadata={"packed": True})  # of `http_error`
    num_retries: int | None = None  # after the server was too busy; None in records of earlier releases
    cached_tokens: int | None = None  # of the input tokens; None: the server does not count them
    server_running: float | None = None  # requests, by the server's own metrics, a mean; None: it has none
    server_waiting: float | None = None
    server_cache_usage: float | None = None  # the highest share
    server_hit_ratio: float | None = None  # of the prompts' tokens: in the prefix cache
    server_preemptions: int | None = None

    @property
    def is_usable(self) -> bool:
        return not self.refusal and self.num_ok > 0


def token_rates(*, wall_s: float, done: int, num_input: int, num_output: int) -> dict[str, Any]:
    """Fields of a `ServingPoint` that follow from successful requests, their tokens and the wall time."""
    counts = {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output}
    rates = {
        f"{name}_per_s": count / wall_s if wall_s > 0 else 0.0 for name, count in {"requests": done, **counts}.items()
    }
    return {"wall_s": wall_s, "num_ok": done, **counts, **rates}


LATENCIES = ("ttft_s", "chunk_gap_s", "tpot_s", "e2e_s", "send_delay_s", "first_answer_s")
TABLE = RowTable(kind=ServingPoint, name=CSV_NAME, what="serving records", made_by=MADE_BY, num_added=8)


class EndpointFields(Fields):
    """The interface that was measured."""

    model: str | None = None


class ProgramFields(Fields):
    """A server or a client."""

    name: str | None = None
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServingRecords:
    """Content of one folder of `bench serve`."""

    folder: Path
    sidecar: Mapping[str, Any]
    points: tuple[ServingPoint, ...]


SAME = (
    "input_tokens", "output_tokens", "seed", "num_prompts_in_file", "has_tokenizer", "num_requests", "num_warmup",
    "ramp_s", "duration_s", "bounds",
)  # fmt: skip
"""Keys of a sidecar that must be equal for a measurement to be resumed. Repeats and loads may be added."""


def _identity(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions that two sidecars must agree in; the port of a started server may differ."""
    server, endpoint = sidecar.get("server") or {}, dict(sidecar.get("endpoint") or {})
    if server:
        endpoint.pop("url", None)
    named = {f"server {key}": server.get(key) for key in ("name", "options", "model")}
    found = {**{key: sidecar.get(key) for key in SAME}, **named, **endpoint}
    return json.loads(json.dumps(found | {"client": (sidecar.get("client") or {}).get("name")}))


class ServingRecorder(Recorder):
    """Writer of the three files in `folder`. Raises InputError if it holds records already.

    `resume` continues records of the same measurement: loads that were measured to their end are kept, an
    interrupted load is dropped with its requests.
    """

    def __init__(self, folder: Path, *, sidecar: Mapping[str, Any], resume: bool = False) -> None:
        super().__init__(folder, name=SIDECAR_NAME, sidecar={**unfinished(SCHEMA), **sidecar})
        self.path = folder / CSV_NAME
        self.points: list[ServingPoint] = []
        if resume:
            self._go_on(sidecar)
            return
        self.begin(TABLE, empty=[REQUESTS_NAME], hint="continue with --resume, or name another --out")

    def _go_on(self, sidecar: Mapping[str, Any]) -> None:
        earlier = read_serving(self.folder)
        before, now = _identity(earlier.sidecar), _identity(sidecar)
        if before != now:
            raise InputError(
                f"the records in {self.folder} are of another measurement ({differing(before, now)})",
                hint="repeat the first command's options; only loads and repeats may be added",
            )
        kept = [p for p in earlier.points if not p.interrupted]
        names = {(p.load.name, p.repeat) for p in kept}
        requests = [
            _request_line(Load(), repeat, one, name=load)
            for load, repeat, one in read_requests(self.folder)
            if (load, repeat) in names
        ]
        write_atomically(self.folder / REQUESTS_NAME, "".join(requests))
        self.rewrite(kept)
        resumed = [*earlier.sidecar.get("resumed", []), sidecar.get("started")]
        self.sidecar = {**earlier.sidecar, "server": sidecar.get("server"), "ended": None, "resumed": resumed}
        self.save()

    def measured(self, load: Load, repeat: int) -> ServingPoint | None:
        """Return the recorded measurement of a load, such as before an interruption; None: it has none."""
        return next((p for p in self.points if p.load == load and p.repeat == repeat), None)

    def append_requests(self, load: Load, repeat: int, requests: Sequence[RequestRecord]) -> None:
        """Add requests; they are on the disk when this returns."""
        append(self.folder / REQUESTS_NAME, "".join(_request_line(load, repeat, request) for request in requests))

    def append(self, point: ServingPoint) -> None:
        """Add one line; it is on the disk when this returns."""
        TABLE.append(self.path, point)
        self.points.append(point)

    def rewrite(self, points: Sequence[ServingPoint]) -> None:
        """Replace all lines, such as when the client's ceiling is known."""
        self.points = list(points)
        TABLE.write(self.path, self.points)


def _request_line(load: Load, repeat: int, request: RequestRecord, *, name: str | None = None) -> str:
    found = asdict(request) | {"load": name or load.name, "repeat": repeat}
    for name in ("sent_s", "due_s", "end_s"):
        found[name] = round(found[name], 6)
    found["answer_s"] = None if request.answer_s is None else round(request.answer_s, 6)
    found["chunk_s"] = [round(s, 6) for s in request.chunk_s]
    return json.dumps(found, separators=(",", ":")) + "\n"


class ServingSidecar(SidecarFields):
    """Keys of the sidecar of a server."""

    endpoint: EndpointFields
    server: ProgramFields | None = None
    client: ProgramFields | None = None


def read_serving(folder: Path) -> ServingRecords:
    """Read the records in `folder`. Raises InputError when they are absent or damaged."""
    sidecar = read_sidecar(
        folder / SIDECAR_NAME,
        schema=SCHEMA,
        keys=("command", "started", "endpoint"),
        made_by=MADE_BY,
        kind=ServingSidecar,
    )
    points = TABLE.read(folder / CSV_NAME, whole=bool(sidecar.get("ended")))
    return ServingRecords(folder=folder, sidecar=sidecar, points=points)


def read_requests(folder: Path) -> Iterable[tuple[str, int, RequestRecord]]:
    """Yield load, repeat and request of each line of `requests.jsonl`; an incomplete last line is ignored."""
    path = folder / REQUESTS_NAME
    try:
        text = whole_lines(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(io.StringIO(text), start=1):
        try:
            found = parse_json(line)
            load, repeat = found.pop("load"), found.pop("repeat")
            found |= {
                "chunk_s": tuple(found["chunk_s"]),
                "status": RequestStatus(found["status"]),
                "token_source": TokenSource(found["token_source"]),
            }
            yield load, repeat, RequestRecord(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}:{number}: not a request ({error})") from None
