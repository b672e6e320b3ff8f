"""The run's batches as files: for MaxText's input pipeline, which reads them in their order, or for our loop.

    FOLDER/maxtext/data/tokens.bin, .idx       a document a sample, of T + 1 tokens: those of the sample, and the next
    FOLDER/maxtext/data/index/KEY-*.npy        Megatron's three indices, which say: these samples, in this order
or
    FOLDER/maxtext/data/training.npy           [S, F, T]: tokens, labels, positions and documents of every sample
    FOLDER/maxtext/data/validation.npy         the same of the batches that are evaluated

MaxText builds the indices itself, shuffled by its own rule, unless it finds files of the KEY that it would give them;
the key is a digest of what the indices are made for. Where documents end it is told by a token: it is in the file
exactly at the end of documents. Data that cannot be said that way (prompts, padding) is written as arrays.

    B rows of a batch   T positions of a sample   S samples   F fields
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from meshwright.engines.maxtext.check import num_accumulated
from meshwright.engines.maxtext.lower import INDEX, TOKENS
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import data
from meshwright.training.data.cache import MANIFEST, build_once
from meshwright.training.data.megatron import write_indexed

ENDS = "ends.json"
TRAINING, VALIDATION = "training.npy", "validation.npy"
FIELDS = ("tokens_BT", "labels_BT", "positions_BT", "documents_BT")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What MaxText will ask a token file for."""

    num_batches: int  # global batches that are written
    global_batch: int  # rows of each that are trained on
    loaded: int  # rows of each that MaxText loads: as many as it has devices where it trains on fewer
    sequence_length: int
    seed: int

    @property
    def num_samples(self) -> int:
        return self.num_batches * self.loaded


def wanted(run: Run, plan: Plan, *, num_processes: int) -> Wanted:
    """What MaxText on `num_processes` processes asks for."""
    assert run.num_steps is not None
    loaded = run.global_batch
    if num_processes == 1:  # it loads a row a device at least, and leaves out the last ones
        loaded = max(loaded, plan.num_devices * num_accumulated(run, plan))
    return Wanted(
        num_batches=run.num_steps + 1,  # one more than are taken: its steps are counted from 1
        global_batch=run.global_batch,
        loaded=loaded,
        sequence_length=run.sequence_length,
        seed=run.train.seed,
    )


def write(run: Run, folder: Path, *, asked_for: Wanted) -> None:
    """Write the files of `asked_for` into `folder`, whole or not at all; leave it where they are there.

    Raises InputError for data that cannot be read.
    """
    about = asdict(asked_for) | {"prefix": str(folder / TOKENS), "data": asdict(run.data)}
    about |= {"evaluate": run.train.evaluate and asdict(run.train.evaluate), "adapters": run.lora is not None}
    if _about(folder) != about:
        shutil.rmtree(folder, ignore_errors=True)
    build_once(folder, lambda partial: _write(run, partial, folder / TOKENS, asked_for), about=about)


def is_for_our_loop(folder: Path) -> bool:
    """Whether what was written is arrays."""
    return (folder / TRAINING).is_file()


def _about(folder: Path) -> object:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["about"]
    except (OSError, ValueError, KeyError):
        return None


def end_token(folder: Path) -> int:
    """The token that ends documents; one that no model has where none ends."""
    return json.loads((folder / ENDS).read_text(encoding="utf-8"))["token"]


def _write(run: Run, partial: Path, prefix: Path, asked_for: Wanted) -> None:
    corpus = data.open_data(run)
    batches = data.Batches(
        samples=corpus.train,
        global_batch=asked_for.global_batch,
        seed=asked_for.seed,
        vocab=run.model.vocab,
    )
    evaluate = run.train.evaluate
    if evaluate is None and run.lora is None:
        try:
            return _write_tokens(batches, partial, prefix, asked_for)
        except _NotToldByTokensError:
            shutil.rmtree(partial)
            partial.mkdir()
    _write_arrays(partial / TRAINING, batches, num_batches=asked_for.num_batches - 1)
    if evaluate is not None:
        assert corpus.validation is not None
        held = replace(batches, samples=corpus.validation, is_shuffled=False)
        _write_arrays(partial / VALIDATION, held, num_batches=evaluate.num_batches)


