"""Adapters of kernel libraries that are installed or not: Liger, NVIDIA's Transformer Engine, AMD's AITER.

An adapter has the signature of its operation's routes. A library is imported by the call, never by this package.
"""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.kernels.routes import KernelCall, Refusal


def absent(package: str, *, project: str) -> Refusal | None:
    """Refuse where the package of a `project` on PyPI is not installed."""
    if find_spec(package) is not None:
        return None
    return Refusal(reason=f"{project} is not installed: pip install {project}")


def unfit(call: KernelCall, *, package: str, project: str, vendor: str, architectures: str) -> Refusal | None:
    """Refuse a library of one vendor's GPUs: absent, another device, a traced graph, a sharded tensor.

    `architectures` is how the names of its architectures begin.
    """
    if call.device != "cuda" or not call.architecture.startswith(architectures):
        return Refusal(reason=f"for GPUs of {vendor}")
    if "subclass" in call.flags:
        return Refusal(reason="a tensor is sharded or otherwise no plain tensor")
    return absent(package, project=project) or untraced(call)


def untraced(call: KernelCall) -> Refusal | None:
    """Refuse while a graph is traced: the library's functions are no operators that a graph can hold."""
    return None if call.shapes else Refusal(reason="works outside of traced graphs")


def unfit_attention(call: KernelCall) -> Refusal | None:
    """Refuse attention other than plain causal attention in 16 bits."""
    if others := call.flags & {"ranges", "sinks", "cap"}:
        return Refusal(reason=f"called without {', '.join(sorted(others))}")
    if not set(call.dtypes) <= {"bfloat16", "float16"}:
        return Refusal(reason="it computes in 16 bits")
    return None
