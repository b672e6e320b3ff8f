"""Sources of an estimate's inputs, one sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.answers.economics import Economics
from meshwright.calibration.parameters import fitted
from meshwright.catalog.prices import power_assumptions
from meshwright.catalog.reliability import failure_range
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.rates import factors_of
from meshwright.cost.uncertainty import BF16_GEMM, POWER_LIMIT
from meshwright.planner.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class InputSource:
    """One input of an estimate and its source."""

    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.what}: {self.source}"


INTERVAL_CONVENTION = (
    "80 % interval: four of five measured runs are expected inside; it carries the spread of every "
    "calibrated parameter and the fit's unexplained error"
)


def sources_of(request: PlanRequest, economics: Economics) -> dict[str, InputSource]:
    """Sources by topic: hardware, fabric, software, calibration, failures, power, price."""
    accelerator, fabric = request.cluster.accelerator, request.cluster.fabric
    facts, rates = stack_facts(request.stack.framework), failure_range()
    found = {
        "hardware": InputSource(what=f"{accelerator.name}, datasheet", source=_whole(accelerator.sources)),
        "fabric": InputSource(what=f"fabric {fabric.name}", source=_whole(fabric.sources)),
        "software": InputSource(what=f"software stack {facts.title}", source=facts.source),
        "calibration": InputSource(what="calibration of the cost model", source=calibration_sentence(request)),
        "failures": InputSource(what=f"failure rate: {rates.value.scope}", source=rates.value.source),
    }
    if economics.joule_per_token is not None:
        assumed = power_assumptions()
        text = "; ".join(f"{name} {source}" for name, source in assumed.sources.items())
        found["power"] = InputSource(what="power in addition to the design power, assumptions", source=text)
    if economics.price is not None:
        price = economics.price
        found["price"] = InputSource(
            what=f"{price.usd_per_device_hour:g} USD per device-hour, {price.offer}, {price.date}", source=price.source
        )
    return found


def calibration_sentence(request: PlanRequest) -> str:
    """The calibration used, and the number of its measured rows of this accelerator and software."""
    calibration = request.calibration or fitted()
    if calibration.corrections:
        return f"measured: {calibration.made}"
    factors = factors_of(request.cluster, request.precision, request.stack)
    device = calibration.num_rows("device_format", factors["device_format"])
    framework = calibration.num_rows("framework", factors["framework"])
    return (
        f"version {calibration.made!r}, fitted on published measured runs; {device} rows of "
        f"{factors['device_format']}, {framework} rows of {factors['framework']}"
    )


def input_meaning(name: str) -> str:
    """Meaning of one input of the estimate's interval."""
    parameters = fitted().parameters
    if name in parameters:
        return parameters[name].meaning
    if name == BF16_GEMM:
        return f"{parameters['gemm_ratio'].meaning}, for 16-bit GEMMs"
    if name == POWER_LIMIT:
        return "clock of matrix units under the stated power limit"
    return "unexplained error of the calibration's fit"


def _whole(sources: dict[str, str]) -> str:
    return sources.get("all") or "; ".join(dict.fromkeys(sources.values())) or "not stated"
