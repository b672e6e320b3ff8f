"""Memory of one device by part, as tables, figures and JSON documents name the parts."""

from __future__ import annotations

import numpy as np

from meshwright.cost.memory.peak import MemoryTable
from meshwright.specs.estimate import MemoryEstimate

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "workspace")
"""Parts of the allocated memory."""


def memory_parts(memory: MemoryTable | MemoryEstimate) -> dict[str, float]:
    """Bytes of each part on the fullest stage of one plan; their sum is the reserved memory."""

    def number(name: str) -> float:
        return float(np.ravel(np.asarray(getattr(memory, f"{name}_bytes")))[0])

    parts = {name: number(name) for name in MEMORY_PARTS}
    return parts | {"beside the allocator": number("reserved") - number("allocated")}
