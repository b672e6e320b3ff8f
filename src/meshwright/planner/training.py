"""The whole training of one plan: days, failures, energy and money.

    productive = steps x step time        wall = productive / goodput
    ends of an interval: value x exp(+- sqrt(d_step^2 + d_goodput^2)), d the distance of the end in logarithms

The step's interval comes from calibration, the goodput's from the published range of failure rates; they have
nothing to do with each other, so they add in quadrature.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log

from meshwright.catalog.prices import Price, market_sentence, price_per_device_hour
from meshwright.cost.energy import activity_ratio, run_energy
from meshwright.cost.flops import count_parameters
from meshwright.cost.goodput import Goodput, checkpoint_cost, goodput_of_run, restart_cost
from meshwright.cost.goodput_simulation import SimulatedGoodput, simulate_goodput
from meshwright.cost.money import run_cost
from meshwright.errors import InputError
from meshwright.planner.objective import INTENSITY_RATIO, goal_for
from meshwright.planner.request import PlanRequest
from meshwright.specs.estimate import Estimate, StepEstimate, Tier
from meshwright.specs.hardware import Cluster
from meshwright.specs.run import Costs, Objective


@dataclass(frozen=True, kw_only=True)
class Training:
    """Time, cost and energy of a training. `cost` is None without a price, `energy` without a power."""

    num_tokens: float
    num_steps: float
    productive: Estimate  # s, as if nothing failed
    wall: Estimate  # s, failures and checkpoints included
    cost: Estimate | None  # USD, electricity included where it is paid apart
    energy: Estimate | None  # MWh at the facility's meter


def state_bytes(request: PlanRequest) -> float:
    """Bytes of a checkpoint: weights, master weights and optimizer states of everything that is trained, once."""
    parameters, precision = count_parameters(request.model_table), request.precision
    lora = request.model.num_layers * parameters.lora_layer + request.model_table.saved_parameters
    trained = lora if request.lora is not None else parameters.total
    return float(trained) * (precision.weight_bytes + precision.master_bytes + precision.optimizer_state_bytes)


def goodput_at(request: PlanRequest) -> Goodput:
    """Goodput of the request's run, every device writing its share of one checkpoint."""
    num_devices = request.num_devices
    return goodput_of_run(num_devices=num_devices, bytes_per_device=state_bytes(request) / num_devices)


def simulated_at(request: PlanRequest, days: float) -> SimulatedGoodput:
    """`goodput_at`, played for `days` days. Raises InputError where these are too many failures."""
    size = {"num_devices": request.num_devices, "bytes_per_device": state_bytes(request) / request.num_devices}
    return simulate_goodput(
        num_devices=request.num_devices, checkpoint=checkpoint_cost(**size), restart=restart_cost(**size), days=days
    )


def training_at(
    request: PlanRequest, step: StepEstimate, *, num_tokens: float, goodput: Goodput | None, costs: Costs
) -> Training:
    """The whole training of `num_tokens`. `goodput` None: nothing fails and nothing is saved."""
    num_steps = num_tokens / (request.global_batch * request.seq_len)
    productive = _times(step.step, num_steps)
    wall = productive if goodput is None else with_failures(productive, goodput)
    megawatt_hours = _energy_mwh(request, step, wall.value, goodput, num_tokens)
    usd = _usd(request, wall.value, num_tokens, costs)
    if usd is not None and megawatt_hours is not None:
        usd += megawatt_hours * 1000 * (costs.usd_per_kwh or 0.0)
    return Training(
        num_tokens=num_tokens,
        num_steps=num_steps,
        productive=productive,
        wall=wall,
        cost=_like(wall, usd, "USD"),
        energy=_like(wall, megawatt_hours, "MWh"),
    )


