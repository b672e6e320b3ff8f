"""Numbers of the source documents: those that the sentences of `slips.toml` hold, and what fills a device of 288 GiB.

Each is from the catalogue, published results or arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.catalog import lookup as catalog
from meshwright.catalog.claim_answers import claim_answer
from meshwright.catalog.lookup import Claim, claim
from meshwright.catalog.mlperf_results import mlperf_result
from meshwright.inference.capacity import Capacity, CapacityQuestion, capacities, shipped_reserve
from meshwright.inference.claims import predict_serving_claim, published_replica_ratios
from meshwright.inference.formats import cache_format, weight_format
from meshwright.planner.claims import predict_claim, predicted_memory
from meshwright.units import GB, GIB, PETA, TERA

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
    return float(_held("llama3.1-70b", accelerator, precision, precision, CONTEXT).max_sessions)


def _held(model: str, accelerator: str, precision: str, cache: str, context: int) -> Capacity:
    """The best capacity of one device."""
    place = catalog.cluster(f"{accelerator}-1x1")
    asked = CapacityQuestion(
        model=catalog.model(model), cluster=place, weights=weight_format(precision, place.accelerator),
        cache=cache_format(cache, place.accelerator), context=context, reserve=shipped_reserve(),
    )  # fmt: skip
    return capacities(asked)[0]


def _predicted(found: Claim) -> float:
    prediction = predict_claim(found) or predict_serving_claim(found)
    assert prediction is not None
    return prediction.value.value


SHORT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One bar: parts in GiB, and how they are computed."""

    name: str
    parts_gib: dict[str, float]
    how: str


def memory_rows() -> list[MemoryCase]:
    """The cases of the documents, in their order."""
    printed = claim("s65_14").value
    return [
        _served("405B, FP4, one session of 8 K", "llama3.1-405b", "fp4", "fp8", SHORT_CONTEXT, 1),
        _served("70B, 16 bits, two of 128 K", "llama3.1-70b", "bf16", "bf16", CONTEXT, 2),
        _served("70B, FP8, two of 128 K", "llama3.1-70b", "fp8", "fp8", CONTEXT, 2),
        MemoryCase(
            name="570 B parameters, FP4",
            parts_gib={"weights": printed * MXFP4_BYTES / GIB},
            how="17/32 bytes each: nothing is left for a cache or the engine",
        ),
        _adapters(),
    ]


def _served(name: str, model: str, precision: str, cache: str, context: int, num_sessions: int) -> MemoryCase:
    best = _held(model, "mi355x", precision, cache, context)
    session = best.device.cache / best.max_tokens * context
    return MemoryCase(
        name=name,
        parts_gib={
            "weights": best.device.weights / GIB, "cache": num_sessions * session / GIB,
            "kept back": (best.device.total - best.device.weights - best.device.cache) / GIB,
        },
        how=f"{best.max_sessions} sessions of {context:,} tokens fit",
    )  # fmt: skip


def _adapters() -> MemoryCase:
    asked = claim_answer(claim("s65_16")).run
    assert asked is not None
    memory, plan = predicted_memory(asked)
    return MemoryCase(
        name="70B, FP8, training adapters",
        parts_gib={
            "weights": memory.weights_bytes / GIB,
            "adapters and optimizer": (memory.gradients_bytes + memory.optimizer_bytes) / GIB,
            "activations": memory.activations_bytes / GIB,
            "kept back": (memory.reserved_bytes - memory.weights_bytes - memory.gradients_bytes
                          - memory.optimizer_bytes - memory.activations_bytes) / GIB,
        },
        how=f"8 sequences of 8,192 tokens a step, {plan}",
    )  # fmt: skip
