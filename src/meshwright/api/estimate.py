"""`meshwright.estimate` and `estimate_memory`: one plan of a run; memory of training a model, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import AnyName, Count, Flag, OneOf, answered_by_body, question
from meshwright.api.runs import OVERRIDES, RUN, Overrides, RunSource
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.plan import Sharding
from meshwright.specs.precision import PRECISIONS

if TYPE_CHECKING:
    from meshwright.answers.model_memory import ModelMemory
    from meshwright.answers.run_estimate import RunEstimate


@question("meshwright.answers.run_estimate:estimate_run", is_about_run=True)
def estimate(run: Annotated[RunSource, RUN], *, overrides: Annotated[Overrides, OVERRIDES] = ()) -> RunEstimate:
    """Estimate the run's plan: step time by component, memory by part, the whole training.

    The planner's best plan is estimated if the run leaves its plan open (`parallel: auto`).

    Returns:
        Estimates with their 80 % intervals, memory of the fullest stage, goodput, cost and energy.

    Raises:
        InputError: the run file or an override is wrong.
        InfeasibleError: no plan is possible, or the pinned one is illegal or does not fit.

    Example:
        >>> import meshwright as mw
        >>> done = mw.estimate("llama3-8b")
        >>> done.step.unit, done.step.low <= done.step.value <= done.step.high, done.memory.fits
        ('s', True, True)
    """
    return answered_by_body()


@question("meshwright.answers.model_memory:model_memory")
def estimate_memory(
    *,
    model: Annotated[
        str | os.PathLike[str], AnyName("Catalogue name, path of a Hugging Face config.json, or OWNER/NAME on its hub.")
    ],
    sequence_length: Annotated[
        Sequence[int], Count("Tokens of a sequence.", flag="--seq", metavar="TOKENS", least=1, is_joined=True)
    ] = (4096,),
    micro_batch: Annotated[
        Sequence[int], Count("Sequences that a device computes at once.", least=1, is_joined=True)
    ] = (1,),
    precision: Annotated[Sequence[str], OneOf("Number formats.", values=tuple(PRECISIONS), least=1, is_joined=True)] = (
        "fp32",
        "bf16",
        "fp8",
    ),
    optimizer: Annotated[
        Sequence[str],
        OneOf("Optimizers.", values=tuple(OPTIMIZERS), unset="all on one device, adamw on several", is_joined=True),
    ] = (),
    lora_rank: Annotated[
        Sequence[int],
        Count("Rank of low-rank adapters; 0: every parameter is trained.", low=0, least=1, is_joined=True),
    ] = (0, 16),
    devices: Annotated[int, Count("Data-parallel devices.")] = 1,
    sharding: Annotated[
        Sequence[str],
        OneOf(
            "What these devices share: nothing, optimizer states (ZeRO-1), gradients too (ZeRO-2), parameters too "
            "(ZeRO-3, FSDP).",
            values=tuple(stage.name.lower() for stage in Sharding),
            unset="each on several devices",
            is_joined=True,
        ),
    ] = (),
    offload_optimizer: Annotated[
        bool, Flag("Keep optimizer states, and masters that FSDP does not shard, in host memory.")
    ] = False,
) -> ModelMemory:
    """Estimate the memory of training a model by number format, optimizer and sharding. It needs no cluster.

    The cost model of `estimate` gives the bytes of the native engine, in a step of several micro-batches.

    Returns:
        Bytes of a device by part for every combination, and bytes in host memory.

    Raises:
        InputError: an argument is wrong, or there is no such model.

    Example:
        >>> import meshwright as mw
        >>> found = mw.estimate_memory(model="llama3.1-8b", precision=["bf16"], devices=8)
        >>> [(row.sharding.name, round(row.total_bytes / 2**30)) for row in found.rows if not row.lora_rank]
        [('NONE', 157), ('OPTIMIZER', 78), ('GRADIENTS', 52), ('PARAMETERS', 41)]
    """
    return answered_by_body()
