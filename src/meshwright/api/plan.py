"""`meshwright.plan`: rank all legal sharding plans of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.api.runs import Overrides, RunSource, given_run

if TYPE_CHECKING:
    from meshwright.answers.plan_ranking import PlanRanking

MAX_TOP = 100
MAX_SCORED = 100_000


def plan(
    run: RunSource | None = None,
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    cluster: str | Mapping[str, Any] | None = None,
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    global_sequences: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    engine: str | None = None,
    objective: str | None = None,
    overrides: Overrides = (),
    fixed: Mapping[str, Any] | str | None = None,
    why_not: Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str] = (),
    front: bool = False,
    neighbours: bool = False,
    switches: bool = False,
    top: int = 10,
    scored: int = 0,
) -> PlanRanking:
    """Search all legal sharding plans of a run and rank them. A plan that the run pins is ignored.

    Give either `run`, or `model`, `cluster`, `global_sequences` and `sequence_length`.

    Args:
        run: a `Run`, the path or shipped name of a run file, or its content.
        model: catalogue name, path of a Hugging Face config.json, OWNER/NAME on the hub, or shapes as in a run file.
        cluster: ACCELERATOR-GPUS_PER_NODExNODES, as in "h100-8x4", or a cluster as in a run file.
        accelerator: file of your own accelerator NAME, NAME.toml, for the cluster "NAME-8x4".
        network: network of a node in place of the usual one, as in "25Gb/s" or "8x400Gb/s RoCE".
        device_memory: memory of a device that the run may use, as in "40GiB".
        global_sequences: sequences per optimizer step, of the whole cluster.
        sequence_length: tokens per sequence.
        precision: number formats: "bf16" (default), "fp8", "mxfp8", ...
        engine: program that runs the step: "native" (default), "torchtitan", "megatron", "maxtext".
        objective: "throughput" (default), "time", "cost" or "energy".
        overrides: further keys of the run file, as {"costs.usd_per_device_hour": 2.5}.
        fixed: fields of every plan, as {"tensor": 8}.
        why_not: questions, each as {"tensor": 8}: why is no such plan the best?
        front: also return the plans that trade step time for memory.
        neighbours: also search batch sizes and numbers of devices near the run's, and return the faster ones.
        switches: also try other switches of software for the first plan, and return the faster ones.
        top: number of plans to return, 1 to 100.
        scored: number of scored plans to list too, for `to_scored_rows`, `write_csv` and `write_html`; 0: none.

    Returns:
        The plans, best first, each with step time, throughput, MFU, their 80 % intervals, and memory.

    Raises:
        InputError: an argument is wrong, missing, or given twice, or the engine does not run the model or precision.
        UnknownNameError: a name is not in the catalogue.
        InfeasibleError: no plan is legal and fits in memory.

    Example:
        >>> import meshwright as mw
        >>> plans = mw.plan(
        ...     model="llama3.1-8b", cluster="h100-8x4", global_sequences=512, sequence_length=8192, top=3
        ... )
        >>> len(plans), plans.best.plan.num_devices, plans.best.step.step.unit
        (3, 32, 's')
    """
    from meshwright.answers.plan_ranking import plan_run

    resolved = given_run(
        run, overrides=overrides, model=model, cluster=cluster, accelerator=accelerator, network=network,
        device_memory=device_memory, global_sequences=global_sequences,
        sequence_length=sequence_length, precision=precision, engine=engine, objective=objective,
    )  # fmt: skip
    return plan_run(
        resolved,
        top=arguments.count("top", top, most=MAX_TOP),
        fixed=arguments.plan_fields("fixed", {} if fixed is None else fixed),
        questions=arguments.questions(why_not),
        with_front=arguments.flag("front", front),
        with_neighbours=arguments.flag("neighbours", neighbours),
        with_switches=arguments.flag("switches", switches),
        num_scored=arguments.count("scored", scored, most=MAX_SCORED, least=0),
    )
