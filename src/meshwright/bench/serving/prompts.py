"""Lengths and texts of requests.

    fixed       128
    uniform     64-256, or uniform:64,256
    normal      normal:MEAN,STANDARD_DEVIATION
    lognormal   lognormal:MEDIAN,SIGMA
    a file      JSON lines with `prompt` or `messages`, lengths, and times of arrival

Synthetic prompts consist of random words, so that no two share a prefix that a server could reuse. Where a file has
`hash_ids`, a prompt is made of blocks: equal ids are equal text within one load, and other loads have other text. A
tokenizer gives them exactly the requested length. Without a tokenizer, two small requests show how many
tokens the server counts for a word.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.bench.serving.endpoint import ServingPrompt
from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import toml_table
from meshwright.json_values import load_text, parse_json
from meshwright.programs import install_command

LONGEST_TOKENS = 10**7
LENGTH_FORMS = "a number, 64-256, uniform:64,256, normal:MEAN,SD or lognormal:MEDIAN,SIGMA"
VOCABULARY = tuple(toml_table(Path(__file__).with_name("words.toml"))["words"])


class LengthKind(StrEnum):
    """Distribution of a length."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of lengths in tokens. Drawn values are rounded, and at least 1."""

    kind: LengthKind
    first: float  # the length, smallest, mean or median
    second: float = 0.0  # the largest, standard deviation or sigma

    @property
    def name(self) -> str:
        if self.kind is LengthKind.FIXED:
            return f"{self.first:g}"
        return f"{self.kind}:{self.first:g},{self.second:g}"

    def draw(self, rng: random.Random) -> int:
        """One length."""
        match self.kind:
            case LengthKind.FIXED:
                value = self.first
            case LengthKind.UNIFORM:
                return rng.randint(int(self.first), int(self.second))
            case LengthKind.NORMAL:
                value = rng.gauss(self.first, self.second)
            case LengthKind.LOGNORMAL:
                value = rng.lognormvariate(math.log(self.first), self.second)
        return min(LONGEST_TOKENS, max(1, round(value)))


def parse_lengths(text: str, *, option: str) -> Lengths:
    """Read a distribution of lengths. Raises InputError.

    >>> parse_lengths("64-256", option="--input-tokens").name
    'uniform:64,256'
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        low, dash, high = text.strip().partition("-")
        kind, rest = ("uniform", f"{low},{high}") if dash else ("fixed", text.strip())
    try:
        numbers = [float(part.replace("_", "")) for part in rest.split(",")]
        found = LengthKind(kind)
        first, second = numbers[0], numbers[1] if len(numbers) == 2 else 0.0
        is_right = len(numbers) == (1 if found is LengthKind.FIXED else 2) and 1 <= first <= LONGEST_TOKENS
        is_right = is_right and math.isfinite(second) and 0 <= second <= LONGEST_TOKENS
        if found in (LengthKind.FIXED, LengthKind.UNIFORM):
            is_right = is_right and first.is_integer() and second.is_integer()
        if found is LengthKind.UNIFORM:
            is_right = is_right and first <= second
    except (ValueError, IndexError):
        is_right, found, first, second = False, LengthKind.FIXED, 1.0, 0.0
    if not is_right:
        raise InputError(f"{option} is no length in tokens", got=text, allowed=LENGTH_FORMS)
    return Lengths(kind=found, first=first, second=second)


@dataclass(frozen=True, kw_only=True)
class WordScale:
    """Tokens that the server counts: `tokens_per_word` for each word, and `fixed_tokens` for a template."""

    tokens_per_word: float = 1.0
    fixed_tokens: float = 0.0
    is_measured: bool = False

    def length(self, num_tokens: int) -> int:
        """Words of a prompt of `num_tokens`."""
        return max(1, round((num_tokens - self.fixed_tokens) / self.tokens_per_word))


def word_scale(points: Sequence[tuple[int, int]]) -> WordScale:
    """The line through (words, tokens) of two prompts; one token per word where they show no slope."""
    (length_a, tokens_a), (length_b, tokens_b) = points
    slope = (tokens_b - tokens_a) / (length_b - length_a) if length_a != length_b else 0.0
    if slope <= 0:
        return WordScale()
    return WordScale(tokens_per_word=slope, fixed_tokens=max(0.0, tokens_a - slope * length_a), is_measured=True)


@dataclass(frozen=True, kw_only=True)
class LocalTokenizer:
    """A tokenizer of this machine."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encode(text))


