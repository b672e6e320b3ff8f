"""Options of `meshwright bench serve` as one request, checked together."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from meshwright.bench.serving.bench import ServingBenchRequest, served_model
from meshwright.bench.serving.endpoint import OPTIONAL_FIELDS, Endpoint, Interface, base_url
from meshwright.bench.serving.metrics import LatencyBounds
from meshwright.bench.serving.prompts import PromptSource, TraceRow, open_tokenizer, parse_lengths, read_prompts
from meshwright.bench.serving.summary import InterTokenDefinition, MedianBounds
from meshwright.errors import InputError
from meshwright.records.serving import Arrivals, Load

SOURCE_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
"""Loads of the MI355X study (Signal65, June 2025, "Metric Calculation")."""
REQUESTS_PER_STREAM, FEWEST_REQUESTS = 10, 32
DEFAULT_SHAPE = 0.5
DEFAULT_MOST_IN_FLIGHT = 64
ADDRESS_HINT = "meshwright bench serve http://localhost:8000"


def request(options: dict[str, Any], *, url: str | None = None, model: str | None = None) -> ServingBenchRequest:
    """The request that the options describe. `url` and `model` belong to a server that was started by name.

    Raises InputError for options that contradict each other, before anything is sent but the question for the model.
    """
    rows = read_prompts(options["prompts_path"]) if options["prompts_path"] else ()
    loads = _loads(options, rows)
    source = PromptSource(
        inputs=parse_lengths(options["inputs"], option="--input-tokens"),
        outputs=parse_lengths(options["outputs"], option="--output-tokens"),
        seed=options["seed"],
        tokenizer=open_tokenizer(options["tokenizer_path"]) if options["tokenizer_path"] else None,
        rows=rows,
    )
    if options["interface"] == "completions" and any(row.messages for row in rows):
        raise InputError("prompts with `messages` need --endpoint chat", got=options["interface"])
    search = _search(options)
    most = options["most_in_flight"] or DEFAULT_MOST_IN_FLIGHT
    widest = most if search else max(load.concurrency or 1 for load in loads)
    num_requests = options["num_requests"] or (
        len(rows) if options["arrivals"] == "trace" else max(FEWEST_REQUESTS, REQUESTS_PER_STREAM * widest)
    )
    if options["arrivals"] == "trace" and num_requests > len(rows):
        raise InputError("--requests are more than the trace has", got=num_requests, allowed=f"<= {len(rows)}")
    return ServingBenchRequest(
        endpoint=_endpoint(options, url=url, model=model),
        loads=loads,
        source=source,
        num_requests=num_requests,
        num_warmup=options["num_warmup"],
        ramp_s=options["ramp_s"],
        duration_s=options["duration_s"],
        repeats=options["repeats"],
        bounds=LatencyBounds(
            ttft_s=_from_ms(options["ttft_ms"]), tpot_s=_from_ms(options["itl_ms"]), e2e_s=_from_ms(options["e2e_ms"])
        ),
        search=search,
        most_in_flight=most,
        has_self_test=not options["no_self_test"],
        seed=options["seed"],
    )


def _from_ms(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def _loads(options: dict[str, Any], rows: Sequence[TraceRow]) -> tuple[Load, ...]:
    concurrency, rates, arrivals = options["concurrency"], options["rates"], options["arrivals"]
    limit = options["most_in_flight"]
    if options["search"]:
        if concurrency or rates or arrivals:
            raise InputError("--search chooses the loads itself", hint="leave --concurrency, --rate and --arrivals out")
        return ()
    if options["shape"] is not None and arrivals != "gamma":
        raise InputError("--shape belongs to --arrivals gamma", got=options["shape"])
    if arrivals == "trace":
        if rates or concurrency:
            raise InputError("a trace has its own times", hint="leave --rate and --concurrency out")
        if not rows or rows[0].at_s is None:
            raise InputError("--arrivals trace needs --prompts with a timestamp in each line")
        return (Load(arrivals=Arrivals.TRACE, concurrency=limit),)
    if rates is None:
        if arrivals is not None:
            raise InputError(f"--arrivals {arrivals} needs --rate", hint="--rate 2,4,8")
        if limit is not None:
            raise InputError("--max-concurrency limits an open loop or --search", hint="--concurrency 1,2,4")
        return tuple(Load(concurrency=n) for n in concurrency or SOURCE_CONCURRENCIES)
    if concurrency:
        raise InputError(
            "--concurrency is a closed loop and --rate an open one", hint="--max-concurrency limits an open loop"
        )
    kind = Arrivals(arrivals or "poisson")
    shape = (options["shape"] or DEFAULT_SHAPE) if kind is Arrivals.GAMMA else None
    return tuple(Load(arrivals=kind, offered_per_s=rate, shape=shape, concurrency=limit) for rate in parse_rates(rates))


def parse_rates(text: str) -> tuple[float, ...]:
    """Read `0.5,1,2` requests per second, in ascending order. Raises InputError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(rate) and 0 < rate <= 1e5 for rate in found):
        raise InputError("--rate has a wrong number", got=text, allowed="above 0 to 100000, as in 0.5,1,2")
    return tuple(sorted(set(found)))


def _search(options: dict[str, Any]) -> MedianBounds | None:
    if not options["search"]:
        return None
    if options["itl_ms"] is None and options["ttft_ms"] is None:
        raise InputError("--search needs a bound", hint="--itl-bound 30, --ttft-bound 500, or both")
    definition = options["itl_definition"]
    return MedianBounds(
        itl_s=_from_ms(options["itl_ms"]),
        ttft_s=_from_ms(options["ttft_ms"]),
        definition=InterTokenDefinition.TPOT if definition == "tpot" else InterTokenDefinition.CHUNK_GAP,
    )


def _endpoint(options: dict[str, Any], *, url: str | None, model: str | None) -> Endpoint:
    named = [text for text in (options["address"], options["url"], url) if text]
    if len(named) != 1:
        raise InputError(
            "name one server" if not named else "more than one server is named",
            got=named or None, hint=ADDRESS_HINT,
        )  # fmt: skip
    base, headers = base_url(named[0]), _headers(options["key_variable"])
    return Endpoint(
        base_url=base,
        model=options["model"] or model or asyncio.run(served_model(base, headers)),
        interface=Interface(options["interface"]),
        headers=headers,
        ignore_eos=not options["stop_at_end_token"],
        extra=_extra(options["extras"]),
        renamed=_renamed(options["renamed"]),
        omitted=tuple(map(_optional_field, options["omitted"])),
        num_retries=options["num_retries"],
        timeout_s=options["timeout_s"],
        idle_timeout_s=options["idle_timeout_s"],
    )


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key or not key.isprintable():
        raise InputError("this environment variable holds no key", got=variable)
    return {"Authorization": f"Bearer {key}"}


def _extra(pairs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals or not key.strip():
            raise InputError("--extra must read KEY=JSON", got=pair, hint="--extra top_k=1 --extra 'stop=[\"x\"]'")
    return found


def _renamed(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, _, new = (part.strip() for part in pair.partition("="))
        if not new or new in OPTIONAL_FIELDS:
            raise InputError(
                "--request-field must read FIELD=NEW_NAME", got=pair, hint="max_tokens=max_completion_tokens"
            )
        found[_optional_field(name)] = new
    return found


def _optional_field(name: str) -> str:
    if name not in OPTIONAL_FIELDS:
        raise InputError(
            "a request cannot do without this field, or does not have it", got=name, allowed=", ".join(OPTIONAL_FIELDS),
            hint="--extra adds fields",
        )  # fmt: skip
    return name
