"""The best layout for serving under bounds, and the front: what `meshwright inference plan` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.answers import serving_question as questions
from meshwright.answers.quantities import rate, seconds
from meshwright.answers.serving_arrivals import arrival_table, check_open_loop
from meshwright.answers.text_table import TextTable
from meshwright.catalog.models import own_repository
from meshwright.errors import InfeasibleError
from meshwright.hub import is_hub_name
from meshwright.inference import search as layouts
from meshwright.inference.arrivals import ArrivalEstimate, LatencyLimits, arrivals_named
from meshwright.inference.checkpoint import own_precision
from meshwright.inference.constants import shipped_constants
from meshwright.inference.estimate import LoadEstimate
from meshwright.inference.formats import check_run
from meshwright.inference.price import HourPrice, TokenPrice, token_price
from meshwright.inference.search import LayoutPoint, ServingQuestion, ServingSearch
from meshwright.inference.serving import RequestLoad
from meshwright.json_values import jsonable
from meshwright.launch.serving import deployment
from meshwright.launch.start import write
from meshwright.result import Result
from meshwright.runfile import named_cluster, named_model


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingPlan(Result):
    """The best serving layout of a cluster under bounds of TTFT and ITL.

    Attributes:
        question: model, cluster, load and bounds.
        search: the best point of each layout, and the front of throughput and interactivity.
        estimate: latencies and rates of the best point, with intervals.
        price: price of a device-hour; None if none is known.
        notes: cautions for the reader.
        arrivals: percentiles of latencies of the best point, by simulation; None without a rate.
        asked_model: the model as it was asked for: a name, a repository of the hub or a folder.
    """

    question: ServingQuestion
    search: ServingSearch
    estimate: LoadEstimate
    price: HourPrice | None
    notes: tuple[str, ...]
    arrivals: ArrivalEstimate | None = None
    asked_model: str = ""

    def write(self, folder: str | PathLike[str]) -> tuple[str, ...]:
        """Write what starts the best point's servers into `folder`: a script, a Kubernetes manifest and a page.

        Returns:
            What the files leave open.

        Raises:
            InputError: no command line of the engine has this layout or these formats, or a file cannot be written.
        """
        question = self.question
        made = deployment(
            question, self.best, repository=_repository(self.asked_model, question.model.name),
            stored=own_precision(self.asked_model, question.model)[0], summary=self.summary(),
        )  # fmt: skip
        plan = json.dumps(self.to_dict(), indent=1) + "\n"
        write({str(Path(folder) / name): text for name, text in {**made.files, "plan.json": plan}.items()})
        return made.notes

    @property
    def best(self) -> LayoutPoint:
        """Layout and load with most output tokens/s, or with fewest devices for a rate."""
        assert self.search.best is not None
        return self.search.best

    @property
    def token_price(self) -> TokenPrice | None:
        """Price and energy of tokens at the best point."""
        if self.price is None:
            return None
        return token_price(self.estimate, self.price, self.question.cluster.accelerator)

    def to_dict(self) -> dict[str, Any]:
        question = self.question
        return jsonable(
            {
                "model": question.model.name, "cluster": question.cluster.name,
                "precision": question.weights.name, "kv_precision": question.cache.name,
                "engine": question.engine.name, "input_tokens": question.load.input_tokens,
                "output_tokens": question.load.output_tokens, "bounds": question.bounds,
                "requests_per_s": question.requests_per_s,
                **({} if self.arrivals is None else {"arrivals": self.arrivals}),
                "best": self.best, "estimate": self.estimate, "price": self.token_price,
                "layouts": self.search.verdicts, "front": self.search.front,
                "num_points": self.search.num_points, "notes": self.notes,
            }
        )  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each point of the front."""
        names = (
            "prefill_replicas", "concurrency", "ttft_s", "itl_s", "output_tokens_per_s_per_device",
            "output_tokens_per_s_per_user",
        )  # fmt: skip
        rows = ((p.layout.describe(), p.as_json()) for p in self.search.front)
        return [{"layout": layout, **{name: row[name] for name in names}} for layout, row in rows]

    def summary(self) -> str:
        """Return the best layout with its rate and latencies."""
        out, question = self.estimate.output_tokens_per_s, self.question
        return (
            f"{question.model.name} in {question.weights.name} on {question.cluster.name}: {self.best.describe()}, "
            f"{rate(out.value)} output tokens/s ({rate(out.low)} to {rate(out.high)}), "
            f"ITL {seconds(self.best.itl_s)}, TTFT {seconds(self.best.ttft_s)}"
        )

    def layout_table(self, most: int) -> TextTable:
        """The best point of each layout, and what stops it."""
        rows = [_layout_row(v) for v in self.search.verdicts[:most]]
        headings = ("layout", "in flight", "output tokens/s", "ITL", "TTFT", "stopped by")
        return TextTable(title="", headings=headings, rows=rows, text_columns=("stopped by",))

    def arrival_table(self) -> TextTable | None:
        """Percentiles of the best point under the arrivals; None without a rate."""
        return None if self.arrivals is None else arrival_table(self.arrivals)

    def front_table(self) -> TextTable:
        """Throughput per device against interactivity."""
        rows = [
            (p.describe(), rate(p.tokens_per_s_per_device), _speed(p), seconds(p.ttft_s)) for p in self.search.front
        ]
        headings = ("layout", "tokens/s/device", "tokens/s/user", "TTFT")
        return TextTable(title="", headings=headings, rows=rows)


