"""From a run and a place in its mesh to what a process trains: modules, optimizer, and the passes of a step.

Order matters: the model is built without memory, divided over the tensor and context axes, wrapped for recomputation,
sharded over the data axes, and only then given memory and weights. So no process ever holds more than its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.native.models import (
    Transformer,
    build_model,
    init_weights,
    materialize,
    take_load,
    update_bias,
)
from meshwright.engines.native.optimize import AdamW, masters_of
from meshwright.engines.native.parallel.context import chunks_of, divide_sequences
from meshwright.engines.native.parallel.mesh import TENSOR, Place
from meshwright.engines.native.parallel.pipeline import Pipeline, layers_of_stages, stages_of_rank
from meshwright.engines.native.parallel.shard import shard
from meshwright.engines.native.parallel.tensor import divide
from meshwright.engines.native.parallel.tied import tie
from meshwright.engines.native.recompute import recompute
from meshwright.engines.native.step import Accumulation, Stepper
from meshwright.engines.native.weights import load_weights
from meshwright.specs.model import Router
from meshwright.specs.run import Run

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What multiplies, by precision recipe."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """What one process trains. `modules` are its pipeline stages, one without a pipeline."""

    modules: list[Transformer]
    optimizer: AdamW
    stepper: Stepper
    num_parameters: int  # of the whole model
    data_group: dist.ProcessGroup | None  # processes that read different data
    follows_load: bool  # whether routing biases follow the experts' load

    def after_step(self) -> None:
        """What changes besides the weights: biases of routers that balance load with them."""
        if self.follows_load:
            for module in self.modules:
                update_bias(module, group=self.data_group)

    def after_refused_step(self) -> None:
        """Forget what the passes of a step counted that was not taken."""
        for module in self.modules:
            take_load(module)

    def state(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint holds; the live ones, to be written or read in place."""
        state = self.optimizer.state()
        for module in self.modules:
            kept = module.state_dict().keys()  # leaves out buffers that count only within a step
            state |= {f"buffers.{name}": buffer for name, buffer in module.named_buffers() if name in kept}
        return state

    def training(self) -> None:
        """Set the modules to train."""
        for module in self.modules:
            module.train()

    def evaluating(self) -> None:
        """Set the modules to evaluate: loads of experts are not counted."""
        for module in self.modules:
            module.eval()


def assemble(run: Run, *, place: Place, weights: Path | None = None) -> Assembly:
    """Build the part of `run`'s model that stands at `place`.

    Its weights are those of the Hugging Face folder `weights`, or first ones of the run's seed.
    """
    plan, compute = place.plan, COMPUTE[run.precision.name]
    stages = layers_of_stages(plan, num_layers=run.model.num_layers)
    modules = [
        _stage(run, stages=stages, index=index, place=place, compute=compute, weights=weights)
        for index in stages_of_rank(plan, place.pipeline_rank)
    ]
    tied = tie(modules, place=place)
    masters = masters_of(modules, compute=compute)
    optimizer = AdamW(
        masters if tied is None else [m for m in masters if m.parameter is not tied.head],
        settings=run.optimizer,
        is_alone=place.num_ranks == 1,
        follow=None if tied is None else tied.copy_weight,
    )
    optimizer.refresh()
    if plan.pipeline > 1:
        stepper: Stepper = Pipeline(
            modules,
            place=place,
            num_micro_batches=plan.num_micro_batches(run.global_batch),
            sequence_length=run.sequence_length,
            compute=compute,
            tied=tied,
        )
    else:
        stepper = Accumulation(modules[0], plan=plan)
    experts = run.model.experts
    follows_load = experts is not None and experts.router is Router.SIGMOID
    return Assembly(
        modules=modules,
        optimizer=optimizer,
        stepper=stepper,
        num_parameters=int(count_parameters(model_row(run.model)).total),
        data_group=place.data_group() if follows_load else None,
        follows_load=follows_load,
    )


def _stage(
    run: Run, *, stages: list[range], index: int, place: Place, compute: torch.dtype, weights: Path | None
) -> Transformer:
    ends = {"is_first": index == 0, "is_last": index == len(stages) - 1}
    module = build_model(run.model, layers=stages[index], **ends)
    blocks = list(module.layers.values())
    if place.plan.tensor > 1:
        divide(module, mesh=place.axes(TENSOR), sequence_parallel=place.plan.sequence_parallel)
    if place.context_mesh is not None:
        divide_sequences(module, chunks=chunks_of(place), mesh=place.context_mesh)
    recompute(blocks, plan=place.plan)
    if place.mesh is not None:
        shard(module, layers=blocks, place=place, compute=compute)
    materialize(module, device=place.device)
    if weights is None:
        init_weights(module, seed=run.train.seed)
    else:
        load_weights(module, weights)
    return module
