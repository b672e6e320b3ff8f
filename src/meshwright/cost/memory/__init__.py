"""Bytes per device on the fullest pipeline rank: weights, gradients, optimizer states, activations, workspaces.

`states` counts what outlives a micro-batch, `activations` what one layer keeps for its backward pass, `peak` adds
them up on the ranks that can be the fullest, `constants` reads what a software stack does and what was measured.
"""

from meshwright.calibration.memory import MemoryConstants, memory_constants
from meshwright.cost.memory.parts import MEMORY_PARTS, memory_parts
from meshwright.cost.memory.peak import MemoryTable, estimate_memory, loss_chunks, memory_details

__all__ = [
    "MEMORY_PARTS",
    "MemoryConstants",
    "MemoryTable",
    "estimate_memory",
    "loss_chunks",
    "memory_constants",
    "memory_details",
    "memory_parts",
]
