"""Data sets of proxies: generated text as Megatron token files, byte by byte, with a mask where only answers count.

The text is the same everywhere, so its hash is part of a proxy's rules: text with another one is refused.
Source code of an installed Python was the alternative: it is natural text, and another text under every version, so
that reference convergence points would hold on one version only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from meshwright.errors import InputError
from meshwright.files import default_cache, toml_table
from meshwright.mlperf.benchmarks import DATA, Benchmark
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


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

_LANGUAGE = toml_table(DATA / "language.toml")
PARTS_OF_SYLLABLES = tuple(_LANGUAGE[part] for part in ("onsets", "vowels", "codas"))
SMALL, TEMPLATES, CLASSES, TOPIC = (_LANGUAGE[name] for name in ("small", "templates", "classes", "topic"))


class SplitMix64:
    """A generator of integers."""

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def below(self, limit: int) -> int:
        """An integer from 0 to `limit` - 1. Its bias, less than limit / 2^64, does not matter here."""
        self.state = (self.state + _GOLDEN) & _MASK
        word = self.state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        return (word ^ (word >> 31)) % limit


@dataclass(frozen=True, kw_only=True)
class _Lexicon:
    """Words of a class with cumulative weights: the k-th is about 1 / k as frequent as the first."""

    entries: tuple[str, ...]
    totals: tuple[int, ...]

    def draw(self, random: SplitMix64) -> str:
        return self.entries[bisect_right(self.totals, random.below(self.totals[-1]))]


class Language:
    """The invented language of a number: the same text on every machine and under every version of Python.

    A language has syllables, a lexicon of words of several classes with Zipf frequencies, and a grammar of sentence
    templates. A document has a topic: nouns, names and verbs that come back in it. A model learns letters first, then
    syllables, then words, then the order of words and the topic of a document, as in natural text. All numbers are
    integers of one generator (SplitMix64: Steele, Lea, Flood 2014), drawn in a fixed order.
    """

    def __init__(self, number: int) -> None:
        random = SplitMix64(0xC0FFEE + number)
        self.syllables = _syllables(random)
        used: set[str] = set(SMALL)
        self.classes = {kind: _lexicon(random, kind, size, self.syllables, used) for kind, size in CLASSES.items()}

    def documents(self, *, seed: int, num_bytes: int) -> Iterator[str]:
        """Documents of together at least `num_bytes` bytes."""
        random = SplitMix64(seed)
        while num_bytes > 0:
            text = self._document(random, num_sentences=3 + random.below(10))
            num_bytes -= len(text)
            yield text

    def reports(self, *, seed: int, num_reports: int) -> Iterator[tuple[str, str]]:
        """Pairs of a report and its summary: the sentences of the report that have a name in them."""
        random = SplitMix64(seed)
        for _ in range(num_reports):
            topic = self._topic(random)
            sentences = [self._sentence(random, topic) for _ in range(2)]
            summary = self._sentence(random, topic)
            yield "report: " + " ".join(sentences), " summary: " + summary

    def _document(self, random: SplitMix64, *, num_sentences: int) -> str:
        topic = self._topic(random)
        return " ".join(self._sentence(random, topic) for _ in range(num_sentences)) + "\n"

    def _topic(self, random: SplitMix64) -> dict[str, tuple[str, ...]]:
        return {kind: tuple(self.classes[kind].draw(random) for _ in range(n)) for kind, n in TOPIC.items()}

    def _sentence(self, random: SplitMix64, topic: dict[str, tuple[str, ...]]) -> str:
        template = TEMPLATES[random.below(len(TEMPLATES))]
        text = " ".join(self._word(kind, random, topic) for kind in template.split())
        return text[0].upper() + text[1:] + "."

    def _word(self, kind: str, random: SplitMix64, topic: dict[str, tuple[str, ...]]) -> str:
        if kind == "number":
            return str(1 + random.below(99))
        if kind not in self.classes:
            return kind
        if kind in topic and random.below(100) < _LANGUAGE["topic_percent"]:
            return topic[kind][random.below(len(topic[kind]))]
        return self.classes[kind].draw(random)


def _syllables(random: SplitMix64) -> tuple[str, ...]:
    """Eighty of the syllables that onsets, vowels and codas allow."""
    found: dict[str, None] = {}
    while len(found) < 80:
        found["".join(part[random.below(len(part))] for part in PARTS_OF_SYLLABLES)] = None
    return tuple(found)


def _lexicon(random: SplitMix64, kind: str, size: int, syllables: Sequence[str], used: set[str]) -> _Lexicon:
    entries: list[str] = []
    while len(entries) < size:
        count = 1 + random.below(2) + (kind in ("name", "adverb"))
        word = "".join(syllables[random.below(len(syllables))] for _ in range(count))
        word = word.capitalize() if kind == "name" else word + "ly" if kind == "adverb" else word
        if len(word) > 2 and word not in used:
            used.add(word)
            entries.append(word)
    weights = [1_000_000 // (rank + 3) for rank in range(size)]
    return _Lexicon(entries=tuple(entries), totals=tuple(accumulate(weights)))
