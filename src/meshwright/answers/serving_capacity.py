"""Sessions and tokens that fit into the memory of a cluster: what `meshwright inference capacity` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.answers.serving_question import format_notes, formats_named, reserve_of
from meshwright.inference import capacity
from meshwright.inference.capacity import Capacity, CapacityQuestion
from meshwright.inference.checkpoint import own_precision
from meshwright.inference.formats import computed_in
from meshwright.inference.layout import layout_of
from meshwright.inference.memory import parameters, session_bytes, weight_bytes, window_note
from meshwright.inference.positions import positions_note
from meshwright.json_values import jsonable, picked
from meshwright.result import Result
from meshwright.runfile import named_cluster, named_model


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingCapacity(Result):
    """Memory of serving one model on one cluster.

    Attributes:
        question: model, cluster, formats, length of a session, and the memory reserved for the engine.
        layouts: capacity of each layout, most tokens first; one if a layout was given.
        name: name or path of the model, as it was asked for.
        precision: format of its weights, as it was asked for; None is that of its checkpoint.
    """

    question: CapacityQuestion
    layouts: Sequence[Capacity]
    name: str  # of the model, as it was asked for
    precision: str | None = None  # of its weights, likewise; None: that of its checkpoint

    @property
    def best(self) -> Capacity:
        """The layout that holds most tokens."""
        return self.layouts[0]

    @property
    def fits(self) -> bool:
        """Return True if one session of the asked length fits."""
        return self.best.fits

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for the reader."""
        question = self.question
        own = own_precision(self.name, question.model)[1] if self.precision is None else None
        found = format_notes(question.weights, question.cluster.accelerator, own=own)
        if question.model.num_mtp_layers:
            found.append("prediction modules are not loaded: they serve speculative decoding alone")
        if windowed := window_note(question.model, question.context):
            found.append(f"{windowed}; kv_bytes_per_token is the mean over it")
        beyond = positions_note(self.name, question.model, question.context)
        found += [beyond] if beyond else []
        if not self.fits:
            found.append(str(self.best.shortfall))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        question, best = self.question, self.best
        model, weights, cache = question.model, question.weights, question.cache
        return jsonable(
            {
                "model": model.name, "cluster": question.cluster.name, "num_devices": question.cluster.num_devices,
                "precision": weights.name, "kv_precision": cache.name, "context": question.context,
                "parameters": int(parameters(model).total), "weights_bytes": round(weight_bytes(model, weights).total),
                "kv_bytes_per_token": _whole(capacity.kv_bytes_per_token(question)),
                "session_bytes": _whole(session_bytes(model, cache, question.context)),
                **picked(best, "max_sessions", "max_tokens", "fits", "binds", "layout"),
                "shortfall": None if best.shortfall is None else str(best.shortfall),
                "tensor_parallel": best.layout.tensor, "kv_copies": best.cache_copies,
                "device_memory": best.device.as_json(),
                "max_parameters_per_device": round(capacity.max_parameters(question)),
                "computed_in": computed_in(weights, question.cluster.accelerator), "reserve": question.reserve,
                "layouts": self.layouts, "notes": self.notes,
            }
        )  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each layout."""
        return [
            {
                "layout": found.layout.describe(), **picked(found, "max_sessions", "max_tokens"),
                "weights_bytes_per_device": found.device.weights,
                "kv_bytes_per_device": max(found.device.cache, 0.0),
                "kv_copies": found.cache_copies, "fits": found.fits,
            }
            for found in self.layouts
        ]  # fmt: skip

    def summary(self) -> str:
        """Return sessions and tokens, or the part that does not fit."""
        question, best = self.question, self.best
        name = f"{question.model.name} in {question.weights.name} on {question.cluster.name}"
        if not best.fits:
            return f"{name} does not fit: {best.shortfall}"
        return (
            f"{name}, {best.layout.describe()}: {best.max_sessions:,} sessions of {question.context:,} tokens, "
            f"{best.max_tokens:,} tokens of {question.cache.name} cache"
        )


def _whole(value: float) -> float:
    """A whole number as an int."""
    return int(value) if value == int(value) else value


def serving_capacity(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    precision: str | None = None,
    kv_precision: str | None = None,
    context: int,
    degrees: Mapping[str, int] | None = None,
    memory_ratio: float | None = None,
) -> ServingCapacity:
    """Sessions of `context` tokens that fit, in the layout of the given degrees or in the best one.

    Raises InputError for an unknown name or an impossible layout.
    """
    place = named_cluster(cluster)
    served = named_model(model)
    weights, cache = formats_named(precision, kv_precision, model, served, place.accelerator)
    question = CapacityQuestion(
        model=served, cluster=place, weights=weights, cache=cache, context=context, reserve=reserve_of(memory_ratio)
    )
    layout = layout_of(degrees, place.num_devices) if degrees else None
    found = capacity.capacities(question) if layout is None else [capacity.capacity(question, layout)]
    return ServingCapacity(question=question, layouts=found, name=model, precision=precision)
