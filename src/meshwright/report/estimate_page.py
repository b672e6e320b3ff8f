"""The page of one run: key figures, time and memory by part, and the sources of the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.answers.cluster import setup_lines
from meshwright.answers.components import bound_by, label, shown_components
from meshwright.answers.provenance import INTERVAL_CONVENTION, InputSource, input_meaning, sources_of
from meshwright.answers.quantities import fit_text, interval_of, percent, rate, seconds, span, value_of
from meshwright.answers.quantities import memory as memory_text
from meshwright.answers.run_estimate import RunEstimate
from meshwright.answers.stages import rank_memory_table, stage_rows, step_timeline
from meshwright.catalog.prices import market_sentence
from meshwright.cost.memory import memory_parts
from meshwright.cost.mfu import MFU_DEFINITION
from meshwright.errors import InputError
from meshwright.report import figures
from meshwright.report.html import (
    Endnotes,
    PageSection,
    document,
    explained_figure,
    paragraph,
    sortable_table,
    table,
    tiles,
)
from meshwright.report.timeline import legend, timeline_svg, windows
from meshwright.runfile import pinned_text
from meshwright.units import format_count, format_seconds, gib
from meshwright.version import __version__

MAX_UNCERTAINTIES = 6


def estimate_page(done: RunEstimate, *, command: str = "") -> str:
    """The whole page of `done`. `command` is the command line that makes it."""
    notes, sources = Endnotes(), sources_of(done.request, done.economics)
    lead = _lead(done, notes, sources)
    size = f"{rate(done.run.tokens_per_step)} tokens a step on {done.request.num_devices} devices."
    try:
        text = pinned_text(done.run, done.plan)
    except InputError:  # a file with aliases cannot be rewritten
        text = done.run.text
    sections = [
        _step(done, notes, sources, command),
        *_timeline(done, command),
        _memory(done, notes, sources, command),
        _uncertainty(done, notes, sources, command),
        _economics(done, notes, sources),
        PageSection(title="The run file, with the plan pinned", parts=[paragraph(size), f"<pre>{escape(text)}</pre>"]),
    ]
    # The notes come last: making the sections above numbers them.
    sections.append(PageSection(title="Sources", parts=[notes.html()]))
    return document(
        title=f"{done.run.name}: {done.request.model.name} on {done.run.cluster_name}",
        lead=lead,
        sections=sections,
        footer=f"Meshwright {__version__}. An estimate, not a measurement. {command}",
    )


def _lead(done: RunEstimate, notes: Endnotes, sources: dict[str, InputSource]) -> str:
    request, step = done.request, done.estimate.step
    text = (
        f"{done.plan.describe()}, {request.precision.name}, {request.global_batch} sequences of "
        f"{request.seq_len} tokens a step, engine {request.engine}. "
        + ("The plan was chosen by the planner." if done.chosen else "The plan is pinned in the run file.")
        + "".join(f" {line[0].upper()}{line[1:]}." for line in setup_lines(request, done.plan))
    )
    rows = [
        (value_of(step.step), "step time", interval_of(step.step)),
        (value_of(step.tokens_per_s_per_device), "tokens/s/device", interval_of(step.tokens_per_s_per_device)),
        (value_of(step.mfu), "MFU", interval_of(step.mfu)),
        (f"{gib(step.memory.reserved_bytes):.1f} GiB", "memory per device", _of_capacity(done)),
    ]
    totals = done.economics.totals
    if totals is not None:
        rows.append((value_of(totals.wall), "time to train", interval_of(totals.wall)))
        rows += [(value_of(e), w, interval_of(e)) for e, w in ((totals.cost, "cost"), (totals.energy, "energy")) if e]
    marks = notes.mark(str(sources["hardware"])) + notes.mark(str(sources["software"]))
    cautions = "".join(paragraph(f"Note: {note}.", css_class="lead") for note in done.notes)
    return paragraph(text, marks=marks, css_class="lead") + tiles(rows) + cautions


def _of_capacity(done: RunEstimate) -> str:
    memory = done.estimate.step.memory
    share = percent(memory.reserved_bytes / memory.capacity_bytes)
    return f"{share} of {gib(memory.capacity_bytes):.1f} GiB; {fit_text(memory)}"


def _step(done: RunEstimate, notes: Endnotes, sources: dict[str, InputSource], command: str) -> PageSection:
    step = done.estimate.step
    whole = step.step.value
    rows = [(label(n), seconds(s), percent(s / whole)) for n, s in shown_components(step.components_s).items()]
    marks = notes.mark(MFU_DEFINITION) + notes.mark(str(sources["fabric"]))
    text = f"{bound_by(step.components_s)[:1].upper()}{bound_by(step.components_s)[1:]} of the step."
    return PageSection(
        title="Where the time goes",
        parts=[
            paragraph(f"{text} Only exposed communication counts: the parts sum to the step.", marks=marks),
            _drawn(
                figures.waterfall_svg(step.components_s), "Step time by component", ("component", "time", "share"),
                rows, command=command, legend=figures.family_legend(step.components_s),
            ),
        ],
    )  # fmt: skip


def _drawn(
    picture: str, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, command: str,
    legend: Sequence[tuple[str, str]] = (), name: str = "", text_columns: Sequence[str] = (),
) -> str:  # fmt: skip
    """A figure with a table of its data, which is called `name`, or as the figure."""
    data = sortable_table(headings, rows, name=name or title, text_columns=text_columns)
    return explained_figure(picture, title=title, data=data, command=command, legend=legend)


def _timeline(done: RunEstimate, command: str) -> list[PageSection]:
    timeline = step_timeline(done.estimate)
    if timeline is None or done.plan.pipeline == 1:
        return []
    parts = len(windows(timeline))
    text = (
        f"{done.plan.pipeline} pipeline ranks, schedule {done.plan.schedule.value}; the ranks wait "
        f"{percent(timeline.bubble_ratio)} of the time."
        + (" Drawn are the beginning and the end; between, the pattern repeats." if parts > 1 else "")
    )
    ranks = [
        (r.name, f"{r.num_layers:g}", seconds(r.forward_s), seconds(r.backward_s), f"{r.in_flight:g}",
         "" if r.waiting_ratio is None else percent(r.waiting_ratio))
        for r in stage_rows(done.request, done.estimate)
    ]  # fmt: skip
    headings = ("rank", "layers", "forward", "backward", "micro-batches kept", "waits")
    picture = _drawn(
        timeline_svg(timeline), "Passes of every pipeline rank", headings, ranks, command=command,
        legend=legend(timeline), name="Pipeline ranks",
    )  # fmt: skip
    return [PageSection(title="Pipeline", parts=[paragraph(text), picture], is_wide=True)]


def _memory(done: RunEstimate, notes: Endnotes, sources: dict[str, InputSource], command: str) -> PageSection:
    memory = done.estimate.step.memory
    rows = [(name, f"{gib(size):.2f}") for name, size in memory_parts(memory).items()]
    rows.append(("reserved", f"{gib(memory.reserved_bytes):.2f}"))
    text = (
        f"Pipeline stage {memory.stage} is the fullest: "
        f"{memory_text(memory.reserved_bytes, memory.capacity_bytes)} per device."
    )
    return PageSection(
        title="Where the memory goes",
        parts=[
            paragraph(text, marks=notes.mark(str(sources["hardware"]))),
            _drawn(
                figures.memory_svg(memory_parts(memory), capacity_bytes=memory.capacity_bytes),
                "Memory of the fullest device", ("part", "GiB"), rows, command=command, name="Memory by part",
                legend=figures.memory_legend(),
            ),
            *_over_time(done, command),
            *_ranks(done, command),
        ],
    )  # fmt: skip


def _over_time(done: RunEstimate, command: str) -> list[str]:
    """The memory of the fullest rank during one step; nothing if its pipeline is too long to simulate."""
    found = done.memory_over_time
    if found is None:
        return []
    title = f"Memory of rank {found.rank} during one step"
    rows = [(name, f"{gib(size):.2f}") for name, size in found.peak.parts_bytes.items()]
    picture, legend = figures.memory_over_time_svg(found), figures.memory_legend()
    drawn = _drawn(picture, title, ("part", "GiB at the peak"), rows, command=command, legend=legend)
    return [paragraph(found.summary()), drawn]


def _ranks(done: RunEstimate, command: str) -> list[str]:
    """The memory of every pipeline rank; nothing without a pipeline."""
    if done.plan.pipeline == 1:
        return []
    shown, picture = rank_memory_table(done.memory_of_ranks), figures.rank_memory_svg(done.memory_of_ranks)
    legend = figures.memory_legend()
    return [_drawn(picture, shown.title, shown.headings, shown.rows, command=command, legend=legend)]


def _uncertainty(done: RunEstimate, notes: Endnotes, sources: dict[str, InputSource], command: str) -> PageSection:
    largest = sorted(done.estimate.uncertainty.items(), key=lambda item: -item[1])[:MAX_UNCERTAINTIES]
    shares = {name.replace("_", " "): share for name, share in largest if share > 0.005}
    meanings = [(name.replace("_", " "), input_meaning(name)) for name, share in largest if share > 0.005]
    step = done.estimate.step.step
    text = (
        f"The step takes {interval_of(step)} in four cases of five (inputs: {step.tier.name.lower()}). "
        "The bars show the share of each input in the width of that interval."
    )
    return PageSection(
        title="How sure this is",
        parts=[
            paragraph(text, marks=notes.mark(INTERVAL_CONVENTION) + notes.mark(str(sources["calibration"]))),
            _drawn(
                figures.shares_svg(shares, title="Share of the variance of the step time by input"),
                "Share of each input in the width of the interval", ("input", "share", "is"),
                [(n, percent(shares[n]), is_) for n, is_ in meanings], command=command, name="Inputs of the interval",
                text_columns=("is",),
            ),
        ],
    )  # fmt: skip


def _economics(done: RunEstimate, notes: Endnotes, sources: dict[str, InputSource]) -> PageSection:
    economics, totals = done.economics, done.economics.totals
    goodput = economics.goodput
    rows: list[tuple[str, str, str]] = [
        ("goodput", percent(goodput.value), span(percent(goodput.low), percent(goodput.high))),
        ("mean time between failures", format_seconds(goodput.mtbf_s), ""),
        ("work between two checkpoints", format_seconds(goodput.interval_s), ""),
    ]
    if economics.joule_per_token is not None:
        rows.append(("energy per million tokens", f"{economics.joule_per_token / 3.6:,.3g} kWh", ""))
    if economics.usd_per_million_tokens is not None:
        rows.append(("cost per million tokens", f"{economics.usd_per_million_tokens:.4g} USD", ""))
    cluster = done.request.cluster  # parts have prices of their own
    if not cluster.is_mixed and (market := market_sentence(cluster.accelerator.name)):
        rows.append(("market prices", market, ""))
    if totals is not None:
        rows.append(("tokens", format_count(totals.num_tokens), ""))
        rows.append(("steps", f"{totals.num_steps:,.0f}", ""))
        named = (("time to train", totals.wall), ("cost", totals.cost), ("energy", totals.energy))
        rows += [(name, value_of(e), interval_of(e)) for name, e in named if e is not None]
    topics = [topic for topic in ("failures", "power", "price") if topic in sources]
    marks = "".join(notes.mark(str(sources[topic])) for topic in topics)
    text = "Failures, checkpoints and restarts take their share of the wall time; the rest is training."
    title, headings = "The whole training", ("", "value", "interval")
    shown = table(headings, rows, name=title, text_columns=headings[2:])
    return PageSection(title=title, parts=[paragraph(text, marks=marks), shown])
