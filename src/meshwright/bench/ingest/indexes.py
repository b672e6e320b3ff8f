"""usearch, hnswlib and faiss behind one interface. Similarity is the inner product of vectors of length one.

Keys of vectors are the numbers 0, 1, ... in the order of their addition. A search returns keys by decreasing
similarity, -1 where the index found fewer than k.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.bench.ingest.choices import KINDS, IndexChoice
from meshwright.errors import InputError, MissingDependencyError
from meshwright.inference.ingestion import usual_lists

Vectors = NDArray[np.float32]
Keys = NDArray[np.int64]
POINTS_A_LIST = 39
"""Vectors for each list below which faiss warns that k-means has too few."""


class VectorIndex(Protocol):
    """One index. `needs_training`: it takes no vector before `train` saw some."""

    needs_training: bool

    def train(self, vectors: Vectors) -> None: ...
    def add(self, vectors: Vectors) -> None: ...
    def set_search(self, choice: IndexChoice, *, threads: int) -> None: ...
    def search(self, queries: Vectors, k: int) -> Keys: ...
    def save(self, path: Path) -> None: ...


def require(kind: str) -> Any:
    """Import the package of a kind of index. Raises MissingDependencyError."""
    found = KINDS[kind]
    try:
        return importlib.import_module(found.package)
    except ImportError as error:
        raise MissingDependencyError(
            f"index {kind} needs the package {found.package} ({error})", hint=f"pip install '{found.install}'"
        ) from None


def make_index(choice: IndexChoice, *, dim: int, num_vectors: int, threads: int) -> VectorIndex:
    """An empty index. `num_vectors` is the number to come. Raises InputError for parameters that it cannot have."""
    library = require(choice.kind)
    if choice.kind == "usearch":
        return UsearchIndex(choice, dim, threads)
    if choice.kind == "hnswlib":
        return HnswlibIndex(library, choice, dim, threads)
    return FaissIndex(library, choice, dim, num_vectors, threads)


class UsearchIndex:
    """HNSW of usearch."""

    needs_training = False

    def __init__(self, choice: IndexChoice, dim: int, threads: int) -> None:
        self.threads = threads
        self.index = importlib.import_module("usearch.index").Index(
            ndim=dim, metric="ip", dtype=choice.value("dtype"), connectivity=int(choice.value("m")),
            expansion_add=int(choice.value("ef_build")), expansion_search=int(choice.value("ef")),
        )  # fmt: skip

    def train(self, vectors: Vectors) -> None:
        """Nothing to train."""

    def add(self, vectors: Vectors) -> None:
        first = len(self.index)
        self.index.add(np.arange(first, first + len(vectors)), vectors, threads=self.threads)

    def set_search(self, choice: IndexChoice, *, threads: int) -> None:
        self.index.expansion_search = int(choice.value("ef"))
        self.threads = threads

    def search(self, queries: Vectors, k: int) -> Keys:
        found = self.index.search(queries, k, threads=self.threads)
        keys = np.atleast_2d(np.asarray(found.keys)).astype(np.int64)
        counts = np.atleast_1d(np.asarray(found.counts)) if hasattr(found, "counts") else [keys.shape[1]]
        whole = np.full((len(queries), k), -1, dtype=np.int64)
        for row, of_query, count in zip(whole, keys, counts, strict=True):
            row[: int(count)] = of_query[: int(count)]
        return whole

    def save(self, path: Path) -> None:
        self.index.save(str(path))


class HnswlibIndex:
    """HNSW of hnswlib. It has a fixed size, which is doubled when it is full."""

    needs_training = False
    FIRST_SIZE = 1024

    def __init__(self, library: Any, choice: IndexChoice, dim: int, threads: int) -> None:
        self.index = library.Index(space="ip", dim=dim)
        self.index.init_index(
            max_elements=self.FIRST_SIZE, M=int(choice.value("m")), ef_construction=int(choice.value("ef_build"))
        )
        self.index.set_num_threads(threads)
        self.ef = int(choice.value("ef"))

    def train(self, vectors: Vectors) -> None:
        """Nothing to train."""

    def add(self, vectors: Vectors) -> None:
        first = self.index.get_current_count()
        size = self.index.get_max_elements()
        while size < first + len(vectors):
            size *= 2
        if size > self.index.get_max_elements():
            self.index.resize_index(size)
        self.index.add_items(vectors, np.arange(first, first + len(vectors)))

    def set_search(self, choice: IndexChoice, *, threads: int) -> None:
        self.ef = int(choice.value("ef"))
        self.index.set_num_threads(threads)

    def search(self, queries: Vectors, k: int) -> Keys:
        self.index.set_ef(max(self.ef, k))  # below k it finds fewer than k and fails
        return self.index.knn_query(queries, k=k)[0].astype(np.int64)

    def save(self, path: Path) -> None:
        self.index.save_index(str(path))


class FaissIndex:
    """Flat, HNSW or IVF of faiss."""

    def __init__(self, library: Any, choice: IndexChoice, dim: int, num_vectors: int, threads: int) -> None:
        self.faiss, self.kind = library, choice.kind
        library.omp_set_num_threads(threads)
        metric = library.METRIC_INNER_PRODUCT
        if choice.kind == "flat":
            self.index = library.IndexFlatIP(dim)
        elif choice.kind == "faiss-hnsw":
            self.index = library.IndexHNSWFlat(dim, int(choice.value("m")), metric)
            self.index.hnsw.efConstruction = int(choice.value("ef_build"))
        else:
            self.quantizer = library.IndexFlatIP(dim)  # the index refers to it and does not keep it
            lists = num_lists(choice, num_vectors)
            self.index = library.IndexIVFFlat(self.quantizer, dim, lists, metric)
            self.index.cp.min_points_per_centroid = 1  # its warning goes to stderr; `lists` is in the records
        self.needs_training = not self.index.is_trained

    def train(self, vectors: Vectors) -> None:
        self.index.train(vectors)

    def add(self, vectors: Vectors) -> None:
        self.index.add(vectors)

    def set_search(self, choice: IndexChoice, *, threads: int) -> None:
        self.faiss.omp_set_num_threads(threads)
        if self.kind == "faiss-hnsw":
            self.index.hnsw.efSearch = int(choice.value("ef"))
        elif self.kind == "faiss-ivf":
            self.index.nprobe = int(choice.value("probe"))

    def search(self, queries: Vectors, k: int) -> Keys:
        return self.index.search(queries, k)[1].astype(np.int64)

    def save(self, path: Path) -> None:
        self.faiss.write_index(self.index, str(path))


def num_lists(choice: IndexChoice, num_vectors: int) -> int:
    """Lists of an IVF index. Raises InputError if there are fewer vectors than lists."""
    asked = choice.value("lists")
    if asked == "auto":
        return max(1, min(usual_lists(num_vectors), num_vectors // POINTS_A_LIST))
    if int(asked) > num_vectors:
        raise InputError("--index faiss-ivf: more lists than vectors", got=int(asked), allowed=f"<= {num_vectors}")
    return int(asked)
