"""Failures, energy and money of a training that was estimated."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.catalog.prices import Price
from meshwright.cost.goodput import Goodput
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.request import PlanRequest
from meshwright.planner.training import Training, catalogue_price, goodput_at, hourly_price, training_at
from meshwright.specs.run import Run
from meshwright.units import JOULE_PER_KWH


@dataclass(frozen=True, kw_only=True)
class Economics:
    """Failures, energy and money of the whole training."""

    goodput: Goodput
    usd_per_device_hour: float | None
    price: Price | None  # where the catalogue's price was taken
    usd_per_million_tokens: float | None  # electricity included where it is paid apart
    joule_per_token: float | None  # at the facility's meter, failures included
    totals: Training | None  # None if the run file has no length of training


def economics_of(run: Run, request: PlanRequest, estimate: PlanEstimate) -> Economics:
    """Return failures, energy and money of training `run` by the estimated plan."""
    accelerator, goodput = request.cluster.accelerator.name, goodput_at(request)

    def training(num_tokens: float) -> Training:
        return training_at(request, estimate.step, num_tokens=num_tokens, goodput=goodput, costs=run.costs)

    million = training(1e6)
    return Economics(
        goodput=goodput,
        usd_per_device_hour=hourly_price(accelerator, run.costs),
        price=catalogue_price(accelerator) if run.costs.usd_per_device_hour is None else None,
        usd_per_million_tokens=million.cost and million.cost.value,
        joule_per_token=million.energy and million.energy.value * 1000 * JOULE_PER_KWH / 1e6,
        totals=None if run.num_steps is None else training(run.num_steps * run.tokens_per_step),
    )