def with_failures(productive: Estimate, goodput: Goodput) -> Estimate:
    """Calendar time of a run whose steps take `productive`."""
    value = productive.value / goodput.value
    longer = hypot(log(productive.high / productive.value), log(goodput.value / goodput.low))
    shorter = hypot(log(productive.value / productive.low), log(goodput.high / goodput.value))
    return Estimate(
        value=value, low=value * exp(-shorter), high=value * exp(longer), unit=productive.unit, tier=Tier.GUESSED
    )


def catalogue_price(accelerator: str) -> Price | None:
    """The catalogue's price of a device hour; None where it has none."""
    try:
        return price_per_device_hour(accelerator)
    except InputError:
        return None


def hourly_price(accelerator: str, costs: Costs) -> float | None:
    """USD per device hour: the run's own, else the catalogue's, else None."""
    if costs.usd_per_device_hour is not None:
        return costs.usd_per_device_hour
    known = catalogue_price(accelerator)
    return known and known.usd_per_device_hour


def price_sentence(cluster: Cluster, costs: Costs) -> str:
    """The price that costs are computed with, where it is from, and the market's; empty where there is none.

    >>> from meshwright import catalog
    >>> price_sentence(catalog.cluster("b200-8x1"), Costs(usd_per_device_hour=5.5))
    '5.5 USD per device-hour, as the run states; the market: 6.00 to 8.60 USD per device-hour, 3 offers read ...'
    """
    stated, name = costs.usd_per_device_hour, cluster.accelerator.name
    if cluster.is_mixed and stated is None:
        return ""
    known, found = catalogue_price(name), []
    if stated is not None:
        found.append(f"{stated:g} USD per device-hour, as the run states")
    elif known is not None:
        found.append(f"{known.usd_per_device_hour:g} USD per device-hour, {known.offer}, {known.date}")
    market = "" if cluster.is_mixed else market_sentence(name)
    return "; ".join((*found, *([f"the market: {market}"] if market else [])))


def unknown_price(cluster: Cluster) -> str:
    """The sentence where `price_sentence` is empty.

    >>> from meshwright import catalog
    >>> unknown_price(catalog.cluster("mi355x-8x1"))
    'none is known for mi355x; give yours: --set costs.usd_per_device_hour=USD'
    """
    name = " and ".join(dict.fromkeys(part.accelerator.name for part in cluster.parts or (cluster,)))
    return f"none is known for {name}; give yours: --set costs.usd_per_device_hour=USD"


def _usd(request: PlanRequest, wall_s: float, num_tokens: float, costs: Costs) -> float | None:
    if request.cluster.is_mixed and costs.usd_per_device_hour is None:
        return None  # parts have prices of their own
    price = hourly_price(request.cluster.accelerator.name, costs)
    if price is None:
        return None
    cost = run_cost(num_devices=request.num_devices, wall_s=wall_s, num_tokens=num_tokens, usd_per_device_hour=price)
    return float(cost.usd)


def _energy_mwh(
    request: PlanRequest, step: StepEstimate, wall_s: float, goodput: Goodput | None, num_tokens: float
) -> float | None:
    power = goal_for(Objective.THROUGHPUT, cluster=request.cluster).power
    if power is None:
        return None
    waiting = 0.0 if goodput is None else goodput.losses.restart_ratio + goodput.losses.spares_ratio
    energy = run_energy(
        power=power,
        activity_ratio=activity_ratio(components_s=step.components_s, intensity_ratio=INTENSITY_RATIO),
        num_devices=request.num_devices,
        wall_s=wall_s,
        num_tokens=num_tokens,
        idle_ratio=waiting,
    )
    return float(energy.facility_mwh)


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(
        value=estimate.value * factor,
        low=estimate.low * factor,
        high=estimate.high * factor,
        unit=estimate.unit,
        tier=estimate.tier,
    )


def _like(wall: Estimate, value: float | None, unit: str) -> Estimate | None:
    """Power and price are nearly constant, so what they cost is as uncertain as the time."""
    if value is None:
        return None
    scale = value / wall.value
    return Estimate(value=value, low=wall.low * scale, high=wall.high * scale, unit=unit, tier=Tier.GUESSED)
