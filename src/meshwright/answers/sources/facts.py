"""Numbers that the sentences of `slips.toml` hold, each from the catalogue, published results or arithmetic."""

from __future__ import annotations

from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import Claim, claim
from meshwright.catalog.mlperf_results import mlperf_result
from meshwright.inference.capacity import CapacityQuestion, capacities, shipped_reserve
from meshwright.inference.claims import predict_serving_claim, published_replica_ratios
from meshwright.inference.formats import cache_format, weight_format
from meshwright.planner.claims import predict_claim
from meshwright.units import GB, PETA, TERA

MXFP4_BYTES = 17 / 32
"""Bytes of a parameter in MXFP4: 4 bits, and a scale of 8 bits for 32 of them."""
DEEPSEEK_PARAMETERS = 671e9
CONTEXT = 131_072


def slip_facts() -> dict[str, float]:
    """Every number by the name that the sentences use."""
    b200, mi355x = catalog.accelerator("b200"), catalog.accelerator("mi355x")
    replicas = published_replica_ratios().values()
    submitted, best = claim("s65_06").value, claim("s65_07").value
    return {
        "b200_tb_per_s": b200.memory_bytes_per_s / TERA,
        "mi355x_tb_per_s": mi355x.memory_bytes_per_s / TERA,
        "mi355x_gb": mi355x.memory_bytes / GB,
        "b200_gb": b200.memory_bytes / GB,
        "more_gb": (mi355x.memory_bytes - b200.memory_bytes) / GB,
        "deepseek_gb": DEEPSEEK_PARAMETERS * MXFP4_BYTES / GB,
        "replicas_low": min(replicas),
        "replicas_high": max(replicas),
        "lora_faster": best / submitted - 1,
        "lora_less": 1 - submitted / best,
        "parameters_b": _predicted(claim("s65_14")) / 1e9,
        "fp8_sessions": sessions("mi355x", "fp8"),
        "b200_sessions": sessions("b200", "fp8"),
        "partner_spread": _predicted(claim("mlperf51_10")),
        "gb200_min": mlperf_result("5.0/NVIDIA/tyche_ngpu8_ngc25.04_nemo/llama2_70b_lora").score_min,
        "replicas": (claim("scale_06").num_accelerators or 0) / claim("scale_07").value,
        "uplift": claim("s65_08").value / submitted,
        "mi355x_fp4": mi355x.peak_flops_per_s["fp4"] / PETA,
    }


def sessions(accelerator: str, precision: str) -> float:
    """Sessions of 131,072 tokens of Llama 3.1 70B in the memory of one device, weights and cache in `precision`."""
    place = catalog.cluster(f"{accelerator}-1x1")
    asked = CapacityQuestion(
        model=catalog.model("llama3.1-70b"), cluster=place, weights=weight_format(precision, place.accelerator),
        cache=cache_format(precision, place.accelerator), context=CONTEXT, reserve=shipped_reserve(),
    )  # fmt: skip
    return float(capacities(asked)[0].max_sessions)


def _predicted(found: Claim) -> float:
    prediction = predict_claim(found) or predict_serving_claim(found)
    assert prediction is not None
    return prediction.value.value
