"""The model in a checkpoint: its manifest describes it, so that it can be used without the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.specs.model import Lora, Model
from meshwright.specs.run import Data, Run, with_absolute_paths
from meshwright.training.data.source import absolute_source
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.run_identity import first_fault
from meshwright.training.weights import Origin


@dataclass(frozen=True, kw_only=True)
class Content:
    """The model whose states a checkpoint has. If `lora` is set, it has the states of the adapters alone."""

    shapes: Model
    lora: Lora | None
    precision: str
    weights: str | None  # the weights that training started from; None: random ones
    weights_fingerprint: str | None
    sequence_length: int | None = None  # tokens; None in old manifests, which lack the data as well
    data: Data | None = None  # with absolute paths
    holds_out: bool | None = None  # validation is on documents held out of the source; None in old manifests
    has_conversations: bool | None = None  # the data has records that a chat template writes; None: unknown
    is_averaged: bool | None = None  # the averages of the weights are read in their place; None in old manifests
    tokenizer_fingerprint: str | None = None  # None: unknown, or training has no tokenizer


def content(
    run: Run, *, weights: Origin | None, tokenizer: Tokenizer | None = None, has_conversations: bool | None = None
) -> Content:
    """The content of checkpoints of `run`, trained with `tokenizer`."""
    return Content(
        shapes=run.model,
        lora=run.lora,
        precision=run.precision.name,
        weights=weights and weights.name,  # ty: ignore[invalid-argument-type]
        weights_fingerprint=weights and weights.fingerprint,  # ty: ignore[invalid-argument-type]
        sequence_length=run.sequence_length,
        data=replace(
            with_absolute_paths(run.data, absolute_source),
            tokenizer=run.data.tokenizer and absolute_source(run.data.tokenizer),
            validation=_absolute_validation(run.data),
        ),
        holds_out=run.train.evaluate is not None and not run.data.validation_sources,
        has_conversations=has_conversations,
        is_averaged=run.optimizer.average_decay > 0,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )


def _absolute_validation(data: Data) -> str | Mapping[str, str] | None:
    if isinstance(data.validation, Mapping):
        return {name: absolute_source(place) for name, place in data.validation.items()}
    return data.validation and absolute_source(data.validation)


def origin_of(manifest: Mapping[str, Any]) -> Origin | None:
    """The weights that the training of a checkpoint started from, found or not; None: random ones."""
    held = content_of(manifest)
    if held is None or held.weights is None or held.weights_fingerprint is None:
        return None
    return Origin(name=held.weights, folder=Path(held.weights), fingerprint=held.weights_fingerprint)


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
        raise InputError(f"the checkpoint's manifest does not describe a model: {first_fault(error)}") from error