def _speed(point: layouts.LayoutPoint) -> str:
    """Tokens/s of one user; empty for answers of one token."""
    return f"{point.interactivity:.1f}" if point.itl_s else ""


def _layout_row(found: layouts.LayoutVerdict) -> tuple[str, ...]:
    split = f", {found.prefill_replicas} prefill" if found.prefill_replicas else ""
    if (best := found.best) is None:
        return (f"{found.layout.describe()}{split}", "", "", "", "", found.stopped_by)
    numbers = (f"{best.concurrency:,.0f}", rate(best.output_tokens_per_s), seconds(best.itl_s), seconds(best.ttft_s))
    return (f"{best.layout.describe()}{split}", *numbers, found.stopped_by)


def serving_plan(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    precision: str | None = None,
    kv_precision: str | None = None,
    engine: str | None = None,
    input_tokens: int,
    output_tokens: int,
    input_spread: float | None = None,
    output_spread: float | None = None,
    prefix_hit_rate: float | None = None,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    percentile: float | None = None,
    requests_per_s: float | None = None,
    arrivals: str | None = None,
    seed: int = 0,
    disaggregated: bool = False,
    memory_ratio: float | None = None,
    terms: questions.PriceTerms | None = None,
    calibration: str | Path | None = None,
) -> ServingPlan:
    """Search all layouts of a cluster. Raises InfeasibleError where none keeps the bounds, with the nearest."""
    check_open_loop(requests_per_s, arrivals=arrivals, percentile=percentile)
    if arrivals is not None:
        arrivals_named(arrivals, 1.0)
    place, calibrated = named_cluster(cluster), questions.server_calibration(calibration)
    if calibrated is not None:
        questions.check_calibrated(calibrated, accelerator=place.accelerator.name, engine=engine)
    served = named_model(model)
    weights, cache = questions.formats_named(precision, kv_precision, model, served, place.accelerator)
    question = ServingQuestion(
        model=served, cluster=place, weights=weights, cache=cache,
        engine=questions.engine_named(engine or questions.USUAL_ENGINE) if calibrated is None else calibrated.engine,
        calibration=shipped_constants() if calibrated is None else calibrated.constants,
        load=RequestLoad(
            input_tokens=input_tokens, output_tokens=output_tokens, prefix_hit_rate=prefix_hit_rate or 0,
            input_spread=input_spread or 0.0, output_spread=output_spread or 0.0,
        ),
        bounds=LatencyLimits(ttft_s=ttft_s or inf, itl_s=itl_s or inf, percentile=percentile),
        requests_per_s=requests_per_s, arrivals=arrivals or "poisson", seed=seed, disaggregated=disaggregated,
        reserve=questions.reserve_of(memory_ratio),
    )  # fmt: skip
    check_run(weights, question.engine.name, place.accelerator)
    found = layouts.search_layouts(question)
    if found.best is None:
        raise InfeasibleError(
            f"no layout of {served.name} in {weights.name} on {place.name} keeps the bounds: {_why_none(found)}",
            hint="loosen the bounds (--ttft, --itl, --rate), or ask for fewer tokens, a smaller --precision, or a "
            "--cluster with more or faster devices",
        )
    estimate, under = layouts.answer_of(question, found.best)
    return ServingPlan(
        question=question, search=found, estimate=estimate, arrivals=under, asked_model=model,
        price=questions.hour_price(terms or questions.PriceTerms(), place.accelerator),
        notes=questions.notes_of(
            question.served(found.best.layout), question.engine, [question.load], name=model, precision=precision
        ),
    )  # fmt: skip


def _repository(asked: str, name: str) -> str | None:
    """Return the folder or the repository of the hub with the weights; None where the catalogue knows none."""
    path = Path(asked)
    if path.exists():
        return str((path if path.is_dir() else path.parent).absolute())
    if is_hub_name(asked):
        return asked.partition("@")[0]
    return own_repository(name)


def _why_none(found: ServingSearch) -> str:
    reasons = dict.fromkeys(f"{v.layout.describe()}: {v.stopped_by}" for v in found.verdicts)
    return "; ".join(list(reasons)[-3:])
