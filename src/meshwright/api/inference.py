"""`meshwright.inference_capacity` and its siblings: serving and offline inference, projected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import arguments, runs
from meshwright.api.question import (
    Amount,
    AnyPath,
    Count,
    Flag,
    Folders,
    NamedCounts,
    Number,
    OneOf,
    PathOrText,
    PlainText,
    answered_by_body,
    question,
)
from meshwright.api.report import RENT
from meshwright.api.runs import ACCELERATOR

if TYPE_CHECKING:
    from meshwright.answers.serving_accuracy import ServingAccuracy
    from meshwright.answers.serving_calibration import ServingCalibrationResult
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.serving_estimate import ServingEstimate
    from meshwright.answers.serving_plan import ServingPlan

MAX_RATE = 1e9
ENGINES = ("vllm", "trtllm", "sglang", "vllm-v0", "trtllm-0", "sglang-2025", "llamacpp", "generic")


@dataclass(frozen=True)
class ClusterName(PlainText):
    """The name of a cluster, or from Python a cluster as in a run file."""

    def one(self, name: str, value: object) -> Any:
        return arguments.plain(name, value) if isinstance(value, Mapping) else super().one(name, value)


MODEL = PathOrText(runs.MODEL.about, metavar="MODEL")
CLUSTER = ClusterName(
    "ACCELERATOR-DEVICESxNODES: mi355x-8x1 is one node of 8 devices (see `meshwright catalog clusters`).",
    metavar="CLUSTER",
)
NETWORK = PlainText(runs.NETWORK.about, metavar="RATE")
DEVICE_MEMORY = PlainText(runs.DEVICE_MEMORY.about, metavar="SIZE")
HARDWARE = ("accelerator", "network", "device_memory")
PRECISION = PlainText(
    "Format of the weights: fp32, bf16, fp16, fp8, mxfp8, nvfp4, mxfp4, or fp4 for the vendor's own; int4 (W4A16: AWQ, "
    "GPTQ; int4-g32 has 32 values to a scale), w8a16, int8 (W8A8).",
    unset="the checkpoint's own",
    metavar="FORMAT",
)
KV_PRECISION = PlainText(
    "Format of the KV cache: fp32, bf16, fp16, fp8, nvfp4, mxfp4 or fp4.",
    unset="bf16, and fp8 with weights in floats of 8 bits or fewer (gpt-oss: bf16)",
    metavar="FORMAT",
)
LAYOUT = NamedCounts(
    'Degrees of the layout, as {"tensor": 8}.',
    unset="what holds most tokens for the capacity, tensor parallelism over a node for an estimate",
    options={
        "tensor": "Devices that share the heads of a layer.",
        "attention_data": "Groups of a replica whose sessions are their own (mixtures of experts).",
        "expert": "Devices over which the experts of a layer are split.",
        "pipeline": "Pipeline stages of a replica.",
        "replicas": "Copies of the model.  [default: all that the cluster has room for]",
    },
)
MEMORY_RATIO = Amount("Share of a device's memory that the engine may use.", unset="0.9", metavar="SHARE", high=1)
ENGINE = OneOf(
    "Inference engine: its host time and what bounds its batch. Earlier releases have names of their own: vllm-v0 "
    "(before 0.8), trtllm-0 (before 1.0), sglang-2025 (before 0.5.6).",
    unset="vllm, or the calibrated one",
    values=ENGINES,
)
CALIBRATION = AnyPath("Constants of one server, from `meshwright inference calibrate`.", is_folder=False)

ARRIVALS = PlainText(
    "Arrivals under --rate: poisson, constant, or gamma:CV with the coefficient of variation of the gaps (bursts).",
    unset="poisson",
    metavar="NAME",
)
INPUT_SPREAD, OUTPUT_SPREAD = (
    Number(f"Coefficient of variation of the lengths of {what}, at most 10; --{name}-tokens is their mean.", unset="0",
           metavar="CV")
    for what, name in (("prompts", "input"), ("answers", "output"))
)  # fmt: skip
HIT_RATE = Number("Share of the tokens of prompts that the prefix cache holds, below 1.", unset="0", metavar="SHARE")
SEED = Count("Seed of the arrivals.", low=0)
PERCENTILE = Amount(
    "The bounds hold for this percentile of the requests under --rate, such as 99.", unset="the mean", metavar="P",
    high=100,
)  # fmt: skip


def _placed(*, cluster: str | Mapping[str, Any], **asked: Any) -> dict[str, Any]:
    """Arguments with the cluster as a run file has it, and the degrees of the layout."""
    from meshwright.runfile.hardware import stated_cluster

    stated = {name: asked.pop(name) for name in HARDWARE}
    degrees = {"degrees": asked.pop("layout")} if "layout" in asked else {}
    return {**asked, **degrees, "cluster": stated_cluster(cluster, **stated)}


def _priced(
    *, usd_per_device_hour: float | None, prices: Mapping[str, Any] | None = None, **asked: Any
) -> dict[str, Any]:
    """Arguments as `_placed` makes them, with the terms of the prices, which are those of `report_records`."""
    from meshwright.answers.serving_question import price_terms

    if "concurrency" in asked:
        asked["concurrency"] = sorted(set(asked["concurrency"]))
    return {**_placed(**asked), "terms": price_terms(usd_per_device_hour=usd_per_device_hour, **(prices or {}))}


def _given(
    *,
    model: str | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    engine: str | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """Arguments with what the records do not say of their server: its hardware by name, its model and formats."""
    from meshwright.inference.measured import ServedGiven
    from meshwright.runfile import named_model

    served = None if model is None else named_model(model)
    asked["hardware"] = {name: asked.pop(name) for name in HARDWARE}
    return {**asked, "given": ServedGiven(model=served, precision=precision, kv_precision=kv_precision, engine=engine)}


@question("meshwright.answers.serving_capacity:serving_capacity", prepare=_placed)
def inference_capacity(
    *,
    model: Annotated[str, MODEL],
    cluster: Annotated[str | Mapping[str, Any], CLUSTER],
    accelerator: Annotated[str | os.PathLike[str] | None, ACCELERATOR] = None,
    network: Annotated[str | None, NETWORK] = None,
    device_memory: Annotated[str | None, DEVICE_MEMORY] = None,
    precision: Annotated[str | None, PRECISION] = None,
    kv_precision: Annotated[str | None, KV_PRECISION] = None,
    context: Annotated[int, Count("Length of a session: prompt and answer together.", metavar="TOKENS")] = 8192,
    layout: Annotated[Mapping[str, int] | None, LAYOUT] = None,
    memory_ratio: Annotated[float | None, MEMORY_RATIO] = None,
) -> ServingCapacity:
    """Compute the sessions and tokens that fit into the memory of a cluster.

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
    return answered_by_body()


