"""The model in a checkpoint: its manifest describes it, so that it can be used without the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.specs.model import Lora, Model
from meshwright.specs.run import Data, Run
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.weights import Origin


@dataclass(frozen=True, kw_only=True)
class Content:
    """The model whose states these are. With `lora` they are those of its adapters alone."""

    shapes: Model
    lora: Lora | None
    precision: str
    weights: str | None  # the weights that training started from; None: random ones
    weights_fingerprint: str | None
    sequence_length: int | None = None  # tokens; None in old manifests, which lack the data as well
    data: Data | None = None  # with absolute paths
    tokenizer_fingerprint: str | None = None  # None: unknown, or training has no tokenizer


def content(run: Run, *, weights: Origin | None, tokenizer: Tokenizer | None = None) -> Content:
    """The content of checkpoints of `run`, trained with `tokenizer`."""
    return Content(
        shapes=run.model,
        lora=run.lora,
        precision=run.precision.name,
        weights=weights and weights.name,
        weights_fingerprint=weights and weights.fingerprint,
        sequence_length=run.sequence_length,
        data=replace(
            run.data,
            source=_absolute(run.data.source),
            tokenizer=run.data.tokenizer and _absolute(run.data.tokenizer),
        ),
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )


def _absolute(name: str) -> str:
    """The absolute path of an existing file or folder, so that it is found from other folders; any other name as is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"the checkpoint's manifest does not describe a model: {where}: {first['msg']}"
        ) from error
