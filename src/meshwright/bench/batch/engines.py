"""Batch interfaces by name, and what an adapter has to implement.

vllm           `vllm.LLM.generate` with prompts as token numbers (github:vllm-project/vllm benchmarks/throughput.py)
llamacpp       llama.cpp's scheduler inside this process, through xllamacpp: no connection and no HTTP
transformers   `generate` of Hugging Face transformers with static batches
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import install_command
from meshwright.targets import load


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """Model that a replica loads. `longest` and `most` are maxima over all batches that will follow."""

    model: str  # Hugging Face folder, a name that the engine resolves, or FILE.gguf for llama.cpp
    scratch: Path  # folder for converted files
    options: Mapping[str, str] = field(default_factory=dict)
    longest: int  # tokens of a request, prompt and answer
    most: int  # requests of a batch


@dataclass(frozen=True, kw_only=True)
class BatchTokens:
    """Tokens of the answered requests of a batch, as the engine counts them."""

    input_tokens: int
    output_tokens: int
    num_ok: int
    num_short: int = 0  # with fewer output tokens than asked for


class BatchEngine(Protocol):
    """A loaded model that answers batches."""

    software: Mapping[str, str]  # versions
    vocabulary: int  # prompts hold token numbers below it

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> BatchTokens:
        """Answer all prompts with exactly `output_tokens` tokens each. Raises InputError if the engine cannot."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One row of the table of engines."""

    package: str
    extra: str | None  # of this project, with what it needs
    options: tuple[str, ...] | None  # known ones; None: those of the engine itself


BATCH_ENGINES: dict[str, EngineEntry] = {
    "vllm": EngineEntry(package="vllm", extra=None, options=None),
    "llamacpp": EngineEntry(package="xllamacpp", extra="llamacpp", options=("threads", "parallel", "context", "dtype")),
    "transformers": EngineEntry(package="transformers", extra="torch", options=("batch", "dtype", "threads")),
}
"""By name; the module NAME_engine loads a model."""


def check_engine(name: str, options: Mapping[str, str]) -> None:
    """Raise MissingDependencyError where an engine is not installed, InputError for an option that it lacks."""
    entry = BATCH_ENGINES[name]
    if find_spec(entry.package) is None:
        hint = f"pip install {entry.package}" if entry.extra is None else install_command(entry.extra)
        if entry.package not in hint:
            hint = f"{hint} {entry.package}"
        raise MissingDependencyError(f"--engine {name} needs {entry.package}, which is not installed", hint=hint)
    for key in options:
        if entry.options is not None and key not in entry.options:
            raise InputError(f"--engine {name} has no such option", got=key, allowed=", ".join(entry.options))


def load_engine(name: str, request: EngineRequest) -> BatchEngine:
    """Load a model in this process."""
    return load(f"meshwright.bench.batch.{name}_engine:load")(request)


def whole_option(options: Mapping[str, str], name: str, default: int) -> int:
    """An option that is a count of at least 1. Raises InputError."""
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--engine-option {name}", got=text, allowed="a whole number from 1")
    return int(text)


def random_prompts(
    count: int, length: int, *, vocabulary: int, excluded: Sequence[int] = (), seed: str
) -> list[list[int]]:
    """`count` prompts of `length` random tokens, so that no prefix is shared. `excluded` are special tokens.

    >>> [len(p) for p in random_prompts(2, 3, vocabulary=10, excluded=[0], seed="x")]
    [3, 3]
    """
    rng = np.random.default_rng(list(seed.encode()))
    allowed = np.setdiff1d(np.arange(vocabulary), np.asarray(list(excluded), dtype=int))
    return [row.tolist() for row in allowed[rng.integers(0, len(allowed), size=(count, length))]]


def software_versions(*packages: str) -> dict[str, Any]:
    """Versions of packages."""
    return {name: version(name) for name in packages}
