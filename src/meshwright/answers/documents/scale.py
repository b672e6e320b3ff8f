"""The JSON document of `meshwright scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.answers.documents.plan import (
    plan_document,
    request_document,
    step_document,
    training_document,
)

if TYPE_CHECKING:
    from meshwright.answers.scale_study import ScaleReport
    from meshwright.planner.scaling import Costed, EmulatedPoint, Replica, ScalePoint, Unreached


def scale_document(report: ScaleReport) -> dict[str, Any]:
    """The parts of the study that were asked for. Batches in sequences and tokens."""
    study = report.study
    document: dict[str, Any] = {
        "request": request_document(report.run, study.request),
        "mode": study.mode,
        "num_tokens": study.num_tokens,
    }
    if report.curve is not None:
        document["points"] = [_point(p) for p in report.curve.points]
        document["unreached"] = [_unreached(u) for u in report.curve.unreached]
    if report.emulation is not None:
        document["emulation"] = {
            "base": _costed(report.emulation.base),
            "points": [_emulated(p) for p in report.emulation.points],
            "unreached": [_unreached(u) for u in report.emulation.unreached],
        }
    if report.replicas:
        document["replicas"] = [_replica(r) for r in report.replicas]
    if report.sensitivity is not None:
        document["sensitivity"] = report.sensitivity
    return document


def _costed(costed: Costed) -> dict[str, Any]:
    from meshwright.planner.scaling import exposed_data_parallel_s, replica_devices

    return {
        "num_devices": costed.num_devices,
        **_batch(costed.global_batch, costed.request.seq_len),
        **plan_document(costed.plan),
        "replica_devices": replica_devices(costed.plan),
        "num_micro_batches": costed.plan.num_micro_batches(costed.global_batch),
        "exposed_data_parallel_s": exposed_data_parallel_s(costed),
        **step_document(costed.estimate.step),
    }


def _point(point: ScalePoint) -> dict[str, Any]:
    return {
        **_costed(point.costed),
        "efficiency": point.efficiency,
        "speedup": point.speedup,
        "goodput": point.goodput,
        "training": point.training and training_document(point.training),
    }


def _emulated(point: EmulatedPoint) -> dict[str, Any]:
    return {
        "num_devices": point.num_devices,
        "emulated": _costed(point.emulated),
        "efficiency": point.efficiency,
        "real": point.real and _costed(point.real),
        "real_efficiency": point.real_efficiency,
        "difference_s": point.difference_s,
        "why_not": point.why_not,
    }


def _replica(replica: Replica) -> dict[str, Any]:
    return {"relative_ratio": replica.relative_ratio, **_costed(replica.costed)}


def _unreached(unreached: Unreached) -> dict[str, Any]:
    return {"num_devices": unreached.num_devices, "why_not": unreached.why_not}


def _batch(num_sequences: int, seq_len: int) -> dict[str, int]:
    return {
        "global_batch_sequences": num_sequences,
        "global_batch_tokens": num_sequences * seq_len,
    }
