"""Requests to the planner that several test files make, by names of the catalogue."""

from __future__ import annotations

from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_for_engine
from meshwright.planner.request import PlanRequest
from meshwright.specs.precision import PRECISIONS


def plan_request(
    model: str = "llama3.1-8b",
    cluster: str = "h100-8x1",
    *,
    engine: str = "native",
    precision: str = "bf16",
    seq_len: int = 8192,
    global_batch: int = 64,
    **more: Any,
) -> PlanRequest:
    """Return a request with the usual stack of `engine`; `more` are fields of `PlanRequest`."""
    return PlanRequest(
        model=catalog.model(model),
        cluster=catalog.cluster(cluster),
        seq_len=seq_len,
        global_batch=global_batch,
        precision=PRECISIONS[precision],
        stack=stack_for_engine(engine),
        engine=engine,
        **more,
    )