@question("meshwright.answers.serving_estimate:serving_estimate", prepare=_priced)
def inference_estimate(
    *,
    model: Annotated[str, MODEL],
    cluster: Annotated[str | Mapping[str, Any], CLUSTER],
    accelerator: Annotated[str | os.PathLike[str] | None, ACCELERATOR] = None,
    network: Annotated[str | None, NETWORK] = None,
    device_memory: Annotated[str | None, DEVICE_MEMORY] = None,
    input_tokens: Annotated[int, Count("Tokens of a prompt.")],
    output_tokens: Annotated[int, Count("Tokens of an answer.")],
    input_spread: Annotated[float | None, INPUT_SPREAD] = None,
    output_spread: Annotated[float | None, OUTPUT_SPREAD] = None,
    prefix_hit_rate: Annotated[float | None, HIT_RATE] = None,
    precision: Annotated[str | None, PRECISION] = None,
    kv_precision: Annotated[str | None, KV_PRECISION] = None,
    engine: Annotated[str | None, ENGINE] = None,
    concurrency: Annotated[
        Sequence[int],
        Count("Requests in flight on the whole cluster (closed loop).", unset="all that fit", is_joined=True),
    ] = (),
    requests_per_s: Annotated[
        float | None, Amount("Arriving requests per second (open loop).", flag="--rate", metavar="N", high=MAX_RATE)
    ] = None,
    arrivals: Annotated[str | None, ARRIVALS] = None,
    seed: Annotated[int, SEED] = 0,
    ttft_s: Annotated[float | None, Amount("Longest time to first token under --rate, in seconds.")] = None,
    itl_s: Annotated[float | None, Amount("Longest inter-token latency under --rate, in seconds.")] = None,
    percentile: Annotated[float | None, PERCENTILE] = None,
    layout: Annotated[Mapping[str, int] | None, LAYOUT] = None,
    prefill_replicas: Annotated[int, Count("Replicas that only prefill and send the cache to the others.", low=0)] = 0,
    lockstep: Annotated[
        bool, Flag("Requests of equal lengths begin together and stay in step, as closed loops with fixed lengths do.")
    ] = False,
    memory_ratio: Annotated[float | None, MEMORY_RATIO] = None,
    usd_per_device_hour: Annotated[float | None, RENT] = None,
    calibration: Annotated[str | os.PathLike[str] | None, CALIBRATION] = None,
) -> ServingEstimate:
    """Estimate latencies, rates, memory and price of a server.

    Returns:
        One estimate for each load, with 80 % intervals; with a rate also percentiles of latencies under its arrivals.

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
    return answered_by_body()


@question("meshwright.answers.serving_plan:serving_plan", prepare=_priced)
def inference_plan(
    *,
    model: Annotated[str, MODEL],
    cluster: Annotated[str | Mapping[str, Any], CLUSTER],
    accelerator: Annotated[str | os.PathLike[str] | None, ACCELERATOR] = None,
    network: Annotated[str | None, NETWORK] = None,
    device_memory: Annotated[str | None, DEVICE_MEMORY] = None,
    input_tokens: Annotated[int, Count("Tokens of a prompt.")],
    output_tokens: Annotated[int, Count("Tokens of an answer.")],
    input_spread: Annotated[float | None, INPUT_SPREAD] = None,
    output_spread: Annotated[float | None, OUTPUT_SPREAD] = None,
    prefix_hit_rate: Annotated[float | None, HIT_RATE] = None,
    precision: Annotated[str | None, PRECISION] = None,
    kv_precision: Annotated[str | None, KV_PRECISION] = None,
    engine: Annotated[str | None, ENGINE] = None,
    ttft_s: Annotated[float | None, Amount("Longest time to first token, in seconds.")] = None,
    itl_s: Annotated[float | None, Amount("Longest inter-token latency, in seconds.")] = None,
    percentile: Annotated[float | None, PERCENTILE] = None,
    requests_per_s: Annotated[
        float | None,
        Amount("Requests per second to serve: the fewest devices that do.", flag="--rate", metavar="N", high=MAX_RATE),
    ] = None,
    arrivals: Annotated[str | None, ARRIVALS] = None,
    seed: Annotated[int, SEED] = 0,
    disaggregated: Annotated[bool, Flag("Also try replicas that only prefill.")] = False,
    memory_ratio: Annotated[float | None, MEMORY_RATIO] = None,
    usd_per_device_hour: Annotated[float | None, RENT] = None,
    calibration: Annotated[str | os.PathLike[str] | None, CALIBRATION] = None,
) -> ServingPlan:
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

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
    return answered_by_body()


@question("meshwright.answers.serving_calibration:serving_calibration", prepare=_given)
def inference_calibrate(
    records: Annotated[
        str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        Folders("Folders of closed loops on one kind of server.", least=1),
    ],
    *,
    cluster: Annotated[str, PlainText("Devices of the server, such as cpu-1x1 or h100-8x1.", metavar="CLUSTER")],
    accelerator: Annotated[str | os.PathLike[str] | None, ACCELERATOR] = None,
    network: Annotated[str | None, NETWORK] = None,
    device_memory: Annotated[str | None, DEVICE_MEMORY] = None,
    model: Annotated[
        str | None,
        PathOrText(
            "Served model, where the records do not say it: a catalogue name or a Hugging Face config.json.",
            metavar="MODEL",
        ),
    ] = None,
    precision: Annotated[str | None, PlainText("Format of its weights, likewise.", metavar="FORMAT")] = None,
    kv_precision: Annotated[str | None, PlainText("Format of its KV cache, likewise.", metavar="FORMAT")] = None,
    engine: Annotated[str | None, OneOf("Inference engine, likewise.", values=ENGINES)] = None,
) -> ServingCalibrationResult:
    """Fit the constants of one server to records of `bench serve`.

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
    return answered_by_body()


