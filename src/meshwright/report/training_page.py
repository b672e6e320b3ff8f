"""The page of one training: measured and predicted quantities, the course of the training, time and memory.

training_page(read_training(folder)) -> text
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from meshwright.accuracy.rows import PublishedRun
from meshwright.answers.provenance import INTERVAL_CONVENTION
from meshwright.answers.quantities import FORMATS, interval_of, percent, rate, seconds, value_of
from meshwright.answers.training_run import MeasuredQuantity, TrainingRun
from meshwright.catalog import lookup as catalog
from meshwright.errors import UnknownNameError
from meshwright.report import training_figures as figures
from meshwright.report.charts import GREEN, PURPLE
from meshwright.report.figures import family_legend, shares_svg, waterfall_svg
from meshwright.report.html import Endnotes, PageSection, document, figure, paragraph, table, tiles
from meshwright.units import GIB, format_bytes, format_count, format_duration, gib
from meshwright.version import __version__

MAX_PUBLISHED, MAX_RANKS, MAX_KERNELS = 12, 16, 12
ENDINGS = {
    "done": "All steps were taken.",
    "target": "The target loss was reached.",
    "stopped": "It was stopped by a signal.",
    "diverged": "It ended because a step's numbers could not be right.",
}


def training_page(done: TrainingRun) -> str:
    """The whole page of `done`."""
    notes = Endnotes()
    lead = _lead(done)
    sections = [
        *_quantities(done, notes),
        *([_loss(done), *_rewards(done), _speed(done), _gradients(done)] if done.steps else []),
        _memory(done),
        *_time(done, notes),
        *_published(done, notes),
        *_events(done),
        *_sample(done),
        *_completions(done),
        *_kernels(done),
        _conditions(done),
    ]
    footnotes = notes.html()
    if "<li" in footnotes:
        sections.append(PageSection(title="Definitions and sources", parts=[footnotes]))
    device = done.record["device"]
    return document(
        title=f"{done.run['name']}: {done.run['model']['name']} on {done.statistics['num_devices']} × {device['name']}",
        lead=lead,
        sections=sections,
        footer=f"Meshwright {__version__}. Measured on {done.record['started'][:10]}.",
    )


def _sequences(statistics: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Sequences of a step: as many in each, or the range of steps of as many labels."""
    spread = (statistics.get("label_tokens") or {}).get("sequences")
    if not spread or not spread["n"]:
        return f"{run['global_batch']:,}"
    return f"{spread['low']:,.0f} to {spread['high']:,.0f}"


def _lead(done: TrainingRun) -> str:
    s, record = done.statistics, done.record
    run = done.run
    text = (
        f"{format_count(s['parameters'])} parameters, {run['precision']['name']}, {run['plan_in_words']}, "
        f"{s['steps']:,} steps of {_sequences(s, run)} sequences of {run['sequence_length']:,} tokens; "
        f"{format_duration(record['time_s']['total'])} in all. {ENDINGS[record['ending']]}"
    )
    rows = []
    if target := s.get("target"):
        about = f"step {target['steps']:,}, loss {target['loss']:g}"
        rows.append((format_duration(target["seconds"]), "to the target loss", about))
    if s["last_loss"] is not None:
        held = "" if s["validation_loss"] is None else f", validation {s['validation_loss']:.3f}"
        if several := s.get("validation_losses"):
            held += f" ({', '.join(f'{name} {loss:.3f}' for name, loss in several.items())})"
        rows.append((f"{s['last_loss']:.3f}", "loss", f"from {s['first_loss']:.3f}{held}"))
    for row in done.measured_quantities():
        about = (
            "not predicted" if row.predicted is None else f"predicted {quantity_text(row.predicted.value, row.unit)}"
        )
        rows.append((quantity_text(row.measured, row.unit), _tile(row), about))
    cautions = "".join(paragraph(f"Note: {note}.", css_class="lead") for note in record["notes"])
    return paragraph(text, css_class="lead") + tiles(rows) + cautions


def _tile(row: MeasuredQuantity) -> str:
    return "step time, median" if row.unit == "s" else row.name


def quantity_text(value: float, unit: str) -> str:
    """A measured value in the unit that a reader expects."""
    return seconds(value) if unit == "s" else FORMATS[unit](value)


