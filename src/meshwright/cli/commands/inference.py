"""`meshwright inference`: a group of commands; each projects serving or offline inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.answers.text_table import TextTable
from meshwright.api import inference as api
from meshwright.api.inference import HARDWARE
from meshwright.api.question import ask
from meshwright.cli import output
from meshwright.cli.options import AmountRange, CountRange, file_option, folder_option, html_option
from meshwright.cli.question import options_from
from meshwright.cli.verbs import verb, verb_group
from meshwright.units import gib

if TYPE_CHECKING:
    from meshwright.answers.serving_accuracy import ServingAccuracy
    from meshwright.answers.serving_calibration import ServingCalibrationResult
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.serving_plan import ServingPlan

SHOWN_LAYOUTS, SHOWN, EXPLAINED = 8, 5, 20


@verb("inference capacity", question="meshwright.api.inference:inference_capacity")
def capacity(*, asked: dict[str, Any]) -> None:
    """Compute the sessions and tokens that fit into memory.

    Counts weights with the scales of their format, the KV cache (grouped heads, latents, sliding windows), activations
    of one step and what an engine reserves. Without degrees, the layout that holds most tokens is found.

    Exits with 1 if not one session of this length fits.
    """
    found = ask(api.inference_capacity, asked)
    output.emit(found, _print_capacity)
    output.exit_unless(found.fits)


MAX_DRAFTED = 64
MS = AmountRange(1e9)
TTFT = click.option("--ttft", "ttft_ms", type=MS, metavar="MS", help="Longest time to first token, in ms.")
ITL = click.option("--itl", "itl_ms", type=MS, metavar="MS", help="Longest inter-token latency, in ms.")


@verb("inference estimate", question="meshwright.api.inference:inference_estimate", without=("ttft_s", "itl_s"))
@options_from("meshwright.api.report:report_records", without=("items", "usd_per_device_hour"))
@click.option(
    "--drafted", type=CountRange(0, MAX_DRAFTED), default=0, metavar="N",
    help="Speculative decoding: drafted tokens per step.",
)  # fmt: skip
@click.option(
    "--draft", metavar="MODEL",
    help="Model that drafts, on the same devices.  [default: the model's own prediction module, if it has one]",
)  # fmt: skip
@click.option(
    "--accepted", type=AmountRange(MAX_DRAFTED), metavar="X", help="Drafted tokens accepted per step, on average.",
)  # fmt: skip
@TTFT
@ITL
@html_option
def estimate(
    *, asked: dict[str, Any], drafted: int, draft: str | None, accepted: float | None,
    ttft_ms: float | None, itl_ms: float | None, html_path: Path | None, **prices: Any,
) -> None:  # fmt: skip
    """Estimate latencies, rates, memory and price of a server.

    \b
    TTFT   time to first token
    ITL    (end-to-end - TTFT) / (output tokens - 1): the mean over a request, also called TPOT
    total  prompt and output tokens per second

    Chunked prefill: prompts share the decode steps of other requests. Without degrees, one replica takes a whole node.

    With --rate, requests are simulated as they arrive: mean, p50, p95 and p99 of each latency, the share of requests
    within --ttft and --itl (goodput), and the highest rate that keeps these bounds.
    """
    asked |= {"ttft_s": ttft_ms and ttft_ms / 1e3, "itl_s": itl_ms and itl_ms / 1e3}
    found = ask(api.inference_estimate, asked, prices=prices, drafted=drafted, draft=draft, accepted=accepted or 0.0)
    output.write_page(found, html_path)
    if output.emitted_json(found):
        return
    of = found.server.of
    output.print_line(
        f"{of.model.name} in {of.weights.name}, {of.cache.name} cache, on {of.cluster.name}: {of.layout.describe()}, "
        f"{found.server.engine.name}, {asked['input_tokens']:,} prompt tokens, "
        f"{asked['output_tokens']:,} answer tokens"
    )
    output.print_hardware(of.cluster)
    output.print_text_tables(found.tables())
    if found.price is not None:
        output.note(f"{found.price.total_usd_per_device_hour:.4g} USD per device-hour: {found.price.source}")
    output.note(*found.notes)


@verb("inference plan", question="meshwright.api.inference:inference_plan", without=("ttft_s", "itl_s"))
@options_from("meshwright.api.report:report_records", without=("items", "usd_per_device_hour"))
@TTFT
@ITL
@click.option("--explain", is_flag=True, help="For each layout: its best load, and what stops it.")
@click.option("--pareto", is_flag=True, help="Print throughput per device against interactivity.")
@html_option
@folder_option("--write", "folder", help="Write what starts the servers: a script, a Kubernetes manifest, a page.")
def plan(
    *, asked: dict[str, Any], ttft_ms: float | None, itl_ms: float | None, explain: bool, pareto: bool,
    html_path: Path | None, folder: Path | None, **prices: Any,
) -> None:  # fmt: skip
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

    Costs every layout of the cluster at every load: tensor, expert and attention-data parallelism, replicas, pipeline
    stages over nodes. With --rate, the layout with fewest devices that serves it wins: the cheapest, and the one that
    needs least energy.

    --write DIR has the servers of the first layout start with the degrees, formats, lengths and requests in flight that
    were costed: sh DIR/start.sh NODE on each node, or kubectl apply -f DIR/kubernetes.yaml.

    Exits with 1 if no layout keeps the bounds.
    """
    asked |= {"ttft_s": ttft_ms and ttft_ms / 1e3, "itl_s": itl_ms and itl_ms / 1e3}
    found = ask(api.inference_plan, asked, prices=prices)
    left = () if folder is None else found.write(folder)
    output.write_page(found, html_path)
    if output.emitted_json(found):
        return
    output.print_line(found.summary(), style="bold")
    output.print_hardware(found.question.cluster)
    output.print_line()
    tables = [found.layout_table(EXPLAINED if explain else SHOWN)]
    tables += [] if (arrivals := found.arrival_table()) is None else [arrivals]
    output.print_text_tables([*tables, found.front_table()] if pareto else tables)
    _print_price(found)
    output.note(*found.notes, *left)


