"""torch.compile, one layer at a time: equal layers share one graph, so a deep model compiles as fast as a shallow one.

The layer's forward method is compiled, inside of its full recomputation and of FSDP's hooks, outside of everything in
it: norms, projections, attention and feed-forward become one graph. Embedding, head and loss stay eager: the loss is
chunked to save memory, which a compiler would undo. A layer with experts or context parallelism counts, sorts and
communicates by data: it compiles into several graphs.

The first step compiles and is not in the step statistics.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MissingDependencyError
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.models import Block
from meshwright.training.models.feed_forward import FeedForward


def compile_layers(layers: Sequence[nn.Module], *, plan: Plan) -> None:
    """Compile each of `layers` at its first call. Dense ones must become one graph: a break is an error."""
    for layer in layers:
        assert isinstance(layer, Block)
        is_whole = isinstance(layer.ffn, FeedForward) and plan.context == 1
        layer.forward = _on_plain_input(torch.compile(layer.forward, fullgraph=is_whole))


def _on_plain_input(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wait for an asynchronous input before `forward`. Under tensor parallelism the first layer's input is a collective
    under way, to which a compiled function passes no gradient."""

    def run(x_BTD: Tensor, *others: Any) -> Tensor:
        return forward(x_BTD if type(x_BTD) is Tensor else x_BTD.clone(), *others)

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
        raise MissingDependencyError(
            f"{what} needs Triton on this device",
            hint=f"pip install triton; or {hint}",
        )
