"""Linear layers that multiply in fp8, through torchao.

    fp8           one scale a tensor; values e4m3, gradients e5m2
    fp8_rowwise   one scale a row, a power of two; e4m3 throughout

Scaling is dynamic: scales follow from the tensor that is cast. Every linear layer of a block is converted: attention,
dense and shared feed-forward; embedding, router, head and routed experts stay as they are. Weights, masters and
communication are those of bf16: operands are cast to fp8 before each GEMM, which accumulates in fp32.

On a CPU torchao emulates: operands are rounded to fp8 and multiplied in fp32. That is for tests of numerics;
`require` refuses to train that way. Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from meshwright.errors import InputError, MissingDependencyError
from meshwright.specs.precision import Precision
from meshwright.specs.run import Run
from meshwright.training.device import FP8_DEVICES, device_name, multiplies_fp8

RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
"""torchao's name of each recipe."""


def require(precision: Precision, *, device: torch.device) -> None:
    """Raise InputError when `precision` is fp8 and `device` does not multiply it, MissingDependencyError without
    torchao."""
    if precision.name not in RECIPES:
        return
    if not multiplies_fp8(device):
        raise InputError(
            f"precision {precision.name} needs a GPU that multiplies fp8",
            got=device_name(device),
            allowed=FP8_DEVICES,
            hint="train on this device with --set precision=bf16",
        )
    if find_spec("torchao") is None:
        raise MissingDependencyError(
            f"precision {precision.name} needs torchao", hint="pip install 'meshwright[fp8]'"
        )


def convert(blocks: list[nn.Module], *, precision: Precision, device: torch.device) -> None:
    """Convert all linear layers of `blocks` to `precision`, in place.

    Call before the layers are sharded or wrapped, whose hooks are attached to the layers that compute.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(RECIPES[precision.name])
    config = replace(config, emulate=device.type == "cpu")
    for block in blocks:
        convert_to_float8_training(block, config=config)


def notes(run: Run) -> list[str]:
    """Notes for the record."""
    if run.precision.name not in RECIPES or run.model.experts is None:
        return []
    return [
        f"routed experts multiply in bf16; the MFU is a share of the {run.precision.matmul} peak all the same"
    ]
