"""`meshwright.inference_capacity` and its siblings: serving and offline inference, projected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.answers.serving_accuracy import ServingAccuracy
    from meshwright.answers.serving_calibration import ServingCalibrationResult
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.serving_estimate import ServingEstimate
    from meshwright.answers.serving_plan import ServingPlan
    from meshwright.inference.measured import ServedGiven

DEGREES = ("tensor", "attention_data", "expert", "pipeline", "replicas")


def inference_capacity(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    precision: str = "bf16",
    kv_precision: str | None = None,
    context: int = 8192,
    layout: Mapping[str, int] | None = None,
    memory_ratio: float | None = None,
) -> ServingCapacity:
    """Compute the sessions and tokens that fit into the memory of a cluster.

    Args:
        model: catalogue name, path of a Hugging Face config.json, or OWNER/NAME on the hub.
        cluster: ACCELERATOR-GPUS_PER_NODExNODES, as in "mi355x-8x1", or a cluster as in a run file.
        accelerator: file of your own accelerator NAME, NAME.toml, for the cluster "NAME-8x1".
        network: network of a node in place of the usual one, as in "25Gb/s" or "8x400Gb/s RoCE".
        device_memory: memory of a device that the server may use, as in "40GiB".
        precision: format of the weights; "fp4" is the vendor's.
        kv_precision: format of the KV cache. Default: bf16, and fp8 with weights of 8 bits or fewer.
        context: tokens of a session.
        layout: degrees, as {"tensor": 8}. Default: the layout that holds most tokens.
        memory_ratio: share of a device's memory that the engine may use. Default: 0.9.

    Returns:
        Sessions and tokens by layout, and the parts of a device's memory. `fits` is False where no session fits.

    Raises:
        InputError: a name is unknown, or the layout is impossible.

    Example:
        >>> import meshwright as mw
        >>> held = mw.inference_capacity(model="deepseek-r1", cluster="mi355x-1x1", precision="fp4")
        >>> held.fits, held.best.binds
        (False, 'weights')
    """
    from meshwright.answers.serving_capacity import serving_capacity

    return serving_capacity(
        **_names(model, _cluster(cluster, accelerator, network, device_memory), precision, kv_precision),
        context=arguments.count("context", context),
        degrees=_degrees(layout),
        memory_ratio=_ratio(memory_ratio),
    )


def inference_estimate(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    input_tokens: int,
    output_tokens: int,
    precision: str = "bf16",
    kv_precision: str | None = None,
    engine: str | None = None,
    concurrency: Sequence[int] = (),
    requests_per_s: float | None = None,
    layout: Mapping[str, int] | None = None,
    prefill_replicas: int = 0,
    lockstep: bool = False,
    memory_ratio: float | None = None,
    usd_per_device_hour: float | None = None,
    calibration: str | os.PathLike[str] | None = None,
) -> ServingEstimate:
    """Estimate latencies, rates, memory and price of a server.

    Args:
        model, cluster, accelerator, network, device_memory: see `inference_capacity`.
        precision, kv_precision, memory_ratio: see `inference_capacity`.
        input_tokens: tokens of a prompt.
        output_tokens: tokens of an answer.
        engine: "vllm", "trtllm", "sglang", "llamacpp" or "generic". Default: vllm, or the calibrated one.
        concurrency: requests in flight on the whole cluster; one estimate each. Default: as many as fit.
        requests_per_s: arrival rate of an open loop, in place of a concurrency.
        layout: degrees, as {"tensor": 2}. Default: tensor parallelism over a node.
        prefill_replicas: replicas that only prefill.
        lockstep: requests of equal lengths begin together and stay in step, as closed loops with fixed lengths do.
        usd_per_device_hour: price. Default: the catalogue's, if it has one.
        calibration: file of `inference_calibrate`. Default: the shipped constants.

    Returns:
        One estimate for each load, with 80 % intervals.

    Raises:
        InputError: an argument is wrong.
        InfeasibleError: nothing fits, or the rate is more than the server finishes.

    Example:
        >>> import meshwright as mw
        >>> done = mw.inference_estimate(
        ...     model="llama3.1-8b", cluster="h100-1x1", input_tokens=512, output_tokens=128, concurrency=[1, 16]
        ... )
        >>> [load.in_flight for load in done.loads], done.loads[0].itl.unit
        ([1.0, 16.0], 's')
    """
    from meshwright.answers.serving_estimate import serving_estimate
    from meshwright.answers.serving_question import PriceTerms

    price = (
        None if usd_per_device_hour is None else arguments.number("usd_per_device_hour", usd_per_device_hour)
    )
    return serving_estimate(
        **_names(model, _cluster(cluster, accelerator, network, device_memory), precision, kv_precision),
        engine=None if engine is None else _text("engine", engine),
        input_tokens=arguments.count("input_tokens", input_tokens),
        output_tokens=arguments.count("output_tokens", output_tokens),
        concurrency=arguments.counts("concurrency", concurrency),
        requests_per_s=None if requests_per_s is None else arguments.number("requests_per_s", requests_per_s),
        degrees=_degrees(layout),
        prefill_replicas=arguments.count("prefill_replicas", prefill_replicas, least=0),
        lockstep=arguments.flag("lockstep", lockstep),
        memory_ratio=_ratio(memory_ratio),
        terms=PriceTerms(usd_per_device_hour=price),
        calibration=_file("calibration", calibration),
    )


def inference_plan(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    input_tokens: int,
    output_tokens: int,
    precision: str = "bf16",
    kv_precision: str | None = None,
    engine: str | None = None,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    requests_per_s: float | None = None,
    disaggregated: bool = False,
    memory_ratio: float | None = None,
    usd_per_device_hour: float | None = None,
    calibration: str | os.PathLike[str] | None = None,
) -> ServingPlan:
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

    Args:
        model, cluster, accelerator, network, device_memory: see `inference_capacity`.
        precision, kv_precision, memory_ratio: see `inference_capacity`.
        input_tokens, output_tokens, engine, usd_per_device_hour, calibration: see `inference_estimate`.
        ttft_s: longest time to first token, in seconds. Default: no bound.
        itl_s: longest inter-token latency, in seconds. Default: no bound.
        requests_per_s: rate to serve with as few devices as possible. Default: use the whole cluster.
        disaggregated: also try replicas that only prefill.

    Returns:
        The best layout and load with intervals, the best load of each layout, and the front of throughput per device
        against interactivity.

    Raises:
        InputError: an argument is wrong.
        InfeasibleError: no layout keeps the bounds.

    Example:
        >>> import meshwright as mw
        >>> plan = mw.inference_plan(
        ...     model="llama3.1-8b", cluster="h100-2x1", input_tokens=512, output_tokens=128, itl_s=0.02
        ... )
        >>> plan.best.itl_s <= 0.02, len(plan.search.front) > 1
        (True, True)
    """
    from meshwright.answers.serving_plan import serving_plan
    from meshwright.answers.serving_question import PriceTerms

    numbers = {
        "ttft_s": ttft_s, "itl_s": itl_s, "requests_per_s": requests_per_s, "usd_per_device_hour": usd_per_device_hour,
    }  # fmt: skip
    given = {
        name: None if value is None else arguments.number(name, value) for name, value in numbers.items()
    }
    return serving_plan(
        **_names(model, _cluster(cluster, accelerator, network, device_memory), precision, kv_precision),
        engine=None if engine is None else _text("engine", engine),
        input_tokens=arguments.count("input_tokens", input_tokens),
        output_tokens=arguments.count("output_tokens", output_tokens),
        ttft_s=given["ttft_s"],
        itl_s=given["itl_s"],
        requests_per_s=given["requests_per_s"],
        disaggregated=arguments.flag("disaggregated", disaggregated),
        memory_ratio=_ratio(memory_ratio),
        terms=PriceTerms(usd_per_device_hour=given["usd_per_device_hour"]),
        calibration=_file("calibration", calibration),
    )