def _quantities(done: TrainingRun, notes: Endnotes) -> list[PageSection]:
    rows = done.measured_quantities()
    known = [row for row in rows if row.predicted is not None]
    if not known:
        return []
    inside = [row for row in known if row.is_inside is not None]
    text = "Measured values over the planner's predictions before the first step. " + _verdict(inside)
    cells = []
    for row in rows:
        p = row.predicted
        has_interval = p is not None and p.low < p.high
        spread = (
            f"{quantity_text(row.measured_low, row.unit)} to {quantity_text(row.measured_high, row.unit)}"
            if row.measured_low is not None and row.measured_high is not None
            else ""
        )
        cells.append(
            (
                row.name, quantity_text(row.measured, row.unit), spread,
                "not predicted" if p is None else value_of(p),
                interval_of(p) if p is not None and has_interval else "",
                "" if row.ratio is None else f"{row.ratio:.2f}",
            )
        )  # fmt: skip
    n = done.statistics["step_s"]["n"]
    headings = ("", f"measured, median of {n:,}", "all steps", "predicted", "80 % interval", "ratio")
    marks = notes.mark(INTERVAL_CONVENTION) + notes.mark(f"MFU: {done.statistics['mfu_convention']}")
    return [
        PageSection(
            title="Predicted and measured",
            parts=[
                paragraph(text, marks=marks),
                figure(figures.ratio_svg(rows), legend=figures.ratio_legend(rows)),
                table(headings, cells, name="Predicted and measured"),
            ],
        )
    ]


def _verdict(inside: Sequence[MeasuredQuantity]) -> str:
    """Step time, rate and MFU are one measurement, so the verdict looks at the step."""
    step = next((row for row in inside if row.unit == "s"), None)
    if step is None or step.predicted is None:
        return ""
    if step.is_inside:
        return "The step time lies inside the interval."
    how = "slower" if step.measured > step.predicted.high else "faster"
    return f"The step was {how} than the interval allows."


def _loss(done: TrainingRun) -> PageSection:
    # The validation loss of completions is their reward with a minus sign.
    steps = [{**s, "validation_loss": None} if "mean" in s.get("rewards", ()) else s for s in done.steps]
    return PageSection(title="Loss", parts=[figure(figures.loss_svg(steps), legend=_loss_legend(steps))])


