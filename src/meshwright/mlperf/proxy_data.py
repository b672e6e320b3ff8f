"""Data sets of proxies: generated text as Megatron token files, byte by byte, with a mask where only answers count.

The text is the same everywhere, so its hash is part of a proxy's rules: text with another one is refused.
Source code of an installed Python was the alternative: it is natural text, and another text under every version, so
that reference convergence points would hold on one version only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.generated_text import Language
from meshwright.training.data.cache import build_once
from meshwright.training.data.megatron import IndexedWriter
from meshwright.training.data.store import TRAINED_SUFFIX

END = 256  # after the 256 bytes
PARTS = ("train", "validation")


def build_proxy_data(benchmark: Benchmark, *, cache: Path | None = None) -> Path:
    """The folder with `train` and `validation` of a proxy, built in the cache at its first use.

    Raises InputError where the generated text differs from the rules' text.
    """
    digests = "".join(str(benchmark.data[f"{part}_sha256"]) for part in PARTS)
    key = hashlib.sha256(digests.encode()).hexdigest()[:16]
    folder = (cache or default_cache()) / "mlperf-proxies" / f"{benchmark.name}-{key}"

    def build(empty: Path) -> None:
        for part in PARTS:
            _build_part(benchmark, part, empty)

    build_once(folder, build, about={"benchmark": benchmark.name})
    return folder


def text_hash(benchmark: Benchmark, part: str) -> str:
    """SHA-256 of the tokens and masks of a part, as they are generated."""
    digest = hashlib.sha256()
    for tokens_N, trained_N in _documents(benchmark, part):
        digest.update(tokens_N.astype("<u2").tobytes() + trained_N.tobytes())
    return digest.hexdigest()


def _build_part(benchmark: Benchmark, part: str, folder: Path) -> None:
    digest, masks = hashlib.sha256(), []
    with IndexedWriter(folder / part, dtype=np.uint16) as writer:
        for tokens_N, trained_N in _documents(benchmark, part):
            writer.add(tokens_N)
            masks.append(trained_N)
            digest.update(tokens_N.astype("<u2").tobytes() + trained_N.tobytes())
    expected = benchmark.data[f"{part}_sha256"]
    if digest.hexdigest() != expected:
        raise InputError(
            f"{benchmark.name}: the generated {part} data differs from its rules",
            got=digest.hexdigest(), allowed=expected,
            hint="its reference convergence points hold for that data only",
        )  # fmt: skip
    if benchmark.kind == "lora":
        (folder / f"{part}{TRAINED_SUFFIX}").write_bytes(np.concatenate(masks).tobytes())


def _documents(benchmark: Benchmark, part: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each document, and the mask of those that the loss counts."""
    data = benchmark.data
    language, seed = Language(data["language"]), data[f"{part}_seed"]
    if benchmark.kind == "lora":
        length = benchmark.sequence_length
        assert length is not None
        for prompt, answer in language.reports(seed=seed, num_reports=data[f"{part}_sequences"]):
            tokens_N = _tokens(prompt + answer)[:length]
            trained_N = np.arange(len(tokens_N)) >= len(prompt)
            # One report a sequence: padding of its end, which no label counts.
            filled_N = np.full(length, END, np.int64)
            filled_N[: len(tokens_N)] = tokens_N
            yield filled_N, np.concatenate([trained_N, np.zeros(length - len(tokens_N), bool)])
        return
    for text in language.documents(seed=seed, num_bytes=data[f"{part}_bytes"]):
        tokens_N = _tokens(text)
        yield tokens_N, np.ones(len(tokens_N), bool)


def _tokens(text: str) -> np.ndarray:
    return np.append(np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64), END)