@verb("inference calibrate", question="meshwright.api.inference:inference_calibrate")
@file_option("--out", help="Calibration file to write.  [default: ENGINE-ACCELERATOR.json]")
def calibrate(*, asked: dict[str, Any], out: Path | None) -> None:
    """Fit the constants of one server to records of `meshwright bench serve`.

    RECORDS are folders of closed loops on one kind of server: other models, lengths and loads are predicted best from
    several of each. Equal loads of several folders are repeats. `estimate`, `plan` and `accuracy` read the file with
    --calibration.

    The error of each quantity is printed twice: fitted, and held out, where each model with its lengths is predicted
    from the others.
    """
    found = ask(api.inference_calibrate, asked)
    target = out or Path(f"{found.calibration.engine.name}-{found.calibration.accelerator}.json")
    output.write_document(found.to_dict(), target)
    if output.emitted_json({"calibration": target, **found.to_dict()}):
        return
    _print_calibration(found)
    output.note(f"wrote {target}")


GROUPS = ("source", "accelerator", "engine", "model", "precision", "metric", "evidence")


@verb("inference accuracy", question="meshwright.api.inference:inference_accuracy")
@options_from("meshwright.api.inference:inference_calibrate", without=("records", "cluster", *HARDWARE))
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every point.")
def accuracy(*, asked: dict[str, Any], by: str, show_rows: bool, **served: str | None) -> None:
    """Predict published inference points and report the errors.

    Rates are tokens/s of all devices; latencies are seconds. Points that say too little are counted with the reason.

    The constants were fitted to the shipped points. --leave-one-source-out gives the error on sources that they have
    not seen. Records of a server of yours are points too: output tokens/s, mean TTFT and mean time per output token of
    every usable load.
    """
    found = ask(api.inference_accuracy, asked, **served)
    for reason, count in found.unused_loads.items():
        output.note(f"{count} loads {reason} are not used")
    if output.emitted_json(found):
        return
    tables = found.tables(by)
    output.print_text_tables([_rows(found), *tables] if show_rows else tables)
    output.print_line()
    output.print_line(found.summary())


