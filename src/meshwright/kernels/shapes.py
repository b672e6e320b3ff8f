"""Refuse tensors of a call that do not fit together: a kernel would read past their ends.

A name's suffix has a letter for each dimension: `k_BSGK` has four, and its K equals the K of `q_BTHK`. A
digit is a size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.errors import InputError


def require_shapes(op: str, **tensors: Tensor | None) -> None:
    """Raise InputError unless tensors have the dimensions of their names; None is left out.

    >>> import torch
    >>> require_shapes("loss", h_ND=torch.zeros(5, 4), weight_VD=torch.zeros(9, 3))
    Traceback (most recent call last):
    meshwright.errors.InputError: loss: D of weight_VD has another size: got 3, allowed: 4
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        letters = name.rpartition("_")[2]
        if tensor.dim() != len(letters):
            raise InputError(
                f"{op}: {name} has another number of dimensions", got=tuple(tensor.shape), allowed=len(letters)
            )
        for letter, size in zip(letters, tensor.shape, strict=True):
            known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if size != known:
                raise InputError(f"{op}: {letter} of {name} has another size", got=size, allowed=known)


def require_alike(op: str, **tensors: Tensor) -> None:
    """Raise InputError unless all tensors have one shape and one format.

    >>> import torch
    >>> require_alike("swiglu", gate=torch.zeros(5, 4), up=torch.zeros(1, 4))
    Traceback (most recent call last):
    meshwright.errors.InputError: swiglu: gate and up differ: got (5, 4) and (1, 4)
    """
    shapes, formats = [t.shape for t in tensors.values()], [t.dtype for t in tensors.values()]
    for found in ([tuple(shape) for shape in shapes], formats):
        if any(one != found[0] for one in found):
            raise InputError(f"{op}: {' and '.join(tensors)} differ{_listed(found)}")


def require_format(op: str, **tensors: Tensor) -> None:
    """Raise InputError unless all tensors have one format."""
    formats = [t.dtype for t in tensors.values()]
    if any(one != formats[0] for one in formats):
        raise InputError(f"{op}: formats of {', '.join(tensors)} differ{_listed(formats)}")


def _listed(found: Sequence[object]) -> str:
    return ": got " + " and ".join(map(str, found))
