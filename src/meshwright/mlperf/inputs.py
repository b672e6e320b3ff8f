"""Data and weights of a benchmark: their place, their completeness, and their source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import default_cache
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.mlperf.benchmarks import PROXIES, Benchmark
from meshwright.specs.run import Run
from meshwright.training.data.cache import build_once, remembered_digest
from meshwright.training.data.megatron import IndexedWriter
from meshwright.training.data.store import TRAINED_SUFFIX

DATA_VARIABLE, WEIGHTS_VARIABLE = "MESHWRIGHT_MLPERF_DATA", "MESHWRIGHT_MLPERF_WEIGHTS"


@dataclass(frozen=True, kw_only=True)
class BenchmarkInputs:
    """Paths as a run file names them."""

    train: str
    validation: str
    weights: str | None
    files: tuple[Path, ...]  # all of the data set
    train_samples: int
    facts: Mapping[str, Any]  # logged with each run


def find_inputs(benchmark: Benchmark, *, data: Path | None, weights: Path | None) -> BenchmarkInputs:
    """The data and the weights of a benchmark; the first use of a proxy builds its own.

    Raises MissingDependencyError with the commands that fetch them where they are absent.
    """
    if benchmark.training.get("data") == "generated":
        return _of_proxy(benchmark, data=data, weights=weights)
    table = benchmark.training.get("inputs")
    if table is None:
        raise InputError(f"{benchmark.name} is checked and scored here, and not run: its rules have no run file")
    data = data or _from_environment(DATA_VARIABLE)
    weights = weights or _from_environment(WEIGHTS_VARIABLE)
    missing = [f"--data DIR or {DATA_VARIABLE}"] if data is None else _absent(data, table["files"])
    needs_weights = bool(table.get("weights"))
    if needs_weights:
        missing += [f"--weights DIR or {WEIGHTS_VARIABLE}"] if weights is None else _absent_weights(weights)
    if missing:
        lines = [*table["get"], *(table.get("get_weights", ()) if needs_weights else ())]
        raise MissingDependencyError(
            f"{benchmark.name} needs data that is not here: {'; '.join(missing)}", hint="\n      ".join(lines)
        )
    assert data is not None
    return _of_files(benchmark, data, table, weights=str(weights) if needs_weights else None)


def check_data(run: Run) -> None:
    """Read the data of `run` through, as its training will: every token must be in the model's vocabulary.

    A large data set takes minutes. The cache keeps the result by the size and the time of the files, so that
    no timed run reads them again. Raises InputError for data that cannot be trained on, and where the cache
    cannot keep the result.
    """
    from meshwright.training.data.corpus import open_data

    open_data(run)
    require_remembered(run)


def require_remembered(run: Run) -> None:
    """Raise InputError where a training of `run` would read a large data set through."""
    from meshwright.training.data.store import open_store
    from meshwright.training.data.token_range import is_remembered

    cache = default_cache()
    places = (*(source.path for source in run.data.sources.values()), *run.data.validation_sources.values())
    if not all(is_remembered(open_store([Path(place)]), cache=cache) for place in places):
        raise InputError(
            "the check of the data set cannot be remembered: each run would read all of it on the clock",
            got=f"cache {cache}", hint="MESHWRIGHT_CACHE names a folder that can be written, and that all hosts share",
        )  # fmt: skip


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _absent(data: Path, files: list[str]) -> list[str]:
    return [f"{data / name}" for name in files if not (data / name).is_file()]


def _absent_weights(weights: Path) -> list[str]:
    has_files = weights.is_dir() and any(weights.glob("*.safetensors")) and (weights / "config.json").is_file()
    return [] if has_files else [f"{weights}: config.json and safetensors"]


def _of_files(benchmark: Benchmark, data: Path, table: Mapping[str, Any], *, weights: str | None) -> BenchmarkInputs:
    """Token files as they are, or as they are made of packed records, once."""
    from meshwright.training.data.store import open_store

    length = benchmark.sequence_length
    assert length is not None
    prefixes = {}
    for part in ("train", "validation"):
        path = data / table[part]
        is_packed = path.suffix in (".parquet", ".npy")
        prefixes[part] = indexed_from_packed(path, length=length) if is_packed else path
    files = tuple(
        file for prefix in prefixes.values() for file in prefix.parent.glob(f"{prefix.name}.*") if file.is_file()
    )
    train = open_store([prefixes["train"]])
    samples = train.num_documents if train.is_masked else (train.num_tokens - 1) // length
    return BenchmarkInputs(
        train=str(prefixes["train"]), validation=str(prefixes["validation"]), weights=weights, files=files,
        train_samples=samples, facts={},
    )  # fmt: skip


def _of_proxy(benchmark: Benchmark, *, data: Path | None, weights: Path | None) -> BenchmarkInputs:
    if data is not None or weights is not None:
        raise InputError(f"{benchmark.name} brings its own data and weights", hint="leave --data and --weights out")
    from meshwright.mlperf.proxy_data import build_proxy_data

    folder = build_proxy_data(benchmark)
    base = benchmark.training.get("base")
    samples = benchmark.hyperparameters["train_samples"].value
    assert isinstance(samples, int)
    return BenchmarkInputs(
        train=str(folder / "train"),
        validation=str(folder / "validation"),
        weights=None if base is None else str(PROXIES / base),
        files=tuple(sorted(file for file in folder.iterdir() if file.is_file())),
        train_samples=samples,
        facts={f"data_{part}_sha256": benchmark.data[f"{part}_sha256"] for part in ("train", "validation")},
    )


def indexed_from_packed(path: Path, *, length: int, cache: Path | None = None) -> Path:
    """The token files of packed records, one record a document with a mask. Built in the cache at the first use.

        NAME.parquet   columns `input_ids` and `labels`; -100 is a token that the loss does not count
        NAME.npy       rows {input_ids, loss_mask}, as NeMo reads them: an array of Python objects, which is refused,
                       because reading one runs whatever its author wrote

    Each record has `length` tokens. A label belongs to the token it predicts, as in Hugging Face and NeMo: position i
    of `labels` says whether token i counts.

    Raises InputError for another kind of file, columns or lengths, MissingDependencyError without pyarrow.
    """
    if path.suffix != ".parquet":
        raise InputError(
            "packed records are read from Parquet", got=str(path), allowed="columns input_ids and labels",
            hint="an .npy of Python objects runs code when it is read: use the Parquet file that it was made from",
        )  # fmt: skip
    if find_spec("pyarrow") is None:
        raise MissingDependencyError("packed records are read by pyarrow", hint="pip install pyarrow")
    cache = default_cache() if cache is None else cache
    key = hashlib.sha256(f"{remembered_digest(path, cache=cache)} {length}".encode()).hexdigest()[:24]
    folder = cache / "packed" / key

    def build(empty: Path) -> None:
        masks = []
        with IndexedWriter(empty / "tokens", dtype=np.int32) as writer:
            for tokens_T, trained_T in _records(path, length=length):
                writer.add(tokens_T)
                masks.append(trained_T)
        (empty / f"tokens{TRAINED_SUFFIX}").write_bytes(np.concatenate(masks).tobytes())

    build_once(folder, build, about={"packed": path.name})
    return folder / "tokens"


def _records(path: Path, *, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path, columns=["input_ids", "labels"])
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path}: packed records cannot be read: {error}") from error
    if table.column_names != ["input_ids", "labels"] or not table.num_rows:
        raise InputError(f"{path}: packed records have the columns input_ids and labels", got=table.column_names)
    for number in range(table.num_rows):
        row = [np.asarray(table[name][number].as_py(), dtype=np.int64) for name in table.column_names]
        if any(len(values) != length for values in row):
            raise InputError(f"{path}: record {number} has another length", got=len(row[0]), allowed=length)
        yield row[0], row[1] != IGNORED_LABEL
