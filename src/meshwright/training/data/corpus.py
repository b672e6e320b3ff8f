"""The data of a run, ready to train on: source, tokenizer, tokens in the cache, samples, validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.specs.run import Run
from meshwright.training.data.bpe import bpe_tokenizer
from meshwright.training.data.packing import (
    Samples,
    StreamSamples,
    SyntheticSamples,
    WholeSamples,
    require_samples,
    stream_samples,
    whole_samples,
)
from meshwright.training.data.source import SYNTHETIC, DocumentSource, TokenFiles, is_from_hub, open_source
from meshwright.training.data.split import Extents, everything, hold_out
from meshwright.training.data.store import TokenStore, open_store
from meshwright.training.data.token_range import require_vocab
from meshwright.training.data.tokenization import Report, tokenise
from meshwright.training.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    tokenizer_from_hub,
    tokenizer_from_path,
)
from meshwright.training.data.usage import DataUsage, describe_records, usages_as_json


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and validation data of a run."""

    train: Samples
    validation: Samples | None  # always the same, in the same order; None: the run has no validation loss
    tokenizer: Tokenizer | None  # None: the data is tokens already, or random ones
    num_tokens: int | None  # of the training part; None: endless
    train_usage: DataUsage | None = None  # None: random tokens
    validation_usage: DataUsage | None = None
    reading_notes: tuple[str, ...] = ()  # formats of records, and what of the sources is not used

    @property
    def usage(self) -> dict[str, Any]:
        """`statistics.data_usage` of a record."""
        return usages_as_json(self.train_usage, self.validation_usage)

    @property
    def notes(self) -> tuple[str, ...]:
        """Formats of records, what is cut or has no label, and padding; nothing about a stream of text."""
        usages = {"training data": self.train_usage, "validation data": self.validation_usage}
        lines = (usage.describe(name) for name, usage in usages.items() if usage is not None)
        return (*self.reading_notes, *(line for line in lines if line is not None))


def open_data(run: Run, *, cache: Path | None = None, report: Report | None = None) -> Corpus:
    """Open the data of `run`. The first use tokenises it; other processes wait for that.

    Raises InputError when the data, the tokenizer or the sizes do not work, MissingDependencyError when a library is
    absent.
    """
    cache = default_cache() if cache is None else cache
    length, is_evaluated = run.sequence_length, run.train.evaluate is not None
    if run.data.source == SYNTHETIC:
        train = SyntheticSamples(vocab=run.model.vocab, sequence_length=length, seed=run.train.seed)
        held = SyntheticSamples(vocab=run.model.vocab, sequence_length=length, seed=~run.train.seed)
        return Corpus(train=train, validation=held if is_evaluated else None, tokenizer=None, num_tokens=None)

    source = open_source(run.data.source, cache=cache)
    tokenizer = _tokenizer(run, source, cache)
    store = _tokens(source, tokenizer, cache, report)
    require_vocab(store, vocab=run.model.vocab, cache=cache)
    notes = _reading_notes("training data", source, store)
    if not is_evaluated:
        extents, validation = everything(store), None
    elif run.data.validation is not None:
        other_source = open_source(run.data.validation, cache=cache)
        other = _tokens(other_source, tokenizer, cache, report)
        notes += _reading_notes("validation data", other_source, other)
        require_vocab(other, vocab=run.model.vocab, cache=cache)
        extents, validation = everything(store), _samples(other, everything(other), length)
    else:
        split = hold_out(store, whole_documents=store.is_masked)
        extents, validation = split.train, _samples(store, split.validation, length)
    train = _samples(store, extents, length)
    require_samples(train, name=run.data.source, needed=run.global_batch)
    if validation is not None:
        name = run.data.validation or f"the validation part of {run.data.source}"
        require_samples(validation, name=name, needed=run.global_batch)
    return Corpus(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        num_tokens=extents.num_tokens,
        train_usage=train.usage,
        validation_usage=None if validation is None else validation.usage,
        reading_notes=notes,
    )


def require_sources(run: Run) -> None:
    """Raise InputError if data of `run` that is on this machine is absent. Reads no text and downloads nothing."""
    for name in (run.data.source, run.data.validation if run.train.evaluate else None):
        if name not in (None, SYNTHETIC) and not is_from_hub(name):
            open_source(name)


def open_tokenizer(name: str, *, source: DocumentSource | TokenFiles | None, cache: Path) -> Tokenizer:
    """The tokenizer that a run file calls `name`; `source` is what `bpe:SIZE` is trained on.

    Raises InputError when there is no such tokenizer.
    """
    kind, colon, size = name.partition(":")
    if name == "bytes":
        return ByteTokenizer()
    if kind == "bpe" and colon:
        if not size.isdecimal():
            raise InputError(
                "the size of a trained tokenizer", got=name, allowed="bpe:SIZE, such as bpe:4096"
            )
        if not isinstance(source, DocumentSource):
            raise InputError(f"{name} is trained on text", got="no text", hint="name text as data.source")
        return bpe_tokenizer(int(size), source=source, cache=cache)
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.endswith(".json"):
        return tokenizer_from_path(path)
    return tokenizer_from_hub(name)


def _tokenizer(run: Run, source: DocumentSource | TokenFiles, cache: Path) -> Tokenizer | None:
    if isinstance(source, TokenFiles) and run.data.tokenizer is None:
        return None
    if run.data.tokenizer is None:
        raise InputError(
            f"data.tokenizer is missing: {run.data.source} is text",
            allowed="bytes, bpe:SIZE, a tokenizer.json or its folder, OWNER/NAME[@REVISION] on the Hugging Face hub",
            hint=f"tokenizer: bpe:{run.model.vocab} trains one of the model's size on this text",
        )
    tokenizer = open_tokenizer(run.data.tokenizer, source=source, cache=cache)
    if tokenizer.vocab > run.model.vocab:
        raise InputError(
            f"the tokenizer {tokenizer.name} has more tokens than the model's vocabulary",
            got=tokenizer.vocab, allowed=f"<= {run.model.vocab}",
        )  # fmt: skip
    return tokenizer


def _tokens(
    source: DocumentSource | TokenFiles, tokenizer: Tokenizer | None, cache: Path, report: Report | None
) -> TokenStore:
    if isinstance(source, TokenFiles):
        return open_store(list(source.prefixes))
    if tokenizer is None:
        raise InputError("text needs a tokenizer", got=source.name, hint="name one as data.tokenizer")
    return tokenise(source, tokenizer, cache=cache, report=report)


def _reading_notes(name: str, source: DocumentSource | TokenFiles, store: TokenStore) -> tuple[str, ...]:
    of_source = source.notes if isinstance(source, DocumentSource) else ()
    return (*(f"{name}: {line}" for line in of_source), *describe_records(name, store.counts))


def _samples(store: TokenStore, extents: Extents, length: int) -> StreamSamples | WholeSamples:
    """Answers keep their prompts: a corpus with a mask is packed by whole documents."""
    pack = whole_samples if store.is_masked else stream_samples
    return pack(store, extents, sequence_length=length)