def open_tokenizer(path: Path) -> LocalTokenizer:
    """Open `tokenizer.json`, or the folder that holds it. Raises InputError or MissingDependencyError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingDependencyError(
            "a local tokenizer needs the package tokenizers", hint=install_command("serve")
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"no tokenizer can be read ({error})", got=str(file), allowed="tokenizer.json") from None
    return LocalTokenizer(
        encode=lambda text: found.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: found.decode(ids, skip_special_tokens=False),
    )


def random_text(length: int, rng: random.Random) -> str:
    """Return a text of `length` random words."""
    return " ".join(rng.choices(VOCABULARY, k=length))


def text_of_length(num_tokens: int, rng: random.Random, tokenizer: LocalTokenizer, *, start: str = "") -> str:
    """A text of `num_tokens` by a local tokenizer, cut from `start` or begun by it.

    It is exact where cutting and adding words reaches it.
    """
    text = start or random_text(num_tokens, rng)
    for _ in range(8):
        ids = tokenizer.encode(text)
        if len(ids) == num_tokens:
            break
        if len(ids) > num_tokens:
            text = tokenizer.decode(ids[:num_tokens])
        else:
            text = f"{text} {random_text(num_tokens - len(ids), rng)}"
    return text


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Prompts of all loads and repeats. The same seed, load and repeat give the same prompts."""

    inputs: Lengths
    outputs: Lengths
    seed: int = 0
    scale: WordScale = WordScale()
    tokenizer: LocalTokenizer | None = None
    rows: tuple[TraceRow, ...] = ()

    def prompts(self, *, load: str, repeat: int) -> Iterator[ServingPrompt]:
        """Endless prompts of one load and repeat."""
        name = f"{self.seed} {load} {repeat}"
        rng = random.Random(name)
        if self.rows:
            yield from (self._from_row(row, rng, name) for row in itertools.cycle(self.rows))
        while True:
            yield self._synthetic(self.inputs.draw(rng), self.outputs.draw(rng), rng)

    def _synthetic(self, num_input: int, num_output: int, rng: random.Random) -> ServingPrompt:
        if self.tokenizer is None:
            text = random_text(self.scale.length(num_input), rng)
        else:
            text = text_of_length(num_input, rng, self.tokenizer)
        return ServingPrompt(text=text, input_tokens=num_input, output_tokens=num_output)

    @property
    def prefix_fault(self) -> str:
        """Reason why prompts share less than the `hash_ids` of their rows say; empty if there is none."""
        if self.tokenizer is None or not any(row.hash_ids for row in self.rows):
            return ""
        text = random_text(BLOCK_TOKENS, random.Random(self.seed))
        if self.tokenizer.decode(self.tokenizer.encode(text)) == text:
            return ""
        return "the tokenizer does not give back the text that it encodes: prompts share less than their hash_ids say"

    def _of_blocks(self, row: TraceRow, num_output: int, rng: random.Random, name: str) -> ServingPrompt:
        """A prompt of the blocks of a row; what they leave of its length is its own."""
        num_input = row.input_tokens or 0
        blocks = [random.Random(f"{name} block {block}") for block in row.hash_ids]
        if self.tokenizer is None:
            size = max(1, round(BLOCK_TOKENS / self.scale.tokens_per_word))
            length = self.scale.length(num_input)
            found = [word for block in blocks for word in block.choices(VOCABULARY, k=size)]
            text = " ".join([*found, *rng.choices(VOCABULARY, k=max(0, length - len(found)))][:length])
        else:
            start = " ".join(text_of_length(BLOCK_TOKENS, block, self.tokenizer) for block in blocks)
            text = text_of_length(num_input, rng, self.tokenizer, start=start)
        return ServingPrompt(text=text, input_tokens=num_input, output_tokens=num_output)

    def _from_row(self, row: TraceRow, rng: random.Random, name: str) -> ServingPrompt:
        num_output = row.output_tokens or self.outputs.draw(rng)
        if row.text is None and row.messages is None:
            if row.hash_ids:
                return self._of_blocks(row, num_output, rng, name)
            return self._synthetic(row.input_tokens or self.inputs.draw(rng), num_output, rng)
        return ServingPrompt(
            text=row.text or "", messages=row.messages, input_tokens=row.input_tokens or 0, output_tokens=num_output
        )


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One line of a file of prompts. Absent lengths are drawn."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    at_s: float | None = None  # after the first
    hash_ids: tuple[int, ...] = ()  # of its blocks of `BLOCK_TOKENS`, the last one cut


