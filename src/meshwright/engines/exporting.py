"""Export of every engine's checkpoints as Hugging Face weights: whole weights, adapters, merged adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from meshwright.catalog.huggingface import model_from_path
from meshwright.engines.base import SavedWeightsEngine, WeightsEngine, find_engine
from meshwright.errors import InputError
from meshwright.specs.model import BaseFormat, Lora
from meshwright.specs.run import SYNTHETIC, Data, Run
from meshwright.training import checkpoints, conversion
from meshwright.training.checkpoints import Content, SavedCheckpoint, StepChoice
from meshwright.training.exported_folder import complete_folder, notes_on_adapter
from meshwright.training.trained_model import adapter_folder
from meshwright.training.weights import find_weights, save_weights
from meshwright.training.weights.folder import new_folder

Dtype = Literal["bf16", "fp32"]
ExportKind = Literal["weights", "merged weights", "adapter"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export: the weights of `checkpoint` are in the folder `weights`."""

    checkpoint: Path
    step: int
    weights: Path
    kind: ExportKind
    dtype: Dtype
    model: str
    notes: tuple[str, ...] = ()  # what the folder lacks, and why


def has_own_checkpoints(engine: str) -> bool:
    """Return True if `engine` keeps its checkpoints in folders of its own, not in Meshwright's."""
    return isinstance(find_engine(engine), WeightsEngine)


def export_own(run: Run, folder: Path, *, step: StepChoice, dtype: Dtype | None, merge: bool) -> Exported:
    """Write a checkpoint (None: the newest) of `run`, whose engine has checkpoints of its own, to `folder`.

    `dtype` None: fp32 for adapters, else bf16. `merge` adds adapters to their base's weights.
    Raises InputError where there is no such checkpoint, no adapters to merge, or `folder` is not empty;
    MissingDependencyError where the engine must be installed.
    """
    if step == "best":
        raise InputError(f"{run.engine} keeps no best checkpoint", got=step, allowed="the number of a step")
    engine = find_engine(run.engine)
    assert isinstance(engine, WeightsEngine)  # `has_own_checkpoints`
    kind = _kind(run.lora, merge=merge, where=run.source)
    dtype = dtype or ("fp32" if kind == "adapter" else "bf16")

    def write(out: Path) -> SavedCheckpoint:
        if not merge:
            path = engine.export_weights(run, step=step, folder=out, dtype=dtype)
        else:
            with TemporaryDirectory() as scratch:
                adapters = Path(scratch) / "adapter"
                path = engine.export_weights(run, step=step, folder=adapters, dtype="fp32")
                conversion.export_merged_folder(run, adapters, out, dtype=dtype)
        return SavedCheckpoint(path=path, step=int(path.name.rpartition("-")[2]))

    content = replace(checkpoints.content(run, weights=None), weights=run.weights)
    return _exported(folder, write, kind=kind, dtype=dtype, content=content)