@question("meshwright.answers.serving_accuracy:serving_accuracy", prepare=_given)
def inference_accuracy(
    *,
    points: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "CSV file of your points, with the columns of the shipped ones.",
            unset="the shipped points",
            is_folder=False,
            metavar="FILE.csv",
        ),
    ] = None,
    leave_one_source_out: Annotated[
        bool, Flag("Predict each source with constants that were refitted without it.")
    ] = False,
    records: Annotated[
        str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        Folders("Folder of your records of `meshwright bench serve`, instead of points."),
    ] = (),
    calibration: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "Predict records by the constants of one server, from `meshwright inference calibrate`.",
            unset="the shipped constants",
            is_folder=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None, PlainText("Devices of the records.", unset="one of the calibration's", metavar="CLUSTER")
    ] = None,
    accelerator: Annotated[str | os.PathLike[str] | None, ACCELERATOR] = None,
    network: Annotated[str | None, NETWORK] = None,
    device_memory: Annotated[str | None, DEVICE_MEMORY] = None,
) -> ServingAccuracy:
    """Predict published points of inference, or records of `bench serve`, and compare.

    Returns:
        Errors of all points, by group, and of each point; points that cannot be predicted have a reason.

    Raises:
        InputError: the file cannot be read; the message has the line.

    Example:
        >>> import meshwright as mw
        >>> study = mw.inference_accuracy()
        >>> study.overall.num_rows, study.overall.median_abs_error < 0.15
        (494, True)
    """
    return answered_by_body()
