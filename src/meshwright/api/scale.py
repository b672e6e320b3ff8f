"""`meshwright.scale`: efficiency, time to train, failures, energy and cost as devices are added."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from meshwright.api import arguments
from meshwright.api.runs import Overrides, RunSource, given_run
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.answers.scale_study import ScaleReport

MAX_DEVICES = 10**7


def scale(
    run: RunSource | None = None,
    *,
    devices: Sequence[int] = (),
    mode: Literal["strong", "weak"] = "strong",
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    cluster: str | Mapping[str, Any] | None = None,
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    global_sequences: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    engine: str | None = None,
    overrides: Overrides = (),
    fixed: Mapping[str, Any] | str | None = None,
    keep_plan: bool = False,
    emulate: int | None = None,
    replicas: Sequence[int] = (),
    sensitivity: bool = False,
    tokens: float | None = None,
    days: float | None = None,
    failures: bool = True,
) -> ScaleReport:
    """Scale a run to more devices.

    Give either `run`, or `model`, `cluster`, `global_sequences` and `sequence_length`.

    Args:
        run: a `Run`, the path or shipped name of a run file, or its content.
        devices: numbers of devices; the smallest is the base. Default: 1 to 16 times the run's cluster.
        mode: "strong" keeps the global batch, "weak" lets it grow with the devices.
        model, cluster, accelerator, network, device_memory, global_sequences: see `plan`.
        sequence_length, precision, engine: see `plan`.
        overrides: keys of the run file with new values.
        fixed: fields of every plan, as {"tensor": 8}.
        keep_plan: keep one plan and change its data-parallel degree alone.
        emulate: number of devices that stand for each size with a smaller batch.
        replicas: at the largest size, rank these numbers of devices that hold the model once.
        sensitivity: change one assumption at a time.
        tokens: length of the training. Default: the run file's.
        days: length of the training: what the first size trains in so many days of steps.
        failures: include failures, checkpoints and restarts.

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
    from meshwright.answers.scale_study import ScaleQuestion, scale_report
    from meshwright.planner.scaling import Mode

    if tokens is not None and days is not None:
        raise InputError("tokens and days both give the length of the training", hint="give one of them")
    question = ScaleQuestion(
        sizes=arguments.counts("devices", devices, most=MAX_DEVICES),
        fixed=arguments.plan_fields("fixed", {} if fixed is None else fixed),
        mode=Mode(arguments.choice("mode", mode, [one.value for one in Mode])),
        keep_plan=arguments.flag("keep_plan", keep_plan),
        small=None if emulate is None else arguments.count("emulate", emulate, most=MAX_DEVICES),
        replicas=arguments.counts("replicas", replicas, most=MAX_DEVICES),
        with_sensitivity=arguments.flag("sensitivity", sensitivity),
        with_failures=arguments.flag("failures", failures),
        num_tokens=None if tokens is None else arguments.number("tokens", tokens),
        days=None if days is None else arguments.number("days", days),
    )
    resolved = given_run(
        run, overrides=overrides, model=model, cluster=cluster, accelerator=accelerator, network=network,
        device_memory=device_memory, global_sequences=global_sequences,
        sequence_length=sequence_length, precision=precision, engine=engine,
    )  # fmt: skip
    return scale_report(resolved, question)
