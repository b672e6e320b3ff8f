"""`meshwright.scale`: efficiency, time to train, failures, energy and cost as devices are added."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwright.api import runs
from meshwright.api.question import Amount, Count, Flag, OneOf, answered_by_body, question
from meshwright.api.runs import Overrides, RunSource
from meshwright.specs.hardware import MAX_DEVICES

if TYPE_CHECKING:
    from meshwright.answers.scale_study import ScaleReport


@question("meshwright.answers.scale_study:scale_of_run", is_about_run=True)
def scale(
    run: Annotated[RunSource | None, runs.RUN] = None,
    *,
    devices: Annotated[
        Sequence[int],
        Count(
            "Numbers of devices; the smallest is the base of the efficiency.",
            unset="1 to 16 times the cluster",
            high=MAX_DEVICES,
            is_joined=True,
        ),
    ] = (),
    mode: Annotated[
        Literal["strong", "weak"],
        OneOf(
            "Strong scaling keeps the global batch; weak scaling grows it with the devices.", values=("strong", "weak")
        ),
    ] = "strong",
    model: Annotated[str | os.PathLike[str] | Mapping[str, Any] | None, runs.MODEL] = None,
    cluster: Annotated[str | Mapping[str, Any] | None, runs.CLUSTER] = None,
    accelerator: Annotated[str | os.PathLike[str] | None, runs.ACCELERATOR] = None,
    network: Annotated[str | None, runs.NETWORK] = None,
    device_memory: Annotated[str | None, runs.DEVICE_MEMORY] = None,
    global_sequences: Annotated[int | None, runs.GLOBAL_SEQUENCES] = None,
    sequence_length: Annotated[int | None, runs.SEQUENCE_LENGTH] = None,
    precision: Annotated[str | None, runs.PRECISION] = None,
    engine: Annotated[str | None, runs.ENGINE] = None,
    overrides: Annotated[Overrides, runs.OVERRIDES] = (),
    fixed: Annotated[Mapping[str, Any] | str | None, runs.FIXED] = None,
    keep_plan: Annotated[bool, Flag("Keep one plan, and change only its data-parallel degree.")] = False,
    emulate: Annotated[
        int | None,
        Count(
            "Emulate each size on N devices with a smaller batch, and show the error of the emulation.",
            high=MAX_DEVICES,
        ),
    ] = None,
    replicas: Annotated[
        Sequence[int],
        Count(
            "At the largest size, rank these numbers of devices per model replica.", high=MAX_DEVICES, is_joined=True
        ),
    ] = (),
    sensitivity: Annotated[bool, Flag("Also vary one assumption at a time.")] = False,
    tokens: Annotated[float | None, Amount("Tokens to train on.", unset="the run file's", metavar="N")] = None,
    days: Annotated[
        float | None,
        Amount("As many tokens as the first size trains on in DAYS, instead of a number of tokens.", metavar="DAYS"),
    ] = None,
    deadline: Annotated[
        float | None,
        Amount("Find the fewest devices that train --tokens in DAYS, in place of --devices.", metavar="DAYS"),
    ] = None,
    failures: Annotated[
        bool, Flag("Include the time that failures cost.", flag="--goodput", off="--no-goodput")
    ] = True,
    simulate: Annotated[
        float | None,
        Amount("At each size, also play DAYS days failure by failure, with repairs and spare nodes.", metavar="DAYS"),
    ] = None,
) -> ScaleReport:
    """Scale a run to more devices.

    Give either `run`, or `model`, `cluster`, `global_sequences` and `sequence_length`.

    Returns:
        One point for each size: plan, step time, efficiency, goodput, time to train, energy, cost.

    Raises:
        InputError: an argument is wrong, or a size is no whole number of nodes.
        InfeasibleError: the run cannot be made on any of the sizes.

    Example:
        >>> import meshwright as mw
        >>> report = mw.scale("llama3-8b", devices=[64, 256])
        >>> [point.num_devices for point in report.curve.points]
        [64, 256]
    """
    return answered_by_body()
