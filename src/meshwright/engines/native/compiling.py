"""torch.compile, one layer at a time: equal layers share one graph, so a deep model compiles as fast as a shallow one.

The layer's forward method is compiled, inside of its full recomputation and of FSDP's hooks, outside of everything in
it: norms, projections, attention and feed-forward become one graph. Embedding, head and loss stay eager: the loss is
chunked to save memory, which a compiler would undo. Under context parallelism, and with experts where they or tensors
are sharded, a layer communicates by data: it compiles into several graphs.

The first step compiles and is not in the step statistics.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.engines.native import fp8
from meshwright.engines.native.parallel.fsdp import needs_fsdp
from meshwright.engines.native.recompute import uses_checkpoint
from meshwright.errors import MissingDependencyError
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run, has_dropout
from meshwright.training.models import Block
from meshwright.training.models.feed_forward import FeedForward


def import_compiler(run: Run, *, plan: Plan) -> None:
    """Import what the first step would: PyTorch's compiler, 95 MiB of every process, and what generates code, 45 MiB.

    Distributed tensors come with them where states or matrices are sharded, or saved. Before the memory of the process
    is measured, which a prediction begins with. Besides compiled layers, PyTorch's checkpoints, FSDP and tensor
    parallelism import the compiler.
    """
    if run.train.checkpoint is not None:
        import_module("meshwright.training.checkpoints.writing")
    is_sharded = plan.tensor > 1 or needs_fsdp(plan)
    if is_sharded:
        import_module("torch.distributed.tensor.parallel")
    if run.train.compile:
        import_module("torch._inductor.compile_fx")
    elif is_sharded or uses_checkpoint(plan, has_dropout=has_dropout(run)):
        import_module("torch._dynamo")


def compile_layers(layers: Sequence[nn.Module], *, plan: Plan) -> None:
    """Compile each of `layers` at its first call. Those that can be one graph must become one: a break is an error."""
    for layer in layers:
        assert isinstance(layer, Block)
        # A graph must not wait for numbers from the device.
        has_own_rows = isinstance(layer.ffn, FeedForward) or plan.expert * plan.expert_tensor * plan.tensor == 1
        layer.forward = _prepared(torch.compile(layer.forward, fullgraph=has_own_rows and plan.context == 1), layer)


def _prepared(compiled: Callable[..., Tensor], layer: Block) -> Callable[..., Tensor]:
    """Do what a graph cannot, then run the graph.

    Weights in 8 bits that are kept for a step are cast, which a graph would do in every pass. An asynchronous input is
    waited for: under tensor parallelism the first layer's is a collective under way, to which a compiled function
    passes no gradient.
    """

    def run(x_BTD: Tensor, *others: Any) -> Tensor:
        fp8.fill_caches(layer)
        return compiled(x_BTD if type(x_BTD) is Tensor else x_BTD.clone(), *others)

    return run


def require(run: Run, *, device: torch.device) -> None:
    """Raise MissingDependencyError where `run` compiles and PyTorch's compiler backend is absent: C++ on a CPU, Triton
    on a GPU."""
    if run.train.compile:
        what, hint = "train.compile", "--set train.compile=false"
    elif run.optimizer.name == "adamw8bit":
        what, hint = "optimizer adamw8bit", "--set optimizer.name=adamw --set optimizer.states=int8"
    else:
        return
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise MissingDependencyError(
                f"{what} needs a C++ compiler on a CPU: {compiler} is not there",
                hint=f"apt-get install g++; or name another one with CXX=...; or {hint}",
            )
    elif find_spec("triton") is None:
        raise MissingDependencyError(f"{what} needs Triton on this device", hint=f"pip install triton; or {hint}")
