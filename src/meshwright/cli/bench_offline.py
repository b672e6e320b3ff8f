"""`meshwright bench offline`: batch throughput of replicas, measured together."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.cli.verbs import load
from meshwright.errors import InfeasibleError, InputError, MissingDependencyError
from meshwright.files import write_atomically
from meshwright.report.documents.json_values import jsonable

SCHEMA = "meshwright bench offline 1"
NAME = "offline.json"
OFFLINE = "meshwright.bench.serving.offline"


def run(**options: Any) -> None:
    """Start the replicas where asked for, measure all pairs, and keep and show the result."""
    if find_spec("aiohttp") is None:
        raise MissingDependencyError(
            "measuring a server needs aiohttp, which is not installed", hint="pip install 'meshwright[serve]'"
        )
    folder, addresses = options["folder"], options["addresses"]
    if bool(addresses) == bool(options["server"]):
        raise InputError("name servers, or one to start", hint="URL..., or --server NAME")
    if (folder / NAME).exists():
        raise InputError("there is a measurement already", got=str(folder / NAME), hint="name another --out")
    pairs = load(f"{OFFLINE}:parse_pairs")(options["pairs"] or load(f"{OFFLINE}:SOURCE_PAIRS"))
    earlier = _earlier(options["against"])
    with ExitStack() as stack:
        urls, model = list(addresses), options["model"]
        if options["server"]:
            start = load("meshwright.cli.bench_serve_server:started")
            asked = {**options, "address": None, "url": None, "concurrency": None}
            asked["most_in_flight"] = -(-options["num_requests"] // options["replicas"])
            for number in range(1, options["replicas"] + 1):
                server = stack.enter_context(start(asked, folder=folder / f"replica-{number}"))
                urls.append(server.command.url)
                model = server.command.model
        request = _request(options, urls, model, pairs)
        _measure(request, options, earlier)


def _request(options: dict[str, Any], urls: list[str], model: str | None, pairs: Any) -> Any:
    """The request with one endpoint for each address."""
    endpoint, prompts = load("meshwright.bench.serving.endpoint:Endpoint"), "meshwright.bench.serving.prompts"
    bases = [load("meshwright.bench.serving.endpoint:base_url")(url) for url in urls]
    if model is None:
        model = asyncio.run(load("meshwright.bench.serving.bench:served_model")(bases[0], {}))
    tokenizer = options["tokenizer_path"] and load(f"{prompts}:open_tokenizer")(options["tokenizer_path"])
    length = load(f"{prompts}:parse_lengths")("1", option="--pairs")
    return load(f"{OFFLINE}:OfflineRequest")(
        endpoints=tuple(endpoint(base_url=base, model=model, timeout_s=options["timeout_s"]) for base in bases),
        pairs=pairs, num_requests=options["num_requests"], num_warmup=options["num_warmup"],
        source=load(f"{prompts}:PromptSource")(
            inputs=length, outputs=length, seed=options["seed"], tokenizer=tokenizer
        ),
        extrapolate_to=options["extrapolate_to"],
    )  # fmt: skip


def _measure(request: Any, options: dict[str, Any], earlier: dict[str, float]) -> None:
    path, started, found = options["folder"] / NAME, datetime.now(UTC).isoformat(timespec="seconds"), []
    options["folder"].mkdir(parents=True, exist_ok=True)

    def done(point: Any) -> None:
        found.append(point)
        text = f"{point.pair.name:>12}  {point.point.output_tokens_per_s:,.1f} output tokens/s"
        print(text, file=sys.stderr, flush=True)
        document = _document(found, request, options, started, earlier)
        write_atomically(path, json.dumps(jsonable(document), indent=2, allow_nan=False) + "\n")

    try:
        load(f"{OFFLINE}:run_offline")(request, done=done)
    except KeyboardInterrupt:
        note(f"{len(found)} of {len(request.pairs)} pairs are in {path}")
        raise
    document = _document(found, request, options, started, earlier)
    if options["as_json"]:
        emit_json({"records": path, **document})
    else:
        print_text_tables(load("meshwright.report.serving_offline:tables")(found, document["comparison"]))
        print_line()
        print_line(f"Records: {path}")
    if not any(p.point.is_usable for p in found):
        raise InfeasibleError("no pair could be measured", hint=f"errors by kind are in {path}")


def _document(
    found: list[Any], request: Any, options: dict[str, Any], started: str, earlier: dict[str, float]
) -> dict[str, Any]:
    compared = load(f"{OFFLINE}:compare")(found, earlier) if earlier else None
    return {
        "schema": SCHEMA,
        "started": started,
        "command": ["meshwright", *sys.argv[1:]],
        "server": options["server"],
        "server_options": list(options["server_options"]),
        "model": options["model"] or request.endpoints[0].model,
        "num_replicas": len(request.endpoints),
        "num_requests": request.num_requests,
        "pairs": [{"name": p.pair.name, **asdict(p)} for p in found],
        "comparison": compared,
    }


def _earlier(path: Path | None) -> dict[str, float]:
    """Measured output tokens/s by pair of another `offline.json`. Raises InputError for another file."""
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(document["schema"])
        rows = [(p["name"], p["point"]) for p in document["pairs"]]
        return {name: float(p["output_tokens_per_s"]) for name, p in rows if p["num_ok"] and not p["refusal"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"--against is no result of bench offline ({error})", got=str(path)) from None
