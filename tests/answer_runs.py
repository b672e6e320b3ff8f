"""Records of prompts with answers, and runs that train on them: for losses that compare or judge answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.tiny_runs import tiny_run

from meshwright.specs.run import Run

LORA = ("task=lora", "lora={rank: 3, targets: [query, value, output, up, down]}")


def sums(num: int, *, longest: int = 12) -> Iterator[tuple[str, str, str]]:
    """Yield sums, each with its right and a wrong answer; wrong ones repeat a number less than `longest` times."""
    chance = random.Random(0)
    for _ in range(num):
        a, b = chance.randrange(100), chance.randrange(100)
        yield f"{a}+{b}=", str(a + b), str(a) * chance.randrange(1, longest)


def pairs(num: int, *, longest: int = 12) -> list[dict[str, str]]:
    """Return sums with a right and a wrong answer; some answers are longer than half of a sample."""
    return [{"prompt": sum_, "chosen": right, "rejected": wrong} for sum_, right, wrong in sums(num, longest=longest)]


def lines_of(rows: Iterable[Mapping[str, object]]) -> str:
    """Return records as a file has them."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def run_on(data: Path, *overrides: str, length: int, micro: int) -> Run:
    """Return a run of eight samples a step on the records of `data`, byte by byte."""
    return tiny_run(
        f"data={{source: {data}, tokenizer: bytes, sequence_length: {length}}}", "model.vocab=260",
        f"batch={{global_sequences: 8, micro: {micro}}}", *overrides,
    )  # fmt: skip