def _write_arrays(path: Path, batches: data.Batches, *, num_batches: int) -> None:
    rows, length = num_batches * batches.global_batch, len(batches.samples.sample(0).tokens_T)
    written_SFT = np.lib.format.open_memmap(path, "w+", np.int32, (rows, len(FIELDS), length))
    for number, batch in enumerate(batches.iterate(stop=num_batches)):
        begin = number * batches.global_batch
        fields_BFT = np.stack([getattr(batch, name).numpy() for name in FIELDS], axis=1)
        written_SFT[begin : begin + batches.global_batch] = fields_BFT
    written_SFT.flush()


def _write_tokens(batches: data.Batches, partial: Path, prefix: Path, asked_for: Wanted) -> None:
    ends = _Ends(vocab=batches.vocab or 0)
    write_indexed(partial / TOKENS, _samples(batches, asked_for, ends), dtype=np.int32)
    (partial / ENDS).write_text(json.dumps({"token": ends.token()}), encoding="utf-8")
    key = index_key(prefix, asked_for)
    numbers_S = np.arange(asked_for.num_samples, dtype=np.int32)
    begins_S2 = np.stack([numbers_S, np.zeros_like(numbers_S)], axis=1)
    stops_S2 = np.stack([numbers_S, np.full_like(numbers_S, asked_for.sequence_length)], axis=1)
    indices = {
        "document_index": numbers_S,
        "sample_index": np.stack([begins_S2, stops_S2], axis=1).reshape(
            -1, 2
        ),  # a sample is between two rows
        "shuffle_index": 2 * numbers_S,
    }
    (partial / INDEX).mkdir()
    for name, values in indices.items():
        np.save(partial / INDEX / f"{key}-{name}.npy", values)


def index_key(prefix: Path, asked_for: Wanted) -> str:
    """The name under which MaxText 0.2.5 looks for the indices of a token file that it reads through once."""
    about = {
        "class": "MegatronNpyDataSource",
        "input_paths": [str(prefix)],
        "num_epochs": 1,
        "separate_final_epoch": False,
        "seed": asked_for.seed,
        "sequence_length": asked_for.sequence_length,
        "split": None,
        "split_index": 0,
        "add_extra_token": 1,
    }
    return hashlib.md5(json.dumps(about, indent=4).encode()).hexdigest()


def _samples(batches: data.Batches, asked_for: Wanted, ends: _Ends) -> Iterator[np.ndarray]:
    """T + 1 tokens a sample, batch by batch; rows that are loaded and not trained on repeat the first one."""
    for batch in batches.iterate(stop=asked_for.num_batches):
        tokens_BT, labels_BT = batch.tokens_BT.numpy(), batch.labels_BT.numpy()
        ends.see(tokens_BT, labels_BT, batch.documents_BT.numpy())
        last_B1 = np.where(labels_BT[:, -1:] == data.IGNORED_LABEL, 0, labels_BT[:, -1:])
        rows_BT = np.concatenate([tokens_BT, last_B1], axis=1).astype(np.int32)
        yield from rows_BT
        yield from [rows_BT[0]] * (asked_for.loaded - asked_for.global_batch)


class _NotToldByTokensError(Exception):
    """No token ends all documents and stands nowhere else, or other tokens than those are not trained on."""


class _Ends:
    """Finds the token that ends documents, and that it does nothing else."""

    def __init__(self, *, vocab: int) -> None:
        self.vocab = vocab
        self.found: set[int] = set()
        self.is_within = np.zeros(vocab, dtype=bool)

    def see(self, tokens_BT: np.ndarray, labels_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Look at one batch."""
        is_end_BT = labels_BT == data.IGNORED_LABEL
        changes_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
        if (documents_BT == data.PADDING_DOCUMENT).any() or not (changes_BT == is_end_BT[:, :-1]).all():
            raise _NotToldByTokensError
        self.found |= set(np.unique(tokens_BT[is_end_BT]).tolist())
        self.is_within[np.unique(tokens_BT[~is_end_BT])] = True

    def token(self) -> int:
        """The one that ends documents; one that no model has where none ends."""
        if not self.found:
            return self.vocab
        if len(self.found) > 1 or self.is_within[next(iter(self.found))]:
            raise _NotToldByTokensError
        return next(iter(self.found))
