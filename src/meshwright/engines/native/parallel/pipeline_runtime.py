"""Passes of a pipeline in the order of the planner's table, run by PyTorch.

`cost.pipeline.schedules` has the order of passes of every rank. PyTorch's pipeline runtime receives that table and
adds communication: sends, receives, FSDP's gathers and its one reduction a stage. So the simulated schedule is the
one that runs, and the two cannot drift apart.

    F  forward    B  backward    I  gradient of the input    W  gradient of the weights

Where B is split, I of the first stage does nothing (its result is unused) and its W is the whole backward pass.
The wait for a receive, at the begin of F, B and I, is a range of its own in a profile (`profiling.categories.WAIT`).

PyTorch 2.13 calls that runtime internal and documents that it accepts a table; `_runtime` raises a clear error where
a release has moved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.cost.pipeline.orders import OpKind, RankOrder
from meshwright.cost.pipeline.schedules import PipelineShape, rank_orders
from meshwright.errors import MissingDependencyError
from meshwright.training.profiling.categories import WAIT

if TYPE_CHECKING:
    from torch.distributed import Work
    from torch.distributed.pipelining import PipelineStage

LETTERS = {OpKind.FORWARD: "F", OpKind.BACKWARD: "B", OpKind.BACKWARD_INPUT: "I", OpKind.BACKWARD_WEIGHT: "W"}
IN_BACKWARD = {"B", "I", "W", "SEND_B", "RECV_B", "REDUCE_GRAD"}
NEEDED = ("_prepare_schedule_with_comms", "step", "eval")


class PipelineRuntime:
    """Runs the stages of one rank in the order of a table; raises MissingDependencyError where PyTorch cannot."""

    def __init__(
        self, shape: PipelineShape, stages: Sequence[PipelineStage], *, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        module = _runtime()
        # The scale of the loss includes the tokens of the whole step, so PyTorch's own division is off.
        self.runtime = module._PipelineScheduleRuntime(
            list(stages), shape.num_micro_batches, loss_fn=loss, scale_grads=False
        )
        order = {
            rank: [module._Action.from_str(word) for word in action_names(order)]
            for rank, order in enumerate(rank_orders(shape))
        }
        self.runtime._prepare_schedule_with_comms(order)
        self.runtime.fwd_recv_ops, self.runtime.bwd_recv_ops = _Receives(), _Receives()
        self.both = self.runtime.pipeline_order_with_comms
        self.forward = {
            rank: [a for a in actions if a.computation_type.value not in IN_BACKWARD]
            for rank, actions in self.both.items()
        }

    def forward_backward(self, *inputs: Tensor, **given: Any) -> None:
        """Run all passes and accumulate gradients."""
        self.runtime.pipeline_order_with_comms = self.both
        self.runtime.step(*inputs, return_outputs=False, **given)

    def forward_only(self, *inputs: Tensor, **given: Any) -> None:
        """Run the forward passes, in the same order."""
        self.runtime.pipeline_order_with_comms = self.forward
        self.runtime.eval(*inputs, return_outputs=False, **given)


class _Receives(dict[tuple[int, int], "list[Work]"]):
    """Receives by stage and micro-batch, which a pass takes out when it needs them. The wait is a range of its own.

    What a pass takes out has arrived: nothing is left for the runtime to wait for.
    """

    def pop(self, *key: Any) -> list[Work]:
        works = super().pop(*key)
        with record_function(WAIT):
            for work in works:
                work.wait()
        return []


def action_names(order: RankOrder) -> list[str]:
    """A rank's passes in PyTorch's notation: stage, pass, micro-batch.

    >>> from meshwright.specs.plan import Schedule
    >>> shape = PipelineShape(schedule=Schedule.ZERO_BUBBLE, num_ranks=2, num_micro_batches=2)
    >>> [" ".join(action_names(order)) for order in rank_orders(shape)]
    ['0F0 0F1 0I0 0W0 0I1 0W1', '1F0 1I0 1F1 1I1 1W0 1W1']
    """
    columns = (order.stage.tolist(), order.kind.tolist(), order.micro_batch.tolist())
    return [f"{stage}{LETTERS[OpKind(kind)]}{micro}" for stage, kind, micro in zip(*columns, strict=True)]


def _runtime() -> Any:
    module = import_module("torch.distributed.pipelining.schedules")
    runtime = getattr(module, "_PipelineScheduleRuntime", None)
    if not hasattr(module, "_Action") or not all(hasattr(runtime, name) for name in NEEDED):
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} has no pipeline runtime that takes a table of passes",
            hint="pip install 'torch==2.13.*'; or train without a pipeline",
        )
    return module