def export_saved(
    saved: SavedCheckpoint,
    folder: Path,
    *,
    run: Run | None,
    dtype: Dtype | None,
    merge: bool,
    dequantised: bool = False,
) -> Exported:
    """Write `saved`, a checkpoint in one of Meshwright's folders, to `folder`; otherwise as `export_own`.

    `dequantised`: adapters are merged into the quantised base of their training, in 16 or 32 bits again.
    `run` is needed only for old checkpoints, which do not contain their model's shapes. Raises InputError also where
    a file is damaged.
    """
    if fault := checkpoints.verify(saved.path):
        raise InputError(
            f"checkpoint {saved.path} is damaged: {fault}",
            hint="`meshwright checkpoint verify` names the last good one; choose it with --step",
        )
    manifest = checkpoints.read_manifest(saved.path)
    content = checkpoints.content_of(manifest)
    content = content or (run and checkpoints.content(run, weights=None))
    if content is None:
        raise InputError(
            "this checkpoint does not contain its model's shapes: to-hf needs the run file", got=str(saved.path),
            allowed="RUN.yaml",
        )  # fmt: skip
    kind = _kind(content.lora, merge=merge, where=str(saved.path))
    if dequantised and (content.lora is None or content.lora.base_format is BaseFormat.FULL):
        raise InputError("--dequantised is for adapters that were trained on a quantised base", got=str(saved.path))
    dtype = dtype or ("fp32" if kind == "adapter" else "bf16")
    writer = find_engine(manifest["engine"]) if manifest.get("engine") else None

    def write(out: Path) -> SavedCheckpoint:
        if isinstance(writer, SavedWeightsEngine):
            writer.export_saved_weights(saved, content, out, dtype=dtype)
        elif content.lora is None or merge:
            base = run and run.weights
            conversion.export_weights(saved, content, out, dtype=dtype, base=base, dequantised=dequantised)
        else:
            conversion.export_adapters(saved, content, out, dtype=dtype)
        return saved

    written = _with_data(content, run, merge=merge)
    if dequantised and written.lora is not None:  # one base for the training and the folder
        written = replace(written, lora=replace(written.lora, base_format=BaseFormat.FULL))
    return _exported(folder, write, kind=kind, dtype=dtype, content=written)


def export_sum(
    base: Path, folder: Path, *, adapters: Sequence[str], factors: Sequence[float], dtype: Dtype | None, **sums: Any
) -> Exported:
    """Write the weights of `base` with PEFT adapters added, each times its factor (none: 1), to `folder`.

    `sums`: as of `conversion.load_merged`.

    `dtype` None: bf16. Raises InputError for what is no adapter of the base, and where `folder` is not empty.
    """
    dtype, found = dtype or "bf16", {adapter_folder(adapter): 1.0 for adapter in adapters}
    if len(found) < len(adapters):
        raise InputError("--adapter names a folder twice", got=", ".join(adapters))
    found = dict(zip(found, factors, strict=True)) if factors else found
    origin, model = find_weights(str(base)), model_from_path(base)
    content = Content(
        shapes=model,
        lora=None,
        precision=dtype,
        weights=origin.name,
        weights_fingerprint=origin.fingerprint,
        data=Data(source=SYNTHETIC),
    )

    def write(out: Path) -> SavedCheckpoint:
        module = conversion.load_merged(model, origin, found, dtype=conversion.FORMATS[dtype], **sums)
        save_weights(module, out, dtype=conversion.FORMATS[dtype])
        return SavedCheckpoint(path=base, step=0)

    return _exported(folder, write, kind="merged weights", dtype=dtype, content=content)


def _exported(
    folder: Path, write: Callable[[Path], SavedCheckpoint], *, kind: ExportKind, dtype: Dtype, content: Content
) -> Exported:
    """Write a folder, and complete one of whole weights. `write` returns the checkpoint."""
    notes = () if content.lora is None else conversion.notes_on_base(content.lora.base_format)
    if kind == "adapter":
        saved, notes = write(folder), notes + notes_on_adapter(content)
    else:
        with new_folder(folder) as unfinished:
            saved, notes = write(unfinished), notes + complete_folder(unfinished, content)
    model = content.shapes.name
    return Exported(
        checkpoint=saved.path, step=saved.step, weights=folder, kind=kind, dtype=dtype, model=model, notes=notes
    )


def _with_data(content: Content, run: Run | None, *, merge: bool) -> Content:
    """`content`, with what the run file knows and an old manifest does not, and the base that it merges with."""
    if run is None:
        return content
    if content.sequence_length is None:
        own = checkpoints.content(run, weights=None)
        content = replace(content, sequence_length=own.sequence_length, data=own.data)
    return replace(content, weights=run.weights or content.weights) if merge else content


def _kind(lora: Lora | None, *, merge: bool, where: str) -> ExportKind:
    """Kind of weights that are written. Raises InputError where there are no adapters to merge."""
    if merge and lora is None:
        raise InputError("--merge is about adapters; this checkpoint holds whole weights", got=where)
    return "weights" if lora is None else "merged weights" if merge else "adapter"
