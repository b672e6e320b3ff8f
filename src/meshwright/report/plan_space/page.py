"""The page of all scored plans: filters, the front of speed against memory, a table, and two plans side by side.

The page holds the plans as columns of numbers; its script (`page.js`) draws, sorts and compares them, and loads
nothing. Without a script the page shows the best plans as a table.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from meshwright.answers.cluster import setup_lines
from meshwright.answers.components import COMPONENTS, bound_by, family, label
from meshwright.answers.plan_ranking import PlanRanking
from meshwright.answers.plan_rows import mfu_per_rate, plan_fields, tokens_per_device
from meshwright.answers.provenance import calibration_sentence
from meshwright.answers.quantities import percent, rate, seconds
from meshwright.errors import MeshwrightError
from meshwright.planner.scored import ScoredPlan, ScoredPlans
from meshwright.report.figures import FAMILY_COLORS, MEMORY_COLORS
from meshwright.report.html import PageSection, asset, document, paragraph, table, tiles
from meshwright.runfile import pinned_text
from meshwright.runfile.pinned import section_from_plan
from meshwright.runfile.writing import MICRO_HERE, SECTION_HERE, plan_template
from meshwright.specs.run import Run, with_plan
from meshwright.units import gib
from meshwright.version import __version__

STATIC_ROWS = 50
"""Rows of the table without a script."""

DIGITS = 5
"""Significant digits of the numbers that the page holds."""

_WITH_VALUE = ("--html", "--csv", "--write", "--limit", "--top", "--why-not")
_FLAGS = ("--all", "--json", "--pareto", "--explain")
"""Options that do not belong to the command of one plan."""

_asset = partial(asset, "meshwright.report.plan_space")

HEADINGS = ("plan", "step", "tokens/s/device", "80 % interval", "MFU", "GiB", "bound by")


def ranking_page(ranking: PlanRanking, *, command: str = "") -> str:
    """The page of the scored plans of a ranking that lists them."""
    assert ranking.scored is not None  # `write_html` refuses the others
    return plan_page(ranking.scored, run=ranking.run, command=command)


def plan_page(scored: ScoredPlans, *, run: Run, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it."""
    request = scored.request
    about = (
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens a step on {request.num_devices:,} devices, "
        f"{request.precision.name}, engine {request.engine}. {_extent(scored)}"
        + "".join(f" {line[0].upper()}{line[1:]}." for line in setup_lines(request, scored.plans[0].plan))
    )
    simulated = sum(p.is_simulated for p in scored)
    piped = sum(p.plan.pipeline > 1 for p in scored)
    texts = [
        "Intervals hold four cases of five. A plan is on the front if no listed plan is both faster and smaller.",
        f"{simulated:,} of {piped:,} plans with a pipeline have the step time of their event graph; the others have "
        "a step time of the closed form, which treats all stages alike.",
        calibration_sentence(scored.request),
    ]
    return document(
        title=f"Plans of {request.model.name} on {run.cluster_name}",
        lead=paragraph(about, css_class="lead") + _tiles(scored),
        sections=[
            PageSection(
                title="Speed against memory", parts=[_asset("filters.html"), _asset("figure.html")], is_wide=True
            ),
            PageSection(title="Two plans", parts=[_asset("compare.html")], is_wide=True),
            PageSection(title="Plans", parts=[_table(scored)], is_wide=True),
            PageSection(title="What the numbers rest on", parts=[paragraph(text) for text in texts], is_wide=True),
        ],
        footer=f"Meshwright {__version__}. Estimates, not measurements. {command}",
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=_json(page_data(scored, run=run, command=command)),
    )  # fmt: skip


