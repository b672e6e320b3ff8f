"""Conditions of all Triton routes: the calls that they serve, Triton's interpreter, launching."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.routes import KernelCall, Refusal
from meshwright.programs import install_command

OLDEST = (3, 4)
"""The Triton of PyTorch 2.8; tile choices and `tl` functions of this room exist since."""

NUMPY_WITHOUT_CONVERSION = (2, 4)
"""The first NumPy that makes no number of an array with one element."""
INTERPRETER_WITHOUT_CONVERSION = (3, 7)
"""The first Triton whose interpreter does not need that."""

FORMATS = frozenset({"float32", "bfloat16", "float16"})


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1)."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def interpreter_fault() -> str | None:
    """Return why the installed Triton's interpreter does not run; None if it does, or is absent."""
    if find_spec("triton") is None:
        return None
    triton, numpy = _version_of("triton"), _version_of("numpy")
    if triton >= INTERPRETER_WITHOUT_CONVERSION or numpy < NUMPY_WITHOUT_CONVERSION:
        return None
    return f"the interpreter of Triton {triton[0]}.{triton[1]} needs a NumPy older than 2.4: pip install 'numpy<2.4'"


def _version_of(package: str) -> tuple[int, int]:
    major, minor, *_ = version(package).split(".")
    return int(major), int(minor)


def serves_triton(call: KernelCall) -> Refusal | None:
    """Refuse where Triton is absent or too old, on a CPU outside the interpreter, and formats that kernels lack."""
    if find_spec("triton") is None:
        return Refusal(reason=f"Triton is not installed: {install_command('kernels')}")
    major, minor = _version_of("triton")
    if (major, minor) < OLDEST:
        return Refusal(reason=f"Triton {major}.{minor} is older than {OLDEST[0]}.{OLDEST[1]}")
    if call.device == "cpu" and not is_interpreted():
        return Refusal(reason="Triton runs on a CPU only in its interpreter (TRITON_INTERPRET=1)")
    if is_interpreted() and (fault := interpreter_fault()):
        return Refusal(reason=fault)
    if call.device not in ("cpu", "cuda"):
        return Refusal(reason=f"no kernels for devices of type {call.device}")
    if "subclass" in call.flags:
        return Refusal(reason="a tensor is sharded or otherwise no plain tensor")
    if "forward_mode" in call.flags:  # PyTorch would take their derivatives as zero
        return Refusal(reason="kernels have no derivatives in forward mode")
    others = set(call.dtypes) - FORMATS - {"int64", "int32", "bool", "uint8"}
    if others:
        return Refusal(reason=f"no kernels for {', '.join(sorted(others))}")
    return None


def contiguous_rows(x: Tensor) -> Tensor:
    """Return `x` if its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, on: Tensor, **constants: Any) -> None:
    """Launch a Triton kernel on the device of `on`. An empty grid launches nothing."""
    if 0 in grid:
        return
    with torch.cuda.device(on.device) if on.device.type == "cuda" else nullcontext():
        kernel[tuple(grid)](*arguments, **constants)
