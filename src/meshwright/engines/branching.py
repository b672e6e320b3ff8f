"""A branch: a new run from the weights of another run's newest checkpoint, at step 0, with optimizer states of its own.

The weights are written as a Hugging Face folder in fp32, which every engine starts from, to START in the folder of
results. The branch saves its checkpoints to a folder of its own; those of the other run are only read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meshwright import runfile
from meshwright.engines import exporting
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.specs.model import Model
from meshwright.specs.run import Run
from meshwright.training import checkpoints, run_identity
from meshwright.training.rendezvous import under_launcher
from meshwright.training.weights.reading import shapes_of

START = "start"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The newest checkpoint of the other run."""

    identity: run_identity.RunIdentity | None
    shapes: Model
    name: str
    saved: checkpoints.SavedCheckpoint | None  # None: in the format of another program
    run: Run  # which can export it


@contextmanager
def branched(run: Run, *, results: Path) -> Iterator[Run]:
    """Yield the run that starts from the weights of the newest checkpoint in the checkpoint folder of `run`.

    If the block raises before a step is taken, `START` is removed. Raises InputError where there is no checkpoint, or
    its weights do not fit the model.
    """
    if under_launcher():
        raise InputError(
            "--branch is for one host without a launcher",
            hint="`meshwright checkpoint to-hf` writes the weights; name them with `weights`, and new folders",
        )
    if run.train.checkpoint is None:
        raise InputError("there is nothing to branch from: the run saves no checkpoints", hint="set train.checkpoint")
    saves = run.train.checkpoint
    source = _source(run, Path(saves.folder).expanduser())
    _refuse_shapes(source, run)
    start, own = results / START, _free_folder(saves.folder)
    if start.exists():
        raise InputError("the folder holds the start of another branch", got=str(results), hint="name another --out")
    is_new = not results.exists()
    try:
        _export(source, start)
        overrides = (f"weights={json.dumps(str(start))}", f"train.checkpoint.folder={json.dumps(own)}")
        yield replace(
            run,
            weights=str(start),
            train=replace(run.train, checkpoint=replace(saves, folder=own)),
            overrides=(*run.overrides, *overrides),
        )
    except BaseException:
        if not (results / "identity.json").exists():  # nothing was trained
            shutil.rmtree(results if is_new else start, ignore_errors=True)
        raise


def _source(run: Run, folder: Path) -> _Source:
    identity = run_identity.identity_in(folder)
    if run_identity.newest_manifest(folder) is not None:
        saved = checkpoints.newest(folder)
        manifest = checkpoints.read_manifest(saved.path)
        content = checkpoints.content_of(manifest) or checkpoints.content(run, weights=None)
        return _Source(identity=identity, shapes=content.shapes, name=manifest.get("run") or "?", saved=saved, run=run)
    if identity is None:
        raise InputError("there is no checkpoint to branch from", got=str(folder))
    files = sorted(Path(identity.results).glob("meshwright_run.y*ml"))
    if not files:
        raise InputError("the results of the run to branch from are gone", got=identity.results)
    other = runfile.load(files[0])
    return _Source(identity=identity, shapes=other.model, name=other.name, saved=None, run=other)


def _refuse_shapes(source: _Source, run: Run) -> None:
    held, ours = shapes_of(source.shapes), shapes_of(run.model)
    if held == ours:
        return
    other = replace(source.run, model=source.shapes)
    found = run_identity.compare(
        *(run_identity.new_identity(r, plan=None, results=None, fingerprints={}) for r in (other, run))
    )
    shapes = [line for line in found.refused if line.startswith("model.")]
    tensors = sorted({*held, *ours} - {name for name in held if held[name] == ours.get(name)})
    raise InputError(
        f"the weights of the checkpoint do not fit the model: {'; '.join(shapes)} ({len(tensors)} tensors, such as "
        f"{tensors[0]})",
        hint="a branch may change data, seed, tokenizer and all that has no weights",
    )


def _export(source: _Source, start: Path) -> None:
    if source.saved is not None:
        content = checkpoints.content_of(checkpoints.read_manifest(source.saved.path))
        merge = content is not None and content.lora is not None
        done = exporting.export_saved(source.saved, start, run=source.run, dtype="fp32", merge=merge)
    else:
        merge = source.run.lora is not None
        done = exporting.export_own(source.run, start, step=None, dtype="fp32", merge=merge)
    branch = run_identity.Branch(
        run=source.name,
        run_id=(source.identity and source.identity.run_id) or None,
        step=done.step,
        checkpoint=str(done.checkpoint.absolute()),
    )
    write_atomically(start / run_identity.BRANCH, json.dumps(asdict(branch), indent=2) + "\n")


def _free_folder(folder: str) -> str:
    names = (f"{folder.rstrip('/')}-branch{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 10_000))))
    return next(
        n for n in names if not Path(n).expanduser().exists() and not run_identity.identity_file(Path(n)).exists()
    )