def inference_calibrate(
    records: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    cluster: str,
    model: str | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    engine: str | None = None,
) -> ServingCalibrationResult:
    """Fit the constants of one server to records of `bench serve`.

    Args:
        records: folder or folders of closed loops on one kind of server.
        cluster: devices of the server, as "cpu-1x1".
        model, precision, kv_precision, engine: of the server, where the records do not say it.

    Returns:
        The constants with their errors, fitted and held out. `.to_dict()` is the document of a calibration file.

    Raises:
        InputError: the records cannot be used.

    Example:
        >>> import meshwright as mw
        >>> mw.inference_calibrate("no-such-folder", cluster="cpu-1x1")
        Traceback (most recent call last):
        meshwright.errors.InputError: no such file: got 'no-such-folder/serving.json'...
    """
    from meshwright.answers.serving_calibration import serving_calibration

    return serving_calibration(
        records=_folders("records", records),
        cluster=_text("cluster", cluster),
        given=_given(model=model, precision=precision, kv_precision=kv_precision, engine=engine),
    )


def inference_accuracy(
    *,
    points: str | os.PathLike[str] | None = None,
    leave_one_source_out: bool = False,
    records: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    calibration: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
) -> ServingAccuracy:
    """Predict published points of inference, or records of `bench serve`, and compare.

    Args:
        points: CSV file in the columns of the shipped points. Default: the shipped points.
        leave_one_source_out: predict each source by constants that were fitted without it.
        records: folder or folders of `bench serve` instead of points.
        calibration: file of `inference_calibrate`, for records. Default: the shipped constants.
        cluster: devices of the records. Default: one of the calibration's.

    Returns:
        Errors of all points, by group, and of each point; points that cannot be predicted have a reason.

    Raises:
        InputError: the file cannot be read; the message has the line.

    Example:
        >>> import meshwright as mw
        >>> study = mw.inference_accuracy()
        >>> study.overall.num_rows, study.overall.median_abs_error < 0.15
        (269, True)
    """
    from meshwright.answers.serving_accuracy import serving_accuracy

    return serving_accuracy(
        points=None if points is None else arguments.path("points", points),
        leave_one_source_out=arguments.flag("leave_one_source_out", leave_one_source_out),
        records=_folders("records", records),
        calibration=_file("calibration", calibration),
        cluster=None if cluster is None else _text("cluster", cluster),
    )