def page_data(scored: ScoredPlans, *, run: Run, command: str = "") -> dict[str, Any]:
    """The plans as columns. Times in seconds, memory in GiB.

    A coded column is a list of different values and the index of each plan's value.
    """
    plans, request = scored.plans, scored.request
    fields = [plan_fields(p.plan) for p in plans]
    components = [n for n in COMPONENTS if any(p.components_s.get(n) for p in plans)]
    parts = list(plans[0].memory_bytes)
    return {
        "plan": [p.plan.describe() for p in plans],
        "fields": {name: _coded([f[name] for f in fields]) for name in fields[0]},
        "sections": _coded([json.dumps(section_from_plan(p.plan)) for p in plans]),
        "step_s": _rounded(p.step_s for p in plans),
        "spread": _rounded(p.spread for p in plans),
        "value": _rounded(p.value for p in plans),
        "gib": _rounded(gib(p.reserved_bytes) for p in plans),
        "front": [int(p.on_front) for p in plans],
        "simulated": [int(p.is_simulated) for p in plans],
        "components": {n: _rounded(p.components_s.get(n, 0.0) for p in plans) for n in components},
        "labels": {n: label(n) for n in components},
        "families": {n: family(n).value for n in components},
        "colors": {f.value: color for f, color in FAMILY_COLORS.items()},
        "memory": {n: _rounded(gib(p.memory_bytes[n]) for p in plans) for n in parts},
        "memory_colors": MEMORY_COLORS,
        "usable_gib": _rounded(gib(p.usable_bytes) for p in plans),
        "tokens_per_device": tokens_per_device(request),
        "mfu_per_rate": mfu_per_rate(request),
        "objective": run.objective.value,
        "templates": _templates(run, plans),
        "here": [SECTION_HERE, MICRO_HERE],
        "command": _plan_command(command),
    }  # fmt: skip


def _plan_command(command: str) -> str:
    """The command line without the files that it writes, to which `--fix` and `--write` are added."""
    kept, arguments = [], iter(shlex.split(command))
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _WITH_VALUE:
            if "=" not in argument:
                next(arguments, None)
        elif name not in _FLAGS:
            kept.append(argument)
    return shlex.join(kept)


def _templates(run: Run, plans: Sequence[ScoredPlan]) -> list[Any]:
    """The run file without its plan, one for each choice of kernels that plans make; coded by plan.

    All are empty where the file cannot hold a plan (see `pinned_text`).
    """
    try:
        pinned_text(run, plans[0].plan)
    except MeshwrightError:
        return _coded([""] * len(plans))
    saved = [(p.plan.stored_activations, p.plan.weight_cache, p.plan.loss_chunk) for p in plans]
    first = dict(zip(reversed(saved), reversed(plans), strict=True))
    texts = {kernels: plan_template(with_plan(run, done.plan)) for kernels, done in first.items()}
    return _coded([texts[kernels] for kernels in saved])


def _coded(values: Sequence[Any]) -> list[Any]:
    different = list(dict.fromkeys(values))
    index = {value: i for i, value in enumerate(different)}
    return [different, [index[v] for v in values]]


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def _json(data: dict[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json" id="plans">{text.replace("<", chr(92) + "u003c")}</script>'


# --- the part that needs no script ---


def _extent(scored: ScoredPlans) -> str:
    counts, shown = scored.counts, len(scored)
    if scored.is_complete:
        same = " with equal shares of the layers" if scored.request.cluster.parts else ""
        return f"All plans that are legal and fit{same}, of {counts.enumerated:,} enumerated: {shown:,} rows."
    return (
        f"The best {shown:,} of {counts.scored:,} plans that were scored, of {counts.enumerated:,} enumerated; "
        "and slower ones that need less memory."
    )


def _tiles(scored: ScoredPlans) -> str:
    best, tokens = scored.plans[0], tokens_per_device(scored.request)
    least = min(scored, key=lambda p: p.reserved_bytes)
    speed = tokens / best.step_s
    low, high = speed / best.spread, speed * best.spread
    return tiles(
        [
            (f"{len(scored):,}", "plans", f"{sum(p.on_front for p in scored):,} on the front"),
            (rate(speed), "tokens/s/device, best plan", f"{rate(low)} to {rate(high)}"),
            (seconds(best.step_s), "step of the best plan", best.plan.describe()),
            (percent(speed * mfu_per_rate(scored.request)), "MFU of the best plan", ""),
            (
                f"{gib(least.reserved_bytes):.1f} GiB", "least memory of a listed plan",
                f"{least.step_s / best.step_s:.2f} times the step",
            ),
        ]
    )  # fmt: skip


def _table(scored: ScoredPlans) -> str:
    tokens, peak = tokens_per_device(scored.request), mfu_per_rate(scored.request)
    rows = [
        (
            p.plan.describe(), seconds(p.step_s), rate(tokens / p.step_s),
            f"{rate(tokens / p.step_s / p.spread)} to {rate(tokens / p.step_s * p.spread)}",
            percent(tokens / p.step_s * peak), f"{gib(p.reserved_bytes):.1f}", bound_by(p.components_s),
        )
        for p in scored.plans[:STATIC_ROWS]
    ]  # fmt: skip
    return f'<div id="list">{table(HEADINGS, rows, name="Scored plans", text_columns=("bound by",))}</div>'