def _print_capacity(found: ServingCapacity) -> None:
    document, device = found.to_dict(), found.best.device
    output.print_line(found.summary(), style="bold")
    output.print_hardware(found.question.cluster)
    output.print_line()
    output.print_table(
        {"of a device": "left", "GiB": "right"},
        [
            ("memory", f"{gib(device.total):.1f}"),
            ("usable", f"{gib(device.usable):.1f}"),
            (f"weights, {document['precision']}", f"{gib(device.weights):.1f}"),
            ("activations of a step", f"{gib(device.activations):.1f}"),
            ("workspaces, context, communicators", f"{gib(device.workspace + device.communicators):.1f}"),
            (f"left for the {document['kv_precision']} cache", f"{gib(device.cache):.1f}"),
        ],
    )
    output.print_line()
    if len(found.layouts) > 1:
        output.print_table(
            {"layout": "left", "sessions": "right", "tokens": "right", "copies of the cache": "right"},
            (
                (c.layout.describe(), f"{c.max_sessions:,}", f"{c.max_tokens:,}", f"{c.cache_copies:g}")
                for c in found.layouts[:SHOWN_LAYOUTS]
            ),
        )
        output.print_line()
    output.note(*found.notes)


def _print_price(found: ServingPlan) -> None:
    price = found.token_price
    if price is None:
        output.note("no price is known for this accelerator; --price or --capital gives one")
        return
    output.print_line()
    output.print_line(
        f"{price.usd_per_million_output:.3g} USD per million output tokens, {price.usd_per_million_total:.3g} per "
        f"million of all; by device time {price.usd_per_million_input_share:.3g} per million prompt tokens and "
        f"{price.usd_per_million_output_share:.3g} per million answer tokens"
    )
    output.note(f"{price.hour.total_usd_per_device_hour:.4g} USD per device-hour: {price.hour.source}")


def _print_calibration(found: ServingCalibrationResult) -> None:
    output.print_line(found.summary(), style="bold")
    output.print_line()
    output.print_text_tables(found.tables())
    for reason, count in found.calibration.unused.items():
        output.note(f"{count} loads {reason} are not used")


def _rows(found: ServingAccuracy) -> TextTable:
    rows = []
    for row in found.rows:
        groups = row.point.groups
        about = (row.point.id, groups["model"], groups["accelerator"], groups["engine"])
        if row.point.conditions is None:
            rows.append((*about, "", "", "", "", "", row.point.reason.value if row.point.reason else ""))
            continue
        conditions = row.point.conditions
        layout = conditions.served.layout.describe()
        load = conditions.load
        lengths = f"{load.input_tokens}/{load.output_tokens}"
        in_flight = "full" if load.concurrency is None else f"{load.concurrency:g}"
        rows.append(
            (*about, layout, lengths, in_flight, f"{row.measured:.4g}",
             f"{row.predicted:.4g} ({row.low:.4g} to {row.high:.4g})", f"{100 * row.signed_error:+.0f} %")
        )  # fmt: skip
    headings = (
        "point", "model", "device", "engine", "layout", "lengths", "in flight", "measured", "predicted", "error"
    )  # fmt: skip
    return TextTable(title="", headings=headings, rows=rows, text_columns=("model", "device", "engine", "layout"))


command = verb_group(
    "inference",
    about="""Project serving and offline inference: memory, rates, layouts, price.

Nothing is run, and no tensor framework is needed. `capacity` is arithmetic; the others state an interval.""",
    verbs={"What to project": [capacity, estimate, plan, calibrate, accuracy]},
)
