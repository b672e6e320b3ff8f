"""The run's batches as files, either for MaxText's input pipeline or for Meshwright's loop.

    FOLDER/maxtext/data/tokens.bin, .idx       one document per sample, of T + 1 tokens: the sample and the next token
    FOLDER/maxtext/data/index/KEY-*.npy        Megatron's three indices for the order of the samples
or
    FOLDER/maxtext/data/training.npy           [S, F, T]: tokens, labels, positions and documents of every sample
    FOLDER/maxtext/data/validation.npy         the same for the validation batches

MaxText builds shuffled indices by its own rule, unless it finds files with the KEY of the indices, which is a digest of
their parameters. MaxText recognises the end of a document by a token, which must occur nowhere else. Data without such
a token (prompts, padding) is written as arrays.

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
class BatchRequest:
    """The batches that MaxText reads from the files."""

    num_batches: int  # global batches
    global_batch: int  # rows of each that are trained
    loaded: int  # rows of each that MaxText loads: at least one per device
    sequence_length: int
    seed: int

    @property
    def num_samples(self) -> int:
        return self.num_batches * self.loaded


def batch_request(run: Run, plan: Plan, *, num_processes: int) -> BatchRequest:
    """Return the batches that MaxText reads with `num_processes` processes."""
    assert run.num_steps is not None
    loaded = run.global_batch
    if num_processes == 1:  # MaxText loads at least one row per device, and ignores the last ones
        loaded = max(loaded, plan.num_devices * num_accumulated(run, plan))
    return BatchRequest(
        num_batches=run.num_steps + 1,  # one more than steps: MaxText's steps are counted from 1
        global_batch=run.global_batch,
        loaded=loaded,
        sequence_length=run.sequence_length,
        seed=run.train.seed,
    )


def write(run: Run, folder: Path, *, request: BatchRequest) -> None:
    """Write the files of `request` into `folder`, completely or not at all; keep files that exist.

    Raises InputError for data that cannot be read.
    """
    about = asdict(request) | {"prefix": str(folder / TOKENS), "data": asdict(run.data)}
    about |= {"evaluate": run.train.evaluate and asdict(run.train.evaluate), "adapters": run.lora is not None}
    about = json.loads(json.dumps(about))  # as it is read again: lists in place of tuples
    if _about(folder) != about:
        shutil.rmtree(folder, ignore_errors=True)
    build_once(folder, lambda partial: _write(run, partial, folder / TOKENS, request), about=about)


def has_arrays(folder: Path) -> bool:
    """Return True if the batches were written as arrays, for Meshwright's loop."""
    return (folder / TRAINING).is_file()


def _about(folder: Path) -> object:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["about"]
    except (OSError, ValueError, KeyError):
        return None


def end_token(folder: Path) -> int:
    """Return the token that ends documents; a token outside the vocabulary if no document ends."""
    return json.loads((folder / ENDS).read_text(encoding="utf-8"))["token"]


def _write(run: Run, partial: Path, prefix: Path, request: BatchRequest) -> None:
    corpus = data.open_data(run)
    batches = data.Batches(
        samples=corpus.train, global_batch=request.global_batch, seed=request.seed, vocab=run.model.vocab
    )
    evaluate = run.train.evaluate
    if evaluate is None and run.lora is None:
        try:
            return _write_tokens(batches, partial, prefix, request)
        except _NoEndTokenError:
            shutil.rmtree(partial)
            partial.mkdir()
    _write_arrays(partial / TRAINING, batches, num_batches=request.num_batches - 1)
    if evaluate is not None:
        assert corpus.validation is not None
        validation = replace(batches, samples=corpus.validation, is_shuffled=False, is_once=True)
        _write_arrays(partial / VALIDATION, validation, num_batches=evaluate.num_batches)


