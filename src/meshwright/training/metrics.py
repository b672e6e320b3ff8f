"""Throughput, MFU and statistics of measured steps, defined alike for every engine.

    tokens/s/device   tokens of the global batch / step time / devices
    MFU               `cost.mfu`, of the matmul format's dense peak

On a machine that is not in the catalogue the peak is the GEMM rate measured here: the MFU is then the part of that
rate that the step reached. Step statistics exclude the first steps, which pick kernels and fill caches.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.mfu import MFU_CONVENTION, mfu
from meshwright.cost.tables import model_row
from meshwright.specs.hardware import THIS_MACHINE, Accelerator
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """Converts a step time into throughput and MFU."""

    tokens_per_step: int
    num_devices: int
    flops_per_token: float
    peak_flops_per_s: float | None  # one device; None: unknown, and so is the MFU
    peak_source: str  # the peak that the MFU refers to

    def tokens_per_s_per_device(self, step_s: float) -> float:
        """Throughput of a step that took `step_s`."""
        return self.tokens_per_step / step_s / self.num_devices

    def mfu(self, step_s: float) -> float | None:
        """Model FLOPs utilisation of a step that took `step_s`, as a ratio; None if the device's peak is unknown."""
        if self.peak_flops_per_s is None:
            return None
        ratio = mfu(
            tokens_per_s_per_device=self.tokens_per_s_per_device(step_s),
            flops_per_token=self.flops_per_token,
            peak_flops_per_s=self.peak_flops_per_s,
        )
        return float(ratio)

    @property
    def convention(self) -> str:
        """The FLOPs that the MFU counts, and the peak it refers to."""
        if self.peak_flops_per_s is None:
            return "unknown: this device's peak was not measured"
        return f"{MFU_CONVENTION}; of {self.peak_source}"


def yardstick(run: Run, *, accelerator: Accelerator | None, plan: Plan) -> Yardstick:
    """The yardstick of `run` under `plan` on devices like `accelerator`; None: a device that was not measured."""
    peak, kind = None, "an unknown peak"
    if accelerator is not None:
        measured = accelerator.vendor == THIS_MACHINE
        kind = "the GEMM rate measured here" if measured else f"{accelerator.name}'s dense peak"
        peak = accelerator.peak_flops_per_s[run.precision.matmul]
    table = model_row(run.model, lora=run.lora)
    return Yardstick(
        tokens_per_step=run.tokens_per_step,
        num_devices=plan.num_devices,
        flops_per_token=float(model_flops_per_token(table, seq_len=run.sequence_length)),
        peak_flops_per_s=peak,
        peak_source=f"{kind} in {run.precision.matmul}",
    )


def above_peak(mfu: float | None, *, by: Yardstick) -> tuple[str, ...]:
    """A note on a share of the peak that exceeds 100 %; none where it does not."""
    if mfu is None or mfu <= 1:
        return ()
    return (
        f"the MFU of {100 * mfu:.0f} % exceeds 100 %: the steps computed faster than the peak it refers to "
        f"({by.peak_source})",
    )


def rates_of(step_s: dict[str, float | int], *, by: Yardstick) -> dict[str, Any]:
    """Statistics of a record that follow from the spread of its step time."""
    median_s = step_s.get("median")
    return {
        "step_s": step_s,
        "tokens_per_s_per_device": median_s and by.tokens_per_s_per_device(median_s),
        "throughput": throughput_of(step_s, by=by),
        "mfu": median_s and by.mfu(median_s),
        "mfu_convention": by.convention,
        "model_flops_per_token": by.flops_per_token,
        "peak_flops_per_s": by.peak_flops_per_s,
        "num_devices": by.num_devices,
    }


def rank_statistics(*, step_s: list[float], peak_memory_bytes: list[int]) -> dict[str, Any]:
    """`ranks` of a record, from the median step time and the memory of each process."""
    return {
        "step_s": step_s,
        "peak_memory_bytes": peak_memory_bytes,
        "straggler_ratio": max(step_s) / statistics.median(step_s),
    }


def throughput_of(step_s: dict[str, float | int], *, by: Yardstick) -> dict[str, float | int]:
    """Tokens/s/device with n and spread, from the spread of the step time: the slowest step is the lowest rate."""
    if not step_s["n"]:
        return {"n": 0}
    ends = {"median": "median", "low": "high", "high": "low"}
    rates = {end: by.tokens_per_s_per_device(step_s[other]) for end, other in ends.items()}
    return {"n": step_s["n"], **rates}


def spread_of(values: list[float]) -> dict[str, float | int]:
    """Median with n and spread, without the first `WARM_UP_STEPS` where enough remain."""
    kept = values[WARM_UP_STEPS:] if len(values) > 2 * WARM_UP_STEPS else values
    if not kept:
        return {"n": 0}
    return {"n": len(kept), "median": statistics.median(kept), "low": min(kept), "high": max(kept)}


def target_reached(run: Run, *, steps: int, tokens: int, elapsed_s: float) -> dict[str, float | int] | None:
    """Steps, tokens and seconds to the target loss of `run`; None where it has none."""
    evaluate = run.train.evaluate
    if evaluate is None or evaluate.target_loss is None:
        return None
    return {"loss": evaluate.target_loss, "steps": steps, "tokens": tokens, "seconds": elapsed_s}
