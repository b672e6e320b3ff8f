"""Memory arithmetic of the source documents: what fills one device of 288 GiB."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.answers.sources.facts import CONTEXT, MXFP4_BYTES
from meshwright.catalog import lookup as catalog
from meshwright.catalog.claim_answers import claim_answer
from meshwright.catalog.lookup import claim
from meshwright.inference.capacity import CapacityQuestion, capacities, shipped_reserve
from meshwright.inference.formats import cache_format, weight_format
from meshwright.planner.claims import predicted_memory
from meshwright.units import GIB

SHORT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One bar: parts in GiB, and how they are computed."""

    name: str
    parts_gib: dict[str, float]
    how: str


def memory_rows() -> list[MemoryCase]:
    """The cases of the documents, in their order."""
    return [
        _served("405B, FP4, one session of 8 K", "llama3.1-405b", "fp4", "fp8", SHORT_CONTEXT, 1),
        _served("70B, 16 bits, two of 128 K", "llama3.1-70b", "bf16", "bf16", CONTEXT, 2),
        _served("70B, FP8, two of 128 K", "llama3.1-70b", "fp8", "fp8", CONTEXT, 2),
        _parameters(),
        _adapters(),
    ]


def _served(name: str, model: str, precision: str, cache: str, context: int, num_sessions: int) -> MemoryCase:
    place = catalog.cluster("mi355x-1x1")
    question = CapacityQuestion(
        model=catalog.model(model), cluster=place, weights=weight_format(precision, place.accelerator),
        cache=cache_format(cache, place.accelerator), context=context, reserve=shipped_reserve(),
    )  # fmt: skip
    best = capacities(question)[0]
    session = best.device.cache / best.max_tokens * context
    return MemoryCase(
        name=name,
        parts_gib={
            "weights": best.device.weights / GIB, "cache": num_sessions * session / GIB,
            "kept back": (best.device.total - best.device.weights - best.device.cache) / GIB,
        },
        how=f"{best.max_sessions} sessions of {context:,} tokens fit",
    )  # fmt: skip


def _parameters() -> MemoryCase:
    printed = claim("s65_14").value
    return MemoryCase(
        name="570 B parameters, FP4", parts_gib={"weights": printed * MXFP4_BYTES / GIB},
        how="17/32 bytes each: nothing is left for a cache or the engine",
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