def _cluster(
    cluster: object, accelerator: object, network: str | None, device_memory: str | None
) -> str | dict[str, Any]:
    """The cluster as a run file has it."""
    from meshwright.runfile.hardware import stated_cluster

    of = arguments.plain("cluster", cluster) if isinstance(cluster, Mapping) else _text("cluster", cluster)
    file = None if accelerator is None else arguments.path("accelerator", accelerator)
    stated = {"network": network, "device_memory": device_memory}
    return stated_cluster(of, accelerator=file, **stated)


def _names(
    model: str, cluster: str | Mapping[str, Any], precision: str, kv_precision: str | None
) -> dict[str, Any]:
    cache = None if kv_precision is None else _text("kv_precision", kv_precision)
    return {
        "model": _text("model", os.fspath(model) if isinstance(model, os.PathLike) else model),
        "cluster": cluster, "precision": _text("precision", precision), "kv_precision": cache,
    }  # fmt: skip


def _given(**names: str | None) -> ServedGiven:
    """Model, formats and engine of a server whose records do not name them."""
    from meshwright.inference.measured import ServedGiven
    from meshwright.runfile import named_model

    given = {name: None if value is None else _text(name, value) for name, value in names.items()}
    model = given.pop("model")
    return ServedGiven(model=None if model is None else named_model(model), **given)


def _file(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else arguments.path(name, value)


def _folders(name: str, value: object) -> tuple[Path, ...]:
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple(arguments.path(name, one) for one in several)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(name, got=type(value).__name__ if value else value, allowed="a name")
    return value


def _degrees(layout: Mapping[str, int] | None) -> dict[str, int]:
    if layout is None:
        return {}
    if not isinstance(layout, Mapping):
        raise InputError("layout", got=type(layout).__name__, allowed='a mapping such as {"tensor": 8}')
    for name in layout:
        arguments.choice("layout", name, DEGREES)
    return {name: arguments.count(name, value) for name, value in layout.items()}


def _ratio(value: float | None) -> float | None:
    if value is None:
        return None
    found = arguments.number("memory_ratio", value)
    if found > 1:
        raise InputError("memory_ratio", got=found, allowed="above 0, up to 1")
    return found