def _loss_legend(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    has_validation = any(s.get("validation_loss") is not None for s in steps)
    return [(n, c) for n, c in figures.LOSS_LEGEND.items() if has_validation or n == "training"]


def _rewards(done: TrainingRun) -> list[PageSection]:
    """Mean reward of completions, or the margin of pairs of answers, as a loss is shown."""
    sections = []
    for key, title in (("mean", "reward of a completion, mean"), ("margin", "margin of the rewards of a pair, mean")):
        steps = [
            {"step": s["step"], "loss": s["rewards"][key], "validation_loss": s.get("validation_rewards", {}).get(key)}
            for s in done.steps
            if key in s.get("rewards", ())
        ]
        if steps:
            shown = figure(figures.loss_svg(steps, title=title), legend=_loss_legend(steps))
            sections.append(PageSection(title="Rewards", parts=[shown]))
    return sections


def _speed(done: TrainingRun) -> PageSection:
    predicted = next((row.predicted for row in done.measured_quantities() if row.unit == "s"), None)
    s = done.statistics["step_s"]
    text = ""
    if s["n"]:
        text = (
            f"Median of {s['n']:,} steps {seconds(s['median'])}, from {seconds(s['low'])} to {seconds(s['high'])}; "
            "steps that warm up or run under the profiler do not count."
        )
    parts = [
        paragraph(text),
        figure(
            figures.step_time_svg(done.steps, predicted=predicted),
            legend=figures.step_legend(done.steps, has_prediction=predicted is not None),
        ),
        figure(figures.line_svg(done.steps, "tokens_per_s_per_device", title="tokens/s/device")),
    ]
    return PageSection(title="Speed", parts=parts)


def _gradients(done: TrainingRun) -> PageSection:
    clip = done.run["optimizer"]["gradient_clip"]
    text = "Norm of all gradients before clipping" + (f" at {clip:g}." if clip is not None else "; not clipped.")
    norms = figures.line_svg(done.steps, "gradient_norm", title="gradient norm", color=GREEN, is_logarithmic=True)
    rates = figures.line_svg(done.steps, "learning_rate", title="learning rate", color=PURPLE)
    return PageSection(title="Gradient norm and learning rate", parts=[paragraph(text), figure(norms), figure(rates)])


def _memory(done: TrainingRun) -> PageSection:
    s, device, ranks = done.statistics, done.record["device"], done.record["ranks"]
    what = "allocated on the device" if device["type"] == "cuda" else "resident in the machine's memory"
    text = (
        f"The fullest process held {format_bytes(s['peak_memory_bytes'])} {what}, "
        f"{percent(s['peak_memory_bytes'] / device['memory_bytes'])} of {gib(device['memory_bytes']):.1f} GiB."
    )
    parts = [paragraph(text)]
    if done.steps:
        parts.append(figure(figures.line_svg(done.steps, "memory_bytes", title="GiB so far", factor=1 / GIB)))
    if s["num_devices"] > 1:
        parts.append(_ranks(ranks))
    return PageSection(title="Memory" if s["num_devices"] == 1 else "Memory, and each process", parts=parts)


def _ranks(ranks: Mapping[str, Any]) -> str:
    rows = [
        (rank, "" if step_s is None else seconds(step_s), format_bytes(size))
        for rank, (step_s, size) in enumerate(zip(ranks["step_s"], ranks["peak_memory_bytes"], strict=True))
    ]
    num_hidden = len(rows) - MAX_RANKS
    ratio = ranks["straggler_ratio"]
    text = "" if ratio is None else f"The slowest process takes {ratio:.3f} times the median step. "
    if num_hidden > 0:  # the slowest ones are those to look at
        rows = sorted(rows, key=lambda row: -(ranks["step_s"][row[0]] or 0))[:MAX_RANKS]
        text += f"The {MAX_RANKS} slowest of {num_hidden + MAX_RANKS}:"
    return paragraph(text) + table(("process", "step, median", "peak memory"), rows, name="Processes")


def _time(done: TrainingRun, notes: Endnotes) -> list[PageSection]:
    time_s = dict(done.record["time_s"])
    total_s = time_s.pop("total")
    phases = {name.replace("_", "-"): s / total_s for name, s in time_s.items() if s > 0}
    labels = {n: f"{format_duration(share * total_s)}, {percent(share)}" for n, share in phases.items()}
    parts = [
        paragraph(f"Each second from the command's start, {format_duration(total_s)} in all, in one phase."),
        figure(shares_svg(phases, title="Share of the wall time by phase", labels=labels)),
    ]
    sections = [PageSection(title="Where the wall time went", parts=parts)]
    if done.record["profile"]:
        sections.append(_profile(done.record["profile"], notes))
    predicted = done.record["predicted"]
    if predicted:
        sections.append(_components(predicted["components_s"]))
    return sections


def _profile(profile: Mapping[str, Any], notes: Endnotes) -> PageSection:
    steps = profile["steps"]
    step_s = profile["window_s"] / len(steps)
    shares = {name: share for name, share in profile["shares"].items() if share > 0}
    times = {name: f"{seconds(share * step_s)}, {percent(share)}" for name, share in shares.items()}
    kernels = [
        (k["name"] if len(k["name"]) < 90 else f"{k['name'][:87]}...", k["category"],
         f"{k['calls'] / len(steps):,.0f}", seconds(k["seconds"] / len(steps)))
        for k in profile["kernels"][:MAX_KERNELS]
    ]  # fmt: skip
    mark = notes.mark(
        "time by kind of kernel: each instant counts once, for the first of GEMM, attention, elementwise (norms, "
        "softmax and copies too), optimizer, communication and other that is at work on any stream or thread; idle "
        "is where none is. Kernels are identified by their names; on a CPU, operators are"
    )
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    text = f"Measured under the profiler in {span}, {seconds(step_s)} each: the profiler slows the step."
    busy_s, exposed_s = (profile["communication"][key] for key in ("busy_s", "exposed_s"))
    if busy_s:
        text += f" {percent(1 - exposed_s / busy_s)} of the communication is hidden behind computation."
    parts = [
        paragraph(text, marks=mark),
        figure(shares_svg(shares, title="Share of a step by kind of kernel", labels=times)),
        table(
            ("kernel", "kind", "calls a step", "own time a step"),
            kernels,
            name="Largest kernels",
            text_columns=("kind",),
        ),
    ]
    if profile["unknown"]:
        names = ", ".join(k["name"] for k in profile["unknown"])
        parts.append(paragraph(f"Names that the table of kernels does not know, counted as other: {names}."))
    return PageSection(title="Where a step's time went", parts=parts)


def _components(components_s: Mapping[str, float]) -> PageSection:
    whole = sum(components_s.values())
    text = f"The planner predicted {seconds(whole)} for a step; the parts add up to it."
    return PageSection(
        title="Where the planner expected it to go",
        parts=[paragraph(text), figure(waterfall_svg(components_s), legend=family_legend(components_s))],
    )


def _published(done: TrainingRun, notes: Endnotes) -> list[PageSection]:
    found = done.published()
    mine = done.statistics["tokens_per_s_per_device"]
    if not found or not mine:
        return []
    text = (
        f"{len(found)} published runs of {done.run['model']['name']} have stated conditions; those on the same "
        f"accelerator and in the same format come first. Conditions differ: compare with care. This run: {rate(mine)} "
        f"tokens/s/device at {done.run['sequence_length']:,} tokens in {done.run['precision']['name']}."
    )
    headings = (
        "accelerator", "devices", "sequence", "precision", "plan", "date", "tokens/s/device", "this run over it",
    )  # fmt: skip
    cells = "".join(f"<th scope=col{' class=text' if h == 'plan' else ''}>{escape(h)}</th>" for h in headings)
    body = "".join(_published_row(run, mine, notes) for run in found[:MAX_PUBLISHED])
    shown = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return [PageSection(title="Compared with published results", parts=[paragraph(text), shown])]


def _published_row(run: PublishedRun, mine: float, notes: Endnotes) -> str:
    c, theirs = run.conditions, run.tokens_per_s_per_device
    assert c is not None  # `TrainingRun.published` lists no others
    assert theirs is not None
    plan = f"<td class=text>{escape(c.plan.describe())}{notes.mark(run.source)}</td>"
    before = (c.accelerator.name, c.num_devices, f"{c.seq_len:,}", c.precision)
    after = (run.date[:7], rate(theirs), f"{mine / theirs:.2f}")
    cells = [f"<td>{escape(str(cell))}</td>" for cell in before]
    return f"<tr>{''.join([*cells, plan, *(f'<td>{escape(cell)}</td>' for cell in after)])}</tr>"


def _events(done: TrainingRun) -> list[PageSection]:
    events = done.record.get("events") or []
    if not events:
        return []
    headings = ("step", "seen", "done", "when")
    rows = [(e["step"], e["words"], str(e["action"]).replace("_", " "), e["time"]) for e in events]
    return [PageSection(title="Events", parts=[table(headings, rows, name="Events", text_columns=("seen", "done"))])]


def _sample(done: TrainingRun) -> list[PageSection]:
    text = done.record["sample"]
    if not text:
        return []
    return [PageSection(title="What the model writes", parts=[f"<pre>{escape(text)}</pre>"])]


def _completions(done: TrainingRun) -> list[PageSection]:
    """Completions with their rewards, of the first step that has some and of the last."""
    steps = [s for s in done.steps if s.get("completions")]
    headings = ("prompt", "completion", "reference", "reward")
    tables = [
        paragraph(f"After step {s['step']:,}, {'held-out' if 'validation_rewards' in s else 'training'} prompts:")
        + table(
            headings,
            [(c["prompt"], c["completion"], c["reference"], f"{c['reward']:g}") for c in s["completions"]],
            name=f"Completions after step {s['step']}",
            text_columns=headings[:3],
        )
        for s in (*steps[:1], *steps[1:][-1:])
    ]
    return [PageSection(title="Completions and their rewards", parts=tables)] if tables else []


def _kernels(done: TrainingRun) -> list[PageSection]:
    """Routes of training kernels; nothing for engines that do not say."""
    rows = [
        (
            row["op"], row["route"], row["why"], row["architecture"], row.get("ranks", "0"), f"{row['calls']:,}",
            "; ".join(f"{other['route']}: {other['reason']}" for other in row["refused"]) or "none",
        )
        for row in done.record.get("kernels") or ()
    ]  # fmt: skip
    if not rows:
        return []
    headings = ("operation", "route", "why", "architecture", "ranks", "calls that differ", "preferred, and refused")
    text_columns = ("operation", "route", "why", "architecture", "ranks", "preferred, and refused")
    return [
        PageSection(
            title="Routes of training kernels",
            parts=[table(headings, rows, name="Routes of training kernels", text_columns=text_columns)],
        )
    ]


def _conditions(done: TrainingRun) -> PageSection:
    record, device = done.record, done.record["device"]
    rows = [
        ("device", f"{device['name']}, {gib(device['memory_bytes']):.1f} GiB, {device['threads']} CPU threads"),
        ("catalogue's name", _catalogued(device["accelerator"])),
        ("system", device["system"]),
        ("software", ", ".join(f"{name} {version}" for name, version in record["software"].items())),
        ("commit", record["git_commit"] or "no repository"),
        ("command", shlex.join(record["command"]) or "not from the command line"),
        ("began, ended", f"{record['started']}, {record['ended']}"),
        ("tokens", f"{done.statistics['tokens']:,}"),
        ("checkpoint", done.statistics["checkpoint"] or "none"),
    ]
    return PageSection(
        title="How it was run",
        parts=[
            table(("what", "value"), rows, name="Conditions", text_columns=("value",)),
            f"<pre>{escape(done.text.strip())}</pre>",
        ],
    )


def _catalogued(name: str | None) -> str:
    if name is None:
        return "none: its rates were measured here"
    try:
        sources = catalog.accelerator(name).sources
    except UnknownNameError:
        return name
    return f"{name} ({'; '.join(dict.fromkeys(sources.values()))})"
