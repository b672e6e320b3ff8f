"""The JSON document of `meshwright estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.answers.documents.plan import (
    plan_document,
    request_document,
    step_document,
    training_document,
)
from meshwright.catalog.prices import market_prices

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate


def estimate_document(done: RunEstimate) -> dict[str, Any]:
    """Plan, step, memory, pipeline stages, economics and sources of one run."""
    from meshwright.answers.provenance import sources_of
    from meshwright.answers.stages import stage_rows

    economics = done.economics
    return {
        "request": request_document(done.run, done.request),
        "chosen_by": "planner" if done.chosen else "run file",
        **plan_document(done.plan),
        **step_document(done.estimate.step),
        "stages": stage_rows(done.request, done.estimate),
        "uncertainty": done.estimate.uncertainty,
        "goodput": economics.goodput,
        "usd_per_device_hour": economics.usd_per_device_hour,
        "usd_per_million_tokens": economics.usd_per_million_tokens,
        "market_prices": [
            p
            for p in market_prices()
            if p.accelerator == done.request.cluster.accelerator.name and not done.request.cluster.parts
        ],
        "joule_per_token": economics.joule_per_token,
        "totals": economics.totals and training_document(economics.totals),
        "notes": done.notes,
        "sources": {topic: str(source) for topic, source in sources_of(done).items()},
    }