def _write_arrays(path: Path, batches: data.Batches, *, num_batches: int) -> None:
    rows, length = num_batches * batches.global_batch, len(batches.samples.sample(0).tokens_T)
    written_SFT = np.lib.format.open_memmap(path, "w+", np.int32, (rows, len(FIELDS), length))
    for number, batch in enumerate(batches.iterate(stop=num_batches)):
        begin = number * batches.global_batch
        fields_BFT = np.stack([getattr(batch, name).numpy() for name in FIELDS], axis=1)
        written_SFT[begin : begin + batches.global_batch] = fields_BFT
    written_SFT.flush()


def _write_tokens(batches: data.Batches, partial: Path, prefix: Path, request: BatchRequest) -> None:
    ends = _EndTokenFinder(vocab=batches.vocab or 0)
    write_indexed(partial / TOKENS, _samples(batches, request, ends), dtype=np.int32)
    (partial / ENDS).write_text(json.dumps({"token": ends.token()}), encoding="utf-8")
    key = index_key(prefix, request)
    numbers_S = np.arange(request.num_samples, dtype=np.int32)
    begins_S2 = np.stack([numbers_S, np.zeros_like(numbers_S)], axis=1)
    stops_S2 = np.stack([numbers_S, np.full_like(numbers_S, request.sequence_length)], axis=1)
    indices = {
        "document_index": numbers_S,
        "sample_index": np.stack([begins_S2, stops_S2], axis=1).reshape(-1, 2),  # a sample is between two rows
        "shuffle_index": 2 * numbers_S,
    }
    (partial / INDEX).mkdir()
    for name, values in indices.items():
        np.save(partial / INDEX / f"{key}-{name}.npy", values)


def index_key(prefix: Path, request: BatchRequest) -> str:
    """Return the key of MaxText 0.2.5 for the indices of a token file that is read once."""
    about = {
        "class": "MegatronNpyDataSource",
        "input_paths": [str(prefix)],
        "num_epochs": 1,
        "separate_final_epoch": False,
        "seed": request.seed,
        "sequence_length": request.sequence_length,
        "split": None,
        "split_index": 0,
        "add_extra_token": 1,
    }
    return hashlib.md5(json.dumps(about, indent=4).encode()).hexdigest()


def _samples(batches: data.Batches, request: BatchRequest, ends: _EndTokenFinder) -> Iterator[np.ndarray]:
    """Yield T + 1 tokens per sample, batch by batch; rows that are loaded but not trained repeat the first one."""
    for batch in batches.iterate(stop=request.num_batches):
        tokens_BT, labels_BT = batch.tokens_BT.numpy(), batch.labels_BT.numpy()
        ends.see(tokens_BT, labels_BT, batch.documents_BT.numpy())
        last_B1 = np.where(labels_BT[:, -1:] == data.IGNORED_LABEL, 0, labels_BT[:, -1:])
        rows_BT = np.concatenate([tokens_BT, last_B1], axis=1).astype(np.int32)
        yield from rows_BT
        yield from [rows_BT[0]] * (request.loaded - request.global_batch)


class _NoEndTokenError(Exception):
    """No token ends all documents and occurs nowhere else, or other tokens are untrained too."""


class _EndTokenFinder:
    """Finds the token that ends documents and occurs nowhere else."""

    def __init__(self, *, vocab: int) -> None:
        self.vocab = vocab
        self.found: set[int] = set()
        self.is_within = np.zeros(vocab, dtype=bool)

    def see(self, tokens_BT: np.ndarray, labels_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Examine one batch."""
        is_end_BT = labels_BT == data.IGNORED_LABEL
        changes_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
        if (documents_BT == data.PADDING_DOCUMENT).any() or not (changes_BT == is_end_BT[:, :-1]).all():
            raise _NoEndTokenError
        self.found |= set(np.unique(tokens_BT[is_end_BT]).tolist())
        self.is_within[np.unique(tokens_BT[~is_end_BT])] = True

    def token(self) -> int:
        """Return the token that ends documents; a token outside the vocabulary if no document ends."""
        if not self.found:
            return self.vocab
        if len(self.found) > 1 or self.is_within[next(iter(self.found))]:
            raise _NoEndTokenError
        return next(iter(self.found))
