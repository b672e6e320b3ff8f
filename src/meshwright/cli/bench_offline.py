"""`meshwright bench offline`: batch throughput of replicas, measured together."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.cli.output import emitted_json, note, print_line, print_text_tables, say, write_html
from meshwright.errors import InfeasibleError, InputError, MissingDependencyError
from meshwright.files import write_atomically
from meshwright.json_values import jsonable
from meshwright.programs import install_command
from meshwright.records.files import now
from meshwright.records.offline import NAME, SCHEMA, read_offline
from meshwright.targets import load

OFFLINE = "meshwright.bench.serving.offline"


def run(**options: Any) -> None:
    """Start the replicas where asked for, measure all pairs, and keep and show the result."""
    folder, addresses = options["folder"], options["addresses"]
    if sum(map(bool, (addresses, options["server"], options["engine"]))) != 1:
        raise InputError(
            "name servers, or what to start", hint="URL..., --server NAME for a server, --engine NAME without one"
        )
    if options["engine"] is None and find_spec("aiohttp") is None:
        raise MissingDependencyError(
            "measuring a server needs aiohttp, which is not installed", hint=install_command("serve")
        )
    if (folder / NAME).exists():
        raise InputError("there is a measurement already", got=str(folder / NAME), hint="name another --out")
    pairs = load(f"{OFFLINE}:parse_pairs")(options["pairs"] or load(f"{OFFLINE}:SOURCE_PAIRS"))
    earlier = _earlier(options["against"])
    environments = _environments(options)
    if options["engine"]:
        load("meshwright.cli.bench_offline_engine:run")(
            options, pairs, environments, partial(_measure, options=options, earlier=earlier)
        )
        return
    with ExitStack() as stack:
        urls, model = list(addresses), options["model"]
        if options["server"]:
            start = load("meshwright.cli.bench_serve_server:started")
            asked = {**options, "address": None, "url": None, "concurrency": None}
            asked["most_in_flight"] = -(-options["num_requests"] // options["replicas"])
            for number, environment in enumerate(environments, start=1):
                place = folder / f"replica-{number}"
                server = stack.enter_context(start(asked | {"environment": environment}, folder=place))
                urls.append(server.command.url)
                model = server.command.model
        request = _request(options, urls, model, pairs)
        _measure(
            partial(load(f"{OFFLINE}:run_offline"), request), options=options, earlier=earlier,
            about={
                "model": options["model"] or request.endpoints[0].model, "num_replicas": len(urls),
                "num_pairs": len(pairs),
            },
        )  # fmt: skip


def _environments(options: dict[str, Any]) -> list[dict[str, str]]:
    """Environment of each replica that is started. Raises InputError."""
    if options["addresses"]:
        for name in ("devices", "cores"):
            if options[name] is not None:
                raise InputError(f"--{name} pins replicas that are started", hint="--server NAME or --engine NAME")
        return []
    found = load("meshwright.bench.batch.pinning:environments")(
        devices=options["devices"], cores=options["cores"], replicas=options["replicas"]
    )
    if options["replicas"] > 1 and not any(found):
        note("replicas are not pinned and share all devices and cores: --devices or --cores gives each its own")
    return found


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


def _measure(
    measure: Callable[..., Any], *, options: dict[str, Any], earlier: dict[str, float], about: dict[str, Any]
) -> None:
    """Measure, writing the result after each pair, and show it. `about` are keys of the document."""
    path, started, found = options["folder"] / NAME, now(), []
    num_pairs = about["num_pairs"]
    options["folder"].mkdir(parents=True, exist_ok=True)

    def document() -> dict[str, Any]:
        compared = load(f"{OFFLINE}:compare")(found, earlier) if earlier else None
        return {
            "schema": SCHEMA, "started": started, "command": ["meshwright", *sys.argv[1:]],
            "server": options["server"], "server_options": list(options["server_options"]),
            "engine": options["engine"], "engine_options": list(options["engine_options"]),
            "devices": options["devices"], "cores": options["cores"], **about,
            "num_requests": options["num_requests"], "num_warmup": options["num_warmup"], "seed": options["seed"],
            "pairs": [{"name": p.pair.name, **asdict(p)} for p in found], "comparison": compared,
        }  # fmt: skip

    def done(point: Any) -> None:
        found.append(point)
        shown = f"{point.point.output_tokens_per_s:,.1f} output tokens/s"
        say(f"{point.pair.name:>12}  {point.point.refusal or shown}")
        write_atomically(path, json.dumps(jsonable(document()), indent=2, allow_nan=False) + "\n")

    try:
        measure(done=done)
    except KeyboardInterrupt:
        note(f"{len(found)} of {num_pairs} pairs are in {path}")
        raise
    _report(found, document(), options, path)
    if not any(p.point.is_usable for p in found):
        raise InfeasibleError("no pair could be measured", hint=f"errors by kind are in {path}")


def _report(found: list[Any], document: dict[str, Any], options: dict[str, Any], path: Path) -> None:
    report = "meshwright.report.serving_offline"
    page, compared = f"{report}:offline_page", document["comparison"]
    write_html(page, found, comparison=compared, about=document, path=options["html_path"])
    if not emitted_json({"records": path, "page": options["html_path"], **document}):
        print_text_tables(load(f"{report}:tables")(found, document["comparison"]))
        print_line()
        print_line(f"Records: {path}" + (f"; page: {options['html_path']}" if options["html_path"] else ""))
    note(*load(f"{report}:cautions")(found))


def _earlier(path: Path | None) -> dict[str, float]:
    """Measured output tokens/s by pair of another `offline.json`. Raises InputError for another file."""
    if path is None:
        return {}
    try:
        rows = [(p["name"], p["point"]) for p in read_offline(path)["pairs"]]
    except InputError as error:
        raise InputError(f"--against: {error.message}", got=str(path)) from None
    return {name: float(p["output_tokens_per_s"]) for name, p in rows if p["num_ok"] and not p["refusal"]}
