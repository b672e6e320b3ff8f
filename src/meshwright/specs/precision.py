"""Named number-format recipes and the bytes each tensor class takes under them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number format of the GEMMs, and bytes of a parameter, gradient and optimizer state.

    `matmul` is the format of the linear layers' GEMMs (a key of `Accelerator.peak_flops_per_s`); attention
    and everything else stay in 16 bits. `weight_cache_bytes` is a quantised copy kept in addition to the 16-bit weight.
    """

    name: str
    matmul: str
    weight_bytes: float = 2.0
    weight_cache_bytes: float = 0.0
    grad_bytes: float = 4.0  # main gradients, as they are accumulated and reduced
    master_bytes: float = 4.0
    optimizer_state_bytes: float = 8.0  # all states of a parameter together: two of Adam
    adamw_state_bytes: float = 0.0  # more of embedding, head and vectors, where AdamW updates them beside Muon
    update_bytes: float = 34.0  # read and written by an update of a parameter (`specs.optimizers`)
    newton_schulz_steps: float = 0.0  # of Muon
    gather_bytes: float = 2.0  # per parameter on the wire in an FSDP or ZeRO gather
    reduce_bytes: float = 4.0  # per gradient on the wire
    dispatch_bytes: float = 2.0  # per element of a token sent to an expert
    linear_input_bytes: float = 2.0  # per element of a linear layer's saved input
    cast_passes: float = 0.0  # share of operands that a kernel of its own quantises (read 16 bits, write twice)
    amax_passes: float = 0.0  # 1: such a kernel follows one that reads all values for their scale
    fitted_as: str = ""  # recipe whose measurements calibrate this one; empty: its own


def _recipe(name: str, matmul: str, *, fitted_as: str = "", **changes: float) -> Precision:
    return Precision(name=name, matmul=matmul, fitted_as=fitted_as, **changes)


STATE_BLOCK = 256
"""Values that share one fp32 scale when optimizer states are stored in 8 bits."""

OPTIMIZER_STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 * (1 + 4 / STATE_BLOCK)}
"""Bytes of both Adam states of a parameter, by the format in which they are stored."""

PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        _recipe("fp32", "fp32", weight_bytes=4, master_bytes=0, gather_bytes=4, linear_input_bytes=4, dispatch_bytes=4),
        _recipe("bf16", "bf16"),
        # The same units and rate as bf16 on every catalogued accelerator; gradients are kept as they come.
        _recipe("fp16", "bf16", grad_bytes=2, reduce_bytes=2),
        # A scale per tensor from its own values: no kernel that writes an operand knows it yet.
        _recipe("fp8", "fp8", linear_input_bytes=1, cast_passes=1.0, amax_passes=1),
        # A scale per tensor from earlier steps: norms and activations write their outputs in 8 bits.
        _recipe("fp8_delayed", "fp8", linear_input_bytes=1, cast_passes=0.5, fitted_as="fp8"),
        _recipe("fp8_rowwise", "fp8", linear_input_bytes=1, cast_passes=1.0, amax_passes=1),  # a scale per row, torchao
        _recipe("fp8_blockwise", "fp8", linear_input_bytes=1, cast_passes=1.0),  # 1x128 and 128x128 blocks
        _recipe("mxfp8", "fp8", linear_input_bytes=1, cast_passes=1.0),  # 1x32 blocks, OCP MX
        _recipe("nvfp4", "fp4", linear_input_bytes=0.5625, cast_passes=1.5),  # 1x16 blocks, fp8 scales
        _recipe("mxfp4", "fp4", linear_input_bytes=0.53125, cast_passes=1.5),
    )
}
"""All recipes by name. Byte counts follow the Megatron-Core mixed-precision layout (16-bit weights, fp32 main
gradients, fp32 master weights and optimizer states); other layouts are made with `dataclasses.replace`."""