TEXT_KEYS = ("prompt", "text")
INPUT_KEYS = ("input_tokens", "input_length")
OUTPUT_KEYS = ("output_tokens", "output_length", "max_tokens")
TIME_KEYS = {"timestamp_s": 1.0, "timestamp": 1e-3}  # `timestamp` is milliseconds, as in Mooncake's traces
IGNORED_KEYS = ("type", "id")
"""Known keys without effect."""
BLOCK_TOKENS = 512
"""Tokens of a block of `hash_ids`: equal ids are equal text (Mooncake's traces, FAST '25). A part of a block at the end
of a prompt has an id too, but not in traces that NVIDIA Dynamo synthesizes (benchmarks/data_generator, README)."""


def read_prompts(path: Path) -> tuple[TraceRow, ...]:
    """Read a file of JSON lines. Raises InputError with file and line."""
    try:
        lines = load_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"the prompts cannot be read ({error})", got=str(path)) from None
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise InputError("the file has no prompts", got=str(path), allowed="JSON lines")
    times = [row.at_s for row in rows]
    if any(t is not None for t in times):
        if any(t is None for t in times):
            raise InputError(f"{path}: some lines have a time and others have none")
        first = min(t for t in times if t is not None)
        rows = sorted(
            (TraceRow(**{**row.__dict__, "at_s": (row.at_s or 0.0) - first}) for row in rows),
            key=lambda row: row.at_s or 0.0,
        )
    return tuple(rows)


def _row(line: str, where: str) -> TraceRow:
    try:
        found = parse_json(line)
    except ValueError:
        raise InputError(f"{where}: not JSON", got=line[:60]) from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: not a mapping", got=line[:60])
    known = {*TEXT_KEYS, "messages", "hash_ids", *INPUT_KEYS, *OUTPUT_KEYS, *TIME_KEYS, *IGNORED_KEYS}
    if unknown := sorted(set(found) - known):
        raise InputError(f"{where}: unknown key", got=unknown[0], allowed=", ".join(sorted(known)))
    text = next((found[key] for key in TEXT_KEYS if key in found), None)
    messages = found.get("messages")
    is_text = isinstance(text, str | None) and text != ""
    if not is_text or not isinstance(messages, list | None) or not all(isinstance(m, dict) for m in messages or ()):
        raise InputError(f"{where}: prompt or messages are of another kind", got=line[:60])
    num_input = _count(found, INPUT_KEYS, where)
    return TraceRow(
        text=text,
        messages=messages,
        hash_ids=() if text or messages else _hash_ids(found, num_input, where),
        input_tokens=num_input,
        output_tokens=_count(found, OUTPUT_KEYS, where),
        at_s=_time(found, where),
    )


def _hash_ids(found: dict[str, Any], num_input: int | None, where: str) -> tuple[int, ...]:
    ids = found.get("hash_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise InputError(f"{where}: hash_ids", got=str(ids)[:60], allowed="a list of whole numbers")
    fewest, rest = divmod(num_input or 0, BLOCK_TOKENS)
    if num_input is None or not fewest <= len(ids) <= fewest + (rest > 0):
        raise InputError(
            f"{where}: hash_ids are no blocks of {BLOCK_TOKENS} tokens", got=f"{len(ids)} of {num_input} tokens",
            allowed=f"one for each {BLOCK_TOKENS} tokens of input_length",
            hint="without hash_ids, prompts share no prefix",
        )  # fmt: skip
    return tuple(ids)


def _count(found: dict[str, Any], keys: Sequence[str], where: str) -> int | None:
    for key in keys:
        if key in found:
            value = found[key]
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST_TOKENS:
                raise InputError(f"{where}: {key}", got=value, allowed=f"1 to {LONGEST_TOKENS}")
            return value
    return None


def _time(found: dict[str, Any], where: str) -> float | None:
    for key, unit_s in TIME_KEYS.items():
        if key in found:
            value = found[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
                raise InputError(f"{where}: {key}", got=value, allowed="a number from 0")
            return value * unit_s
    return None
