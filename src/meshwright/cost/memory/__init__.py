"""Bytes per device on the fullest pipeline rank: weights, gradients, optimizer states, activations, workspaces.

`states` counts the tensors that outlive a micro-batch, `activations` the tensors that one layer keeps for its
backward pass. `peak` adds them up on the ranks that can be the fullest. `constants` reads the properties of a
software stack and its measured values.
"""

from meshwright.calibration.memory import MemoryConstants, memory_constants
from meshwright.cost.memory.parts import MEMORY_PARTS, memory_parts
from meshwright.cost.memory.peak import MemoryTable, estimate_memory, loss_chunks, memory_details
