"""`meshwright bench serve`: loads on a server, their rates and latencies, and the best one under a bound."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.catalog import lookup as catalog
from meshwright.cli import output
from meshwright.doctor.checks import Node
from meshwright.doctor.devices import find_devices
from meshwright.doctor.examine import facts
from meshwright.doctor.host import host_at
from meshwright.errors import InfeasibleError, InputError, MissingDependencyError, UnknownNameError
from meshwright.programs import install_command
from meshwright.records.files import free_folder, now
from meshwright.records.serving import Load, RequestStatus, ServingPoint, ServingRecorder, read_requests
from meshwright.targets import load
from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.bench.serving.bench import ServingBenchOutcome, ServingBenchRequest
    from meshwright.bench.serving.endpoint import Endpoint
    from meshwright.bench.serving.summary import LoadSummary


DEFAULT_BOUND_MS = 30.0
BENCH = "meshwright.bench.serving.bench"


def run(**options: Any) -> None:
    """Check the options, measure, record and report."""
    if options["results"]:
        show_results(options)
        return
    if find_spec("aiohttp") is None:
        raise MissingDependencyError(
            "measuring a server needs aiohttp, which is not installed", hint=install_command("serve")
        )
    _check_resume(options)
    options["served_device"] = served_device(options["device"], is_here=options["server"] is not None)
    options["folder"] = options["folder"] or free_folder("bench-serve", mark="serving.csv")
    make_request = load("meshwright.cli.bench_serve_request:request")
    if options["server"] is None:
        if options["server_options"]:
            raise InputError("--server-option needs --server", got=options["server_options"][0])
        measure(make_request(options), options)
        return
    make_request({**options, "model": None}, url="http://127.0.0.1", model="none")  # refuse before it starts
    start = load("meshwright.cli.bench_serve_server:started")
    with start(options, folder=options["folder"]) as server:
        about = load("meshwright.cli.bench_serve_server:document")(server, options)
        request = make_request({**options, "model": None}, url=server.command.url, model=server.command.model)
        measure(replace(request, server_pid=server.pid), options, server=about)


def _check_resume(options: dict[str, Any]) -> None:
    """Refuse a resume that has nothing to go on with."""
    if not options["resume"]:
        return
    if options["folder"] is None:
        raise InputError("--resume needs the folder of the measurement", hint="--out DIR")
    if options["client"] != "meshwright":
        raise InputError("measurements by another client are not resumed", got=options["client"])
    if not (options["folder"] / "serving.json").is_file():
        raise InputError("there is no measurement to resume", got=str(options["folder"]))


def show_results(options: dict[str, Any]) -> None:
    """Show the results of other clients, each value under the definition that it has."""
    if options["address"] or options["url"] or options["server"] or options["html_path"]:
        raise InputError("--from reads results and measures nothing", hint="leave the server and --html out")
    read = load("meshwright.bench.serving.importers:read_results_of")
    found = [result for path in options["results"] for result in read(path)]
    bound_s = (options["itl_ms"] or DEFAULT_BOUND_MS) / 1e3
    if output.emitted_json(load("meshwright.report.serving:results_document")(found, bound_s=bound_s)):
        return
    output.print_text_tables(load("meshwright.report.serving:results_tables")(found, bound_s=bound_s))


def measure(request: ServingBenchRequest, options: dict[str, Any], *, server: dict[str, Any] | None = None) -> None:
    """Measure what `request` asks for, and show it."""
    measure_loads, client = _client(request, options)
    recorder = ServingRecorder(
        options["folder"],
        sidecar=_sidecar(request, server)
        | ({"client": client} if client else {})
        | {"device": options["served_device"]},
        resume=options["resume"],
    )
    if options["resume"]:
        output.note(f"{len(recorder.points)} loads were measured before")
    if fault := request.source.prefix_fault:
        output.note(fault)
    watch = LoadWatch()
    try:
        outcome = measure_loads(request, recorder=recorder, begin=watch.begin, done=watch.end)
    except KeyboardInterrupt:
        output.note(f"{len(recorder.points)} loads are in {recorder.path}, the last one as far as it came")
        raise
    finally:
        recorder.save(ended=now())
    recorder.save(ceilings_chunks_per_s=outcome.ceilings, word_scale=outcome.scale and asdict(outcome.scale))
    _report(request, outcome, recorder, options)


def _client(
    request: ServingBenchRequest, options: dict[str, Any]
) -> tuple[Callable[..., ServingBenchOutcome], dict[str, str] | None]:
    """The function that measures, and the foreign client's name for the records."""
    if options["client"] == "meshwright":
        return load(f"{BENCH}:run_serving"), None
    aiperf = "meshwright.bench.serving.aiperf"
    found = load(f"{aiperf}:check")(request, tokenizer=options["tokenizer_path"], key_variable=options["key_variable"])
    return partial(load(f"{aiperf}:run_aiperf"), client=found), {"name": "aiperf", "version": load(f"{aiperf}:VERSION")}


