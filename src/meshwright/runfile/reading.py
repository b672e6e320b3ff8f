"""Run files in: from a path, a text, or the options of a command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.errors import RunFileError
from meshwright.json_values import dump_yaml
from meshwright.runfile import document as documents
from meshwright.runfile.accelerator_file import is_accelerator_file
from meshwright.runfile.document import RunFileDocument
from meshwright.runfile.resolve import resolve
from meshwright.runfile.validate import validate
from meshwright.specs.hardware import Cluster
from meshwright.specs.run import Run

_OPTIONS = {
    ("model",): "--model",
    ("cluster",): "--cluster",
    ("batch", "global_sequences"): "--gbs",
    ("data", "sequence_length"): "--seq",
    ("precision",): "--precision",
    ("engine",): "--engine",
}


def load(path: str | os.PathLike[str], *, overrides: Sequence[str] = (), here: Cluster | None = None) -> Run:
    """The run that the file at `path` describes, or the one of that name among those that ship.

    `overrides` are `key.path=value` with a YAML value, laid over the file in their order; `here` is what
    `cluster: here` stands for. Raises `RunFileError` with everything that is wrong in one message.
    """
    name = os.fspath(path)
    if name in catalog.run_file_names() and not Path(name).exists():
        return loads(catalog.run_file_text(name), file=f"{name}.yaml", overrides=overrides, here=here)
    return loads(documents.read_text(path), file=name, overrides=overrides, here=here)


def loads(text: str, *, file: str = "run file", overrides: Sequence[str] = (), here: Cluster | None = None) -> Run:
    """The run that `text` describes; `file` is what errors call it. See `load`."""
    return _run(documents.parse(text, file=file), overrides=overrides, here=here)


def from_mapping(
    content: Mapping[str, Any],
    *,
    file: str = "run",
    overrides: Sequence[str] = (),
    here: Cluster | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """The run that the content of a run file describes. See `load`.

    Errors name the key alone, there are no lines; `names` has the arguments that gave keys, which errors name instead.
    """
    from ruamel.yaml import YAMLError

    try:
        text = dump_yaml(dict(content))
    except YAMLError as error:
        raise RunFileError(f"cannot be written as a run file ({error})", file=file) from None
    document = replace(
        documents.parse(text, file=file), places={tuple(key.split(".")): name for key, name in names.items()}
    )
    return _run(document, overrides=overrides, here=here)


def from_options(
    *,
    model: str,
    cluster: str,
    global_batch: int,
    sequence_length: int,
    precision: str = "bf16",
    engine: str | None = None,
    overrides: Sequence[str] = (),
    here: Cluster | None = None,
) -> Run:
    """The run that a command line describes; errors name its options (`--model`, `--gbs`).

    `global_batch` is in sequences, `sequence_length` in tokens.
    """
    value = {
        "model": model,
        "data": {"sequence_length": sequence_length},
        "batch": {"global_sequences": global_batch},
        "precision": precision,
        "cluster": cluster,
    } | ({} if engine is None else {"engine": engine})
    places = dict[Any, Any](_OPTIONS)
    document = RunFileDocument(file="command line", text=dump_yaml(value), value=value, places=places)
    run = _run(document, overrides=overrides, here=here)
    return replace(run, name=run.model.name)


def _run(document: RunFileDocument, *, overrides: Sequence[str], here: Cluster | None) -> Run:
    for assignment in overrides:
        document = documents.override(document, assignment)
    if (found := _accelerator_file(document)) is not None:
        overrides = [*overrides, f"cluster.accelerator={json.dumps(found)}"]
        document = replace(documents.override(document, overrides[-1]), places=document.places)
    run = resolve(document, validate(document), name=Path(document.file).stem, here=here)
    return replace(run, overrides=tuple(overrides))


def _accelerator_file(document: RunFileDocument) -> str | None:
    """The absolute path of the accelerator's file that a run names by a relative one; None where it names none.

    A path in a run file starts from the file's folder, an option's path from the working directory. Copies of the run,
    with a pinned plan say, lie in other folders: they have the absolute path.
    """
    cluster = document.value.get("cluster")
    path = cluster.get("accelerator") if isinstance(cluster, dict) else None
    if not isinstance(path, str) or not is_accelerator_file(path) or Path(path).is_absolute():
        return None
    is_of_file = isinstance(document.places.get(("cluster", "accelerator")), int)
    folder = Path(document.file).parent if is_of_file else Path()
    return os.path.normpath((folder / path).absolute())
