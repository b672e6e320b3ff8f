"""Fingerprints of data, tokenizer and weights of a run: the same content has the same one, wherever it lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from meshwright.specs.run import SYNTHETIC, Run
from meshwright.training.data.cache import SAMPLE_BYTES, sampled
from meshwright.training.data.source import TokenFiles, is_from_hub, open_source
from meshwright.training.data.tokenizer import ByteTokenizer, tokenizer_from_path


def fingerprints(run: Run) -> dict[str, str | None]:
    """Fingerprints by the keys of a run file. Raises InputError where data or weights are absent."""
    from meshwright.training.weights import find_weights  # imports torch

    return {
        "data.source": data_fingerprint(run),
        "data.tokenizer": tokenizer_fingerprint(run),
        "weights": None if run.weights is None else find_weights(run.weights).fingerprint,
    }


def data_fingerprint(run: Run) -> str | None:
    """Fingerprint of `data.source`; None with a data set of the Hugging Face hub, whose name is compared.

    A mixture's fingerprint includes the names and weights of its sources: both decide the order of the
    samples. Raises InputError where the data is absent.
    """
    if isinstance(run.data.source, str):
        return _of_source(run.data.source)
    of_sources = [(name, source.weight, _of_source(source.path)) for name, source in run.data.sources.items()]
    if any(digest is None for _, _, digest in of_sources):
        return None
    return hashlib.sha256(repr(of_sources).encode()).hexdigest()


def _of_source(name: str) -> str | None:
    if name == SYNTHETIC or is_from_hub(name):
        return None
    source = open_source(name)
    return _of_token_files(source) if isinstance(source, TokenFiles) else source.fingerprint


def tokenizer_fingerprint(run: Run) -> str | None:
    """Fingerprint of a tokenizer that is a file or `bytes`; None for others, whose names are compared.

    `bpe:SIZE` follows from the data.
    """
    name = run.data.tokenizer
    if name == "bytes":
        return ByteTokenizer().fingerprint
    if name is None or not Path(name).expanduser().exists():
        return None
    return tokenizer_from_path(Path(name).expanduser()).fingerprint


def _of_token_files(source: TokenFiles) -> str:
    """A digest of sizes, of all positions and of samples of the tokens: reading all takes minutes."""
    files = (prefix.with_name(prefix.name + suffix) for prefix in source.prefixes for suffix in (".idx", ".bin"))
    return sampled(((path.suffix, path) for path in files), lambda size: range(0, size, max(SAMPLE_BYTES, size // 64)))
