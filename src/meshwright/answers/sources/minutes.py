"""Minutes of an MLPerf benchmark as the cost model predicts them.

    minutes = olympic mean of the samples to convergence x scaling x tokens of a sample / (60 x tokens/s of all devices)

Samples come from the published runs of the claim's system, so that only the speed is predicted. Evaluations are not in
it. The plan is the planner's best one, and the software stack an assumption.
"""

from __future__ import annotations

from functools import cache
from math import exp, hypot, log

from meshwright.catalog.claim_answers import ClaimQuantity, ClaimRun, claim_answer
from meshwright.catalog.lookup import Claim
from meshwright.catalog.mlperf_results import MLPerfResult, mlperf_result
from meshwright.errors import InfeasibleError
from meshwright.planner.claims import ClaimPrediction, predicted_rate
from meshwright.specs.estimate import Estimate

TOKENS = 8192
_MODELS = {"llama2_70b_lora": ("llama2-70b", ("task=lora",)), "llama31_8b": ("llama3.1-8b", ())}
_STACKS = {
    "mi355x": ("primus-megatron", 2025.75), "mi325x": ("primus-megatron", 2025.75),
    "mi300x": ("primus-megatron", 2025.5),
    "b200": ("nemo", 2025.75), "b300": ("nemo", 2025.75), "gb200": ("nemo", 2025.35),
}  # fmt: skip
_CLUSTERS = {"gb200": "gb200-4x2"}
_SAMPLES_OF = {"s65_06": "5.1/AMD/MI355X_EPYC_9575F_pytorch/llama2_70b_lora"}
"""Sets whose samples stand for a score that was not submitted."""


def predicted_minutes(found: Claim) -> ClaimPrediction | None:
    """Predicted minutes, or their ratio, of a claim about MLPerf; None for others and where no plan fits."""
    answer = claim_answer(found)
    sets = answer.sets or ((_SAMPLES_OF[found.claim_id],) if found.claim_id in _SAMPLES_OF else ())
    if not sets or answer.reads is ClaimQuantity.MINUTES_SPREAD:
        return None
    try:
        own = _minutes(sets, found.accelerator.lower())
        if answer.reads is not ClaimQuantity.MINUTES_RATIO:
            return own and ClaimPrediction(claim=found, value=own[0], plans=(own[1],))
        other = _minutes(answer.against_sets, found.baseline.lower())
    except InfeasibleError:
        return None
    if own is None or other is None:
        return None
    (a, plan), (b, against) = own, other
    spread = exp(hypot(log(a.high / a.value), log(b.high / b.value)))
    value = b.value / a.value
    ratio = Estimate(value=value, low=value / spread, high=value * spread, unit="x", tier=max(a.tier, b.tier))
    return ClaimPrediction(claim=found, value=ratio, plans=(plan, against))


@cache
def _minutes(names: tuple[str, ...], accelerator: str) -> tuple[Estimate, str] | None:
    results = [mlperf_result(name) for name in names]
    first = results[0]
    if accelerator not in _STACKS or first.benchmark not in _MODELS or first.num_accelerators != 8:
        return None
    model, overrides = _MODELS[first.benchmark]
    framework, vintage = _STACKS[accelerator]
    asked = ClaimRun(
        model=model, cluster=_CLUSTERS.get(accelerator, f"{accelerator}-8x1"), gbs=first.global_batch_size,
        seq=TOKENS, precision="fp8", engine="megatron",
        set=(f"stack.framework={framework}", f"stack.vintage={vintage}", *overrides),
    )  # fmt: skip
    rate, plan = predicted_rate(asked)
    tokens = sum(_samples(r) for r in results) / len(results) * TOKENS

    def minutes(tokens_per_s: float) -> float:
        return tokens / (8 * tokens_per_s) / 60

    value = Estimate(
        value=minutes(rate.value), low=minutes(rate.high), high=minutes(rate.low), unit="min", tier=rate.tier
    )
    return value, f"{asked.cluster}: {plan}, without evaluations"


def _samples(result: MLPerfResult) -> float:
    """Olympic mean of the samples to convergence, with the scaling of the score."""
    kept = sorted(result.samples)[1:-1]
    return sum(kept) / len(kept) * result.scaling
