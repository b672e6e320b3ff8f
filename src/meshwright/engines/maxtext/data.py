"""The run's batches as token files that MaxText's input pipeline reads in their order.

    FOLDER/maxtext/data/tokens.bin, .idx       a document a sample, of T + 1 tokens: those of the sample, and the next
    FOLDER/maxtext/data/index/KEY-*.npy        Megatron's three indices, which say: these samples, in this order

MaxText builds the indices itself, shuffled by its own rule, unless it finds files of the KEY that it would give them;
the key is a digest of what the indices are made for. Where documents end it is told by a token: it is in the file
exactly at the end of documents, or the data cannot be said that way and is refused.

    B rows of a batch   T positions of a sample   S samples
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshwright.engines.maxtext.lower import INDEX, TOKENS
from meshwright.engines.native import data
from meshwright.engines.native.data.cache import MANIFEST, build_once
from meshwright.engines.native.data.megatron import write_indexed
from meshwright.errors import InputError
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

ENDS = "ends.json"


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
    accumulated = 1 if plan.pipeline > 1 else plan.num_micro_batches(run.global_batch)
    loaded = run.global_batch
    if num_processes == 1:  # it loads a row a device at least, and leaves out the last ones
        loaded = max(loaded, plan.num_devices * accumulated)
    return Wanted(
        num_batches=run.num_steps + 1,  # one more than are taken: its steps are counted from 1
        global_batch=run.global_batch,
        loaded=loaded,
        sequence_length=run.sequence_length,
        seed=run.train.seed,
    )


def write(run: Run, folder: Path, *, asked_for: Wanted) -> None:
    """Write the token files of `asked_for` into `folder`, whole or not at all; leave it where they are there.

    Raises InputError for data that MaxText cannot be told.
    """
    about = asdict(asked_for) | {"prefix": str(folder / TOKENS), "data": asdict(run.data)}
    if _about(folder) != about:
        shutil.rmtree(folder, ignore_errors=True)
    build_once(folder, lambda partial: _write(run, partial, folder / TOKENS, asked_for), about=about)


def _about(folder: Path) -> object:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["about"]
    except (OSError, ValueError, KeyError):
        return None


def end_token(folder: Path) -> int:
    """The token that ends documents; one that no model has where none ends."""
    return json.loads((folder / ENDS).read_text(encoding="utf-8"))["token"]


def _write(run: Run, partial: Path, prefix: Path, asked_for: Wanted) -> None:
    ends = _Ends(run)
    write_indexed(partial / TOKENS, _samples(run, asked_for, ends), dtype=np.int32)
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


def _samples(run: Run, asked_for: Wanted, ends: _Ends) -> Iterator[np.ndarray]:
    """T + 1 tokens a sample, batch by batch; rows that are loaded and not trained on repeat the first one."""
    batches = data.Batches(
        samples=data.open_data(run).train,
        global_batch=asked_for.global_batch,
        seed=asked_for.seed,
        vocab=run.model.vocab,
    )
    for batch in batches.iterate(stop=asked_for.num_batches):
        tokens_BT, labels_BT = batch.tokens_BT.numpy(), batch.labels_BT.numpy()
        ends.see(tokens_BT, labels_BT, batch.documents_BT.numpy())
        last_B1 = np.where(labels_BT[:, -1:] == data.IGNORED_LABEL, 0, labels_BT[:, -1:])
        rows_BT = np.concatenate([tokens_BT, last_B1], axis=1).astype(np.int32)
        yield from rows_BT
        yield from [rows_BT[0]] * (asked_for.loaded - asked_for.global_batch)


class _Ends:
    """Finds the token that ends documents, and that it does nothing else."""

    def __init__(self, run: Run) -> None:
        self.source, self.vocab = run.data.source, run.model.vocab
        self.found: set[int] = set()
        self.is_within = np.zeros(run.model.vocab, dtype=bool)

    def see(self, tokens_BT: np.ndarray, labels_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Look at one batch."""
        is_end_BT = labels_BT == data.IGNORED_LABEL
        changes_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
        if (documents_BT == data.PADDING_DOCUMENT).any() or not (changes_BT == is_end_BT[:, :-1]).all():
            raise InputError(
                "MaxText's input pipeline trains on every token but the last of a document; "
                "this data has prompts that are not trained on, or padding",
                got=self.source, hint="--set engine=native",
            )  # fmt: skip
        self.found |= set(np.unique(tokens_BT[is_end_BT]).tolist())
        self.is_within[np.unique(tokens_BT[~is_end_BT])] = True

    def token(self) -> int:
        """The one that ends documents. Raises InputError where none does alone."""
        if not self.found:
            return self.vocab
        if len(self.found) > 1 or self.is_within[next(iter(self.found))]:
            raise InputError(
                "MaxText's input pipeline is told by a token where documents end, and here no token ends all of them "
                "and stands nowhere else",
                got=self.source, hint="end documents with a token of their own, or --set engine=native",
            )  # fmt: skip
        return next(iter(self.found))
