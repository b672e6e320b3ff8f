"""`meshwright estimate`: step time, memory and timeline of one plan; time, energy and cost of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from meshwright.answers.cluster import setup_lines
from meshwright.answers.components import family, label, shown_components, shown_details
from meshwright.answers.model_memory import ModelMemory
from meshwright.answers.provenance import input_meaning
from meshwright.answers.quantities import fit_text, interval_of, percent, seconds, span, value_of
from meshwright.answers.run_estimate import RunEstimate
from meshwright.answers.stages import after_pipeline, rank_memory_table, stage_rows, step_timeline
from meshwright.answers.trace import write_trace
from meshwright.api.estimate import estimate, estimate_memory
from meshwright.api.question import ask
from meshwright.api.runs import KEYS
from meshwright.catalog.prices import market_sentence
from meshwright.cli import output
from meshwright.cli.run_input import take_run
from meshwright.cost.memory import memory_parts
from meshwright.errors import InputError
from meshwright.planner.training import unknown_price
from meshwright.units import format_count, format_seconds, gib

BAR_WIDTH = 24
"""Characters of the longest bar."""

TABLE_WIDTH = 90
"""Columns of the table of components with bars of that width."""

MAX_UNCERTAINTIES, LEAST_SHARE = 3, 0.01
"""Inputs that are named as the causes of the interval, and the least share of its width of one that is named."""


def run(
    *,
    run_path: Path | None,
    asked: dict[str, Any],
    is_memory: bool,
    csv_path: Path | None,
    overrides: tuple[str, ...],
    trace_path: Path | None,
    html_path: Path | None,
    **keys: Any,
) -> None:
    """Estimate, and write the formats asked for. `keys`: options of keys of the run file.

    `asked` and `csv_path` belong to `is_memory`, which takes no run file.
    """
    if is_memory:
        others = (run_path, *overrides, trace_path, html_path, *keys.values())
        _require_model(asked["model"], given=next((str(value) for value in others if value), None))
        print_model_memory(asked, csv_path=csv_path)
        return
    of_run = _keys_of_run((*asked, "csv_path"))
    if run_path is None and keys["cluster"] is None:
        raise InputError(
            "missing argument RUN.yaml",
            hint="or describe the run: --model, --cluster, --gbs and --seq; --memory --model NAME needs no cluster",
        )
    of_estimate: dict[str, Any] = {"run": run_path, "overrides": overrides}
    run = take_run(of_estimate, **keys, **of_run)
    with output.progress(f"estimating {run.name}"):
        done = ask(estimate, of_estimate)
    if done.chosen is not None:
        output.note(f"the run leaves the plan open; the planner chose {done.plan.describe()}")
    output.note(*done.notes)
    output.write(trace_path, lambda path: _write_trace(done, path))
    output.write_page(done, html_path)
    output.emit(done, _print)


def _require_model(model: str | None, *, given: str | None) -> None:
    """Raise InputError unless --memory has its model and nothing of a run."""
    if given is not None:
        raise InputError(
            "--memory takes no run", got=given, hint="a run's own memory is in `meshwright estimate RUN.yaml`"
        )
    if model is None:
        raise InputError("--memory needs a model", hint="name one, as in --model llama3.1-8b")


def _keys_of_run(of_memory: Sequence[str]) -> dict[str, Any]:
    """The options of --memory that are keys of a run, too. Raises InputError for its others and for several values."""
    context, found = click.get_current_context(), {}
    for option in context.command.params:
        name = option.name or ""
        if name not in of_memory or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if name not in KEYS:
            raise InputError(
                f"{option.opts[0]} belongs to --memory", hint="add --memory, or change the run with --set KEY=VALUE"
            )
        given = context.params[name]
        first, *more = given if isinstance(given, tuple) else (given,)
        if more:
            got = ",".join(map(str, given))
            raise InputError(option.opts[0], got=got, allowed="one value", hint="--memory takes several")
        found[name] = first
    return found


def _write_trace(done: RunEstimate, path: Path) -> None:
    timeline = step_timeline(done.estimate)
    if timeline is None:
        num_micro = done.plan.num_micro_batches(done.request.global_batch)
        raise InputError(
            "this step has too many operations for a trace",
            got=f"{done.plan.describe()} with {num_micro} micro-batches",
            hint="a smaller batch shows the same pattern: --set batch.global_sequences=N",
        )
    details = {
        "run": done.run.name, "model": done.request.model.name, "cluster": done.run.cluster_name,
        "plan": done.plan.describe(),
    }  # fmt: skip
    write_trace(timeline, path=path, tracks=after_pipeline(done.estimate), details=details)


# --- tables ---


def _print(done: RunEstimate) -> None:
    request = done.request
    output.print_line(f"{request.model.name} on {done.run.cluster_name}: {done.plan.describe()}", style="bold")
    num_micro = done.plan.num_micro_batches(request.global_batch)
    output.print_line(
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens, {request.precision.name}, engine "
        f"{request.engine}, {num_micro} {'micro-batch' if num_micro == 1 else 'micro-batches'} a step"
    )
    for line in setup_lines(request, done.plan):
        output.print_line(line)
    output.print_line()
    _print_headline(done)
    _print_components(done)
    _print_memory(done)
    if done.plan.pipeline > 1:
        output.print_text_tables([rank_memory_table(done.memory_of_ranks)])
        output.print_line()
    _print_stages(done)
    _print_training(done)


def _print_headline(done: RunEstimate) -> None:
    step = done.estimate.step
    rows = [
        ("step", value_of(step.step), interval_of(step.step)),
        ("tokens/s/device", value_of(step.tokens_per_s_per_device), interval_of(step.tokens_per_s_per_device)),
        ("MFU (causal attention, dense peak)", value_of(step.mfu), interval_of(step.mfu)),
    ]
    output.print_table({"": "left", "estimate": "right", "80 % interval": "right"}, rows)
    largest = sorted(done.estimate.uncertainty.items(), key=lambda item: -item[1])[:MAX_UNCERTAINTIES]
    causes = "; ".join(f"{100 * share:.0f} % {input_meaning(name)}" for name, share in largest if share >= LEAST_SHARE)
    output.print_line(f"Causes of the interval's width: {causes} (inputs: {step.step.tier.name.lower()}).")
    output.print_line()


def _print_components(done: RunEstimate) -> None:
    components = shown_components(done.estimate.step.components_s)
    total, largest = done.estimate.step.step.value, max(components.values())
    widest = output.bar_width(BAR_WIDTH, table=TABLE_WIDTH)
    rows = []
    for n, s in components.items():
        bar = "█" * round(widest * s / largest)
        rows.append((label(n), family(n).value, seconds(s), percent(s / total), bar))
        names = shown_details(done.estimate.step.details_s.get(n, {}), total=total)
        rows += [(f"  {name}", "", seconds(part), percent(part / total), "") for name, part in names.items()]
    output.print_table({"component": "left", "is": "left", "time": "right", "share": "right", "": "left"}, rows)
    output.print_line()


def _print_memory(done: RunEstimate) -> None:
    memory = done.estimate.step.memory
    parts = memory_parts(memory)
    rows = []
    for part, size in parts.items():
        rows.append((part, f"{gib(size):.1f}", _bar(size / memory.capacity_bytes)))
        names = shown_details(memory.details_bytes.get(part, {}), total=memory.reserved_bytes)
        rows += [(f"  {name}", f"{gib(some):.1f}", "") for name, some in names.items()]
    rows.append(("reserved", f"{gib(memory.reserved_bytes):.1f}", _bar(memory.reserved_bytes / memory.capacity_bytes)))
    rows.append(("capacity", f"{gib(memory.capacity_bytes):.1f}", _bar(1.0)))
    output.print_table({f"memory of stage {memory.stage}": "left", "GiB": "right", "": "left"}, rows)
    output.print_line(f"The plan {fit_text(memory)}.")
    if done.memory_over_time is not None:
        output.print_line(done.memory_over_time.summary())
    output.print_line()


def _bar(ratio: float) -> str:
    return "█" * round(BAR_WIDTH * ratio)


def _print_stages(done: RunEstimate) -> None:
    stages = stage_rows(done.request, done.estimate)
    if len(stages) == 1:
        return
    rows = [
        (
            s.name, f"{s.num_layers:g}", seconds(s.forward_s), seconds(s.backward_s), f"{s.in_flight:g}",
            "" if s.waiting_ratio is None else percent(s.waiting_ratio),
        )
        for s in stages
    ]  # fmt: skip
    output.print_table(
        {
            "pipeline rank": "left", "layers": "right", "forward": "right", "backward": "right",
            "micro-batches kept": "right", "waits": "right",
        },
        rows,
    )  # fmt: skip
    output.print_line()


def _print_training(done: RunEstimate) -> None:
    economics, goodput = done.economics, done.economics.goodput
    rows = [
        ("goodput with failures", percent(goodput.value), span(percent(goodput.low), percent(goodput.high))),
        ("mean time between failures", format_seconds(goodput.mtbf_s), ""),
    ]
    if economics.usd_per_million_tokens is not None:
        price = f"at {economics.usd_per_device_hour:g} USD per device-hour"
        if economics.price is not None:
            price += f", {economics.price.offer.partition(':')[0]}, {economics.price.date}"
        rows.append(("cost per million tokens", f"{economics.usd_per_million_tokens:.4g} USD", price))
    cluster = done.request.cluster  # parts have prices of their own
    if economics.usd_per_million_tokens is None:
        rows.append(("price of a device-hour", "", unknown_price(cluster)))
    if not cluster.is_mixed and (market := market_sentence(cluster.accelerator.name)):
        rows.append(("market prices", "", market))
    if economics.joule_per_token is not None:
        rows.append(("energy per million tokens", f"{economics.joule_per_token / 3.6:.3g} kWh", "at the facility"))
    totals = economics.totals
    if totals is not None:
        rows.append(("tokens to train", format_count(totals.num_tokens), f"{totals.num_steps:,.0f} steps"))
        named = (("time to train", totals.wall), ("cost", totals.cost), ("energy", totals.energy))
        rows += [(name, value_of(e), interval_of(e)) for name, e in named if e is not None]
    output.print_table({"whole training": "left", "": "right", " ": "left"}, rows)


# --- --memory ---


def print_model_memory(asked: Mapping[str, Any], *, csv_path: Path | None) -> None:
    """Ask `estimate_memory`, and write the formats asked for."""
    found = ask(estimate_memory, asked)
    output.note(*found.notes)
    output.write(csv_path, found.write_csv)
    output.emit(found, _print_model)


def _print_model(found: ModelMemory) -> None:
    """Print the required memory of a device in GiB. A choice that all rows share has no column."""
    choices = {
        "precision": [row.precision for row in found.rows],
        "trains": [f"LoRA {row.lora_rank}" if row.lora_rank else "all" for row in found.rows],
        "optimizer": [row.optimizer for row in found.rows],
        "shares": [row.sharding.name.lower() for row in found.rows],
        "sequence": [f"{row.sequence_length:,}" for row in found.rows],
        "micro-batch": [str(row.micro_batch) for row in found.rows],
    }
    alike = {name: values[0] for name, values in choices.items() if len(set(values)) == 1}
    sizes = {
        **{
            _HEADINGS.get(part, part): [row.parts_bytes[part] for row in found.rows]
            for part in found.rows[0].parts_bytes
        },
        "total": [row.total_bytes for row in found.rows],
        "host": [row.host_bytes for row in found.rows],
    }
    if not any(sizes["host"]):
        del sizes["host"]
    columns: dict[str, output.Align] = {name: "left" for name in choices if name not in alike}
    columns |= dict.fromkeys(sizes, "right")
    cells = [values for name, values in choices.items() if name not in alike]
    cells += [[f"{gib(size):,.2f}" for size in values] for values in sizes.values()]
    output.print_line(found.summary(), style="bold")
    output.print_line("GiB of each device; " + ", ".join(f"{name} {value}" for name, value in alike.items()))
    output.print_line()
    output.print_table(columns, zip(*cells, strict=True))


_HEADINGS = {"weights": "parameters", "optimizer": "states", "beside the allocator": "beside"}
"""Headings of the parts that have another name in the table."""
