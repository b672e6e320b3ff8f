"""The JSON document of `meshwright catalog claims`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshwright.result import Advance, ignore

if TYPE_CHECKING:
    from meshwright.catalog.lookup import Claim


def claims_document(*, predict: bool = False, advance: Advance = ignore) -> dict[str, Any]:
    """All claims. `advance(1)` is called after each."""
    from meshwright.catalog.lookup import all_claims

    found = all_claims()
    rows = []
    for claim in found:
        rows.append(claim_document(claim, predict=predict))
        advance(1)
    return {"claims": rows}


def claim_document(claim: Claim, *, predict: bool = False) -> dict[str, Any]:
    """A claim, its answer, and with `predict` its computed values (None: nothing yet)."""
    from meshwright.catalog.claim_answers import claim_answer

    answer = claim_answer(claim)
    document = {
        **asdict(claim),
        "answer": {"kind": answer.kind, "commands": answer.commands, "assumed": answer.assumed},
    }
    if predict:
        document["prediction"] = _prediction_document(claim)
    return document


def _prediction_document(claim: Claim) -> dict[str, Any] | None:
    from meshwright.errors import InfeasibleError
    from meshwright.inference.claims import predict_serving_claim
    from meshwright.planner.claims import predict_claim

    try:
        found = predict_claim(claim) or predict_serving_claim(claim)
    except InfeasibleError as error:
        return {"why_not": error.message}
    if found is None:
        return None
    return {"value": found.value, "over_printed": found.ratio, "is_inside": found.is_inside, "plans": found.plans}
