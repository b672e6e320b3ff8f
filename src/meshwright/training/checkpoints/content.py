"""The model in a checkpoint: its manifest describes it, so that it can be used without the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.specs.model import Lora, Model
from meshwright.specs.run import Run
from meshwright.training.weights import Origin


@dataclass(frozen=True, kw_only=True)
class Content:
    """The model whose states these are. With `lora` they are those of its adapters alone."""

    shapes: Model
    lora: Lora | None
    precision: str
    weights: str | None  # the weights that training started from; None: random ones
    weights_fingerprint: str | None


def content(run: Run, *, weights: Origin | None) -> Content:
    """The content of checkpoints of `run`."""
    return Content(
        shapes=run.model,
        lora=run.lora,
        precision=run.precision.name,
        weights=weights and weights.name,
        weights_fingerprint=weights and weights.fingerprint,
    )


def as_manifest(held: Content) -> dict[str, Any]:
    """The content as keys of a manifest."""
    return asdict(held)


def content_of(manifest: Mapping[str, Any]) -> Content | None:
    """The content by a manifest; None for an old one without these keys. Raises InputError for invalid values."""
    if not isinstance(manifest, Mapping) or "shapes" not in manifest:
        return None
    keys = Content.__dataclass_fields__
    try:
        return TypeAdapter(Content).validate_python({key: manifest.get(key) for key in keys})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"the checkpoint's manifest does not describe a model: {where}: {first['msg']}"
        ) from error


def refuse_mismatch(manifest: Mapping[str, Any], run: Run, *, weights: Origin | None) -> None:
    """Raise InputError when the checkpoint's adapters differ from those of `run`, or belong to another base."""
    held = content_of(manifest)
    if held is None or (held.lora is None and run.lora is None):
        return
    if held.lora is None or run.lora is None:
        kind = "every parameter" if held.lora is None else "adapters"
        raise InputError(f"the checkpoint holds {kind}, which task {run.task.value} does not train")
    ours = replace(run.lora, dropout=held.lora.dropout)
    if ours != held.lora:
        raise InputError("the checkpoint's adapters are others", got=str(held.lora), allowed=str(ours))
    if held.weights_fingerprint != (weights and weights.fingerprint):
        raise InputError(
            "the checkpoint's adapters belong to other weights",
            got=weights.name if weights else "random ones",
            allowed=held.weights or "random ones",
            hint="the files were changed, or `weights` names others",
        )
