"""Each index against exact neighbours, and recall with ties."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("faiss")

from meshwright.bench.ingest.choices import KINDS, parse_index
from meshwright.bench.ingest.comparison import exact_similarities, extended, recall_at_k, with_same_vector
from meshwright.bench.ingest.indexes import make_index, num_lists
from meshwright.errors import InputError

DIM, K = 24, 10
FULL = {
    "flat": "flat", "usearch": "usearch:ef=400", "hnswlib": "hnswlib:ef=400", "faiss-hnsw": "faiss-hnsw:ef=400",
    "faiss-ivf": "faiss-ivf:lists=16,probe=16",
}  # fmt: skip


def unit(rng: np.random.Generator, n: int) -> np.ndarray:
    found = rng.standard_normal((n, DIM)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def vectors():
    return unit(np.random.default_rng(0), 1500)


@pytest.fixture(scope="module")
def queries():
    return unit(np.random.default_rng(1), 20)


@pytest.fixture(scope="module")
def least(vectors, queries):
    return exact_similarities(vectors, queries, K, threads=1)


def made(text: str, vectors: np.ndarray, *, parts: int = 1):
    (choice,) = parse_index(text)
    pytest.importorskip(KINDS[choice.kind].package)
    index = make_index(choice, dim=vectors.shape[1], num_vectors=len(vectors), threads=1)
    if index.needs_training:
        index.train(vectors)
    for part in np.array_split(vectors, parts):
        index.add(part)
    index.set_search(choice, threads=1)
    return index


def test_the_exact_similarities_are_those_of_numpy(vectors, queries, least):
    expected = np.sort(queries.astype(np.float64) @ vectors.T.astype(np.float64), axis=1)[:, -K]
    np.testing.assert_allclose(least, expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_looks_everywhere_has_recall_one(kind, vectors, queries, least):
    for parts in (1, 7):  # hnswlib grows beyond its first size
        index = made(FULL[kind], vectors, parts=parts)
        assert recall_at_k(index.search(queries, K), vectors, queries, least) >= 0.99


@pytest.mark.parametrize(
    "text", ["usearch:m=4,ef_build=8,ef=1", "faiss-hnsw:m=4,ef_build=8,ef=1", "faiss-ivf:lists=64,probe=1"]
)
def test_an_index_that_hardly_looks_has_less(text, vectors, queries, least):
    index = made(text, vectors)
    assert 0 < recall_at_k(index.search(queries, K), vectors, queries, least) < 0.9


def test_narrow_vectors_have_less_recall_and_smaller_files(vectors, queries, least, tmp_path):
    recalls, sizes = [], []
    for dtype in ("f32", "i8"):
        index = made(f"usearch:ef=400,dtype={dtype}", vectors)
        recalls.append(recall_at_k(index.search(queries, K), vectors, queries, least))
        index.save(tmp_path / dtype)
        sizes.append((tmp_path / dtype).stat().st_size)
    assert recalls[1] < recalls[0]
    assert sizes[0] - sizes[1] == 3 * DIM * len(vectors)


@pytest.mark.parametrize("kind", KINDS)
def test_few_vectors_are_all_found(kind, vectors, queries):
    few = vectors[:3]
    index = made({"faiss-ivf": "faiss-ivf:lists=1"}.get(kind, kind), few)
    assert np.sort(index.search(queries[:2], 3), axis=1).tolist() == [[0, 1, 2]] * 2


def test_lists_follow_the_number_of_vectors():
    (auto,), (many,) = parse_index("faiss-ivf"), parse_index("faiss-ivf:lists=50")
    assert [num_lists(auto, n) for n in (1, 40, 10_000, 1_000_000)] == [1, 1, 256, 4000]
    with pytest.raises(InputError, match="more lists than vectors"):
        num_lists(many, 49)


def test_any_of_equal_vectors_is_right():
    """Duplicate chunks: an index may return other copies than the exact one."""
    vectors = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)  # keys 0-3, 4-7, 8-11 are equal
    queries = np.array([[1, 0.1, 0]], dtype=np.float32)
    least = exact_similarities(vectors, queries, 2, threads=1)
    assert recall_at_k(np.array([[2, 3]]), vectors, queries, least) == 1.0
    assert recall_at_k(np.array([[3, 0]]), vectors, queries, least) == 1.0
    assert recall_at_k(np.array([[0, 4]]), vectors, queries, least) == 0.5
    assert recall_at_k(np.array([[0, 0]]), vectors, queries, least) == 0.5, "a key returned twice counts once"
    assert recall_at_k(np.array([[0, -1]]), vectors, queries, least) == 0.5
    assert recall_at_k(np.array([[0, 12]]), vectors, queries, least) == 0.5, "a key that no vector has"
    assert with_same_vector(np.array([[3, -1], [4, -1]]), vectors, np.array([0, 0])) == 0.5


def test_synthetic_vectors_are_noisy_copies(vectors):
    more = extended(vectors[:100], 250, seed=0)
    assert more.shape == (250, DIM)
    assert (more[:100] == vectors[:100]).all()
    np.testing.assert_allclose(np.linalg.norm(more, axis=1), 1, atol=1e-5)
    nearest = (more[100:] @ vectors[:100].T).max(axis=1)
    assert 0.8 < np.median(nearest) < 0.95
    assert len(extended(vectors, 20, seed=0)) == 20
