"""The JSON document of `meshwright bench train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.bench.training_summary import Summary


def sweep_document(
    found: Sequence[Summary], *, path: Path, sidecar: Mapping[str, Any], page: Path | None = None
) -> dict[str, Any]:
    """Each configuration measured and predicted, engines compared, and the errors of the predictions."""
    from meshwright.bench.training_summary import contests, verdict

    return {
        "records": path,
        "device": sidecar["device"],
        "configurations": found,
        "engines": contests(found),
        "verdict": verdict(found),
        "page": page,
    }