def _report(
    request: ServingBenchRequest, outcome: ServingBenchOutcome, recorder: ServingRecorder, options: dict[str, Any]
) -> None:
    bound_s = (options["itl_ms"] or DEFAULT_BOUND_MS) / 1e3
    found = outcome.summaries
    page = "meshwright.report.serving:serving_page"
    output.write_html(page, found, sidecar=recorder.sidecar, bound_s=bound_s, path=options["html_path"])
    document = load("meshwright.report.serving:serving_document")(found, bound_s=bound_s)
    search = request.search and asdict(request.search)
    if output.wants_json():
        output.emit_json(
            {
                "records": recorder.path,
                "endpoint": recorder.sidecar["endpoint"],
                "page": options["html_path"],
                "search": search and {**search, "most_in_flight": request.most_in_flight, "concurrency": outcome.found},
                **document,
            }
        )
    else:
        output.print_text_tables(load("meshwright.report.serving:tables")(found, bound_s=bound_s))
        output.print_line()
        if request.search is not None:
            best = f"The highest concurrency under the bounds is {outcome.found}."
            output.print_line("No concurrency is under the bounds." if outcome.found is None else best)
        output.print_line(
            f"Records: {recorder.path}" + (f"; page: {options['html_path']}" if options["html_path"] else "")
        )
    output.note(*load("meshwright.report.serving:cautions")(found))
    refused = _refused_field(found, recorder)
    if refused:
        output.note(f"the server refused a field of requests; the option {refused} may help")
    if not any(summary.usable for summary in found):
        raise InfeasibleError(
            f"no load could be measured: {found[0].refusal if found else 'none was tried'}",
            hint=refused or f"each request and its error is in {recorder.folder}/requests.jsonl",
        )
    if request.search is not None and outcome.found is None:
        raise InfeasibleError("even one request in flight is not under the bounds")


def _refused_field(found: Sequence[LoadSummary], recorder: ServingRecorder) -> str | None:
    """The option that mends a field that the server refused; None where it refused none."""
    if not any(RequestStatus.HTTP_ERROR in s.errors for s in found):
        return None
    hint = load("meshwright.bench.serving.endpoint:field_hint")
    reasons = (one.reason for _, _, one in read_requests(recorder.folder) if one.status is RequestStatus.HTTP_ERROR)
    return next((option for reason in reasons if (option := hint(reason))), None)


def _sidecar(request: ServingBenchRequest, server: dict[str, Any] | None) -> dict[str, Any]:
    endpoint, source = request.endpoint, request.source
    return {
        "endpoint": {
            "url": endpoint.url, "model": endpoint.model, "interface": endpoint.interface,
            "ignore_eos": endpoint.ignore_eos, "extra": dict(endpoint.extra),
            "timeout_s": endpoint.timeout_s, "idle_timeout_s": endpoint.idle_timeout_s, **_changed(endpoint),
        },
        "server": server,
        "client": {"name": "meshwright", "version": __version__, "aiohttp": version("aiohttp")},
        "software": {"python": ".".join(map(str, sys.version_info[:3]))},
        "input_tokens": source.inputs.name, "output_tokens": source.outputs.name, "seed": request.seed,
        "num_prompts_in_file": len(source.rows), "has_tokenizer": source.tokenizer is not None,
        "num_requests": request.num_requests, "num_warmup": request.num_warmup, "ramp_s": request.ramp_s,
        "duration_s": request.duration_s, "repeats": request.repeats,
        "bounds": request.bounds and asdict(request.bounds),
        "command": ["meshwright", *sys.argv[1:]], "started": now(),
    }  # fmt: skip


def _changed(endpoint: Endpoint) -> dict[str, Any]:
    """Options that change requests, without those that are not given, as in records of earlier releases."""
    found = {
        "renamed_fields": dict(endpoint.renamed), "omitted_fields": endpoint.omitted, "retries": endpoint.num_retries
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


class LoadWatch(output.LiveLine):
    """Show on stderr what each load measured."""

    def begin(self, asked: Load, repeat: int) -> None:
        """A load begins."""
        self.draw(f"{asked.name}, repeat {repeat}")

    def end(self, point: ServingPoint) -> None:
        """A load was measured."""
        self.clear()
        output.say(load("meshwright.report.serving:point_line")(point))


# --- the devices behind a server ---


_NAMED = re.compile(r"(?P<name>.+?)(?:-(?P<devices>[1-9]\d*)(?:x(?P<nodes>[1-9]\d*))?)?")
GIVEN, FOUND = "given with --device", "found on the node that started the server"


def served_device(text: str | None, *, is_here: bool) -> dict[str, Any] | None:
    """Accelerator and number of the devices of a server, for its record; None: it is not known.

    `text` is ACCELERATOR, ACCELERATOR-DEVICES or ACCELERATOR-DEVICESxNODES. Without it a server of this node has the
    devices that `doctor` finds here. Their number is known only where there is one.
    Raises InputError or UnknownNameError where `text` names no accelerator.

    >>> found = served_device("h200-8x2", is_here=False)
    >>> found["accelerator"], found["count"]
    ('h200', 16)
    """
    if text is not None:
        return _named(text)
    return _found(Path("/")) if is_here else None


def _named(text: str) -> dict[str, Any]:
    match = _NAMED.fullmatch(text.strip())
    if match is None:
        raise InputError("--device names no device", got=text, allowed="ACCELERATOR-DEVICES, as in h200-8")
    try:
        known = catalog.accelerator(match["name"])
    except UnknownNameError as error:
        raise UnknownNameError("accelerator of --device", match["name"], known=catalog.accelerator_names()) from error
    count = int(match["devices"] or 1) * int(match["nodes"] or 1)
    return {"name": known.name, "accelerator": known.name, "count": count, "source": GIVEN}


def _found(root: Path) -> dict[str, Any] | None:
    host = host_at(root)
    found = find_devices(host).found
    if not found:
        processor = facts(Node(host=host)).get("processor")
        return None if processor is None else {
            "name": processor, "accelerator": None, "count": None, "source": FOUND,
        }  # fmt: skip
    names = {d.name for d in found}
    known = {d.accelerator for d in found}
    return {
        "name": ", ".join(sorted(names)),
        "accelerator": next(iter(known)) if len(known) == 1 else None,
        "count": 1 if len(found) == 1 else None,
        "source": FOUND,
    }
