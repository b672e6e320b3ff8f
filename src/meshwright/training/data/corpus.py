"""The data of a run, ready to train on: source, tokenizer, tokens in the cache, samples, validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.specs.run import NATIVE, VALIDATION, Run
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
    validations: Mapping[
        str, Samples
    ]  # by name; always the same, in the same order. Empty: no validation loss
    tokenizer: Tokenizer | None  # None: the data is tokens already, or random ones
    num_tokens: int | None  # of the training part; None: endless
    train_usage: DataUsage | None = None  # None: random tokens
    validation_usages: Mapping[str, DataUsage] = field(default_factory=dict)
    reading_notes: tuple[str, ...] = ()  # formats of records, and what of the sources is not used

    @property
    def validation(self) -> Samples | None:
        """The first validation source; None: the run has no validation loss."""
        return next(iter(self.validations.values()), None)

    @property
    def usage(self) -> dict[str, Any]:
        """`statistics.data_usage` of a record."""
        return usages_as_json(self.train_usage, self.validation_usages)

    @property
    def notes(self) -> tuple[str, ...]:
        """Formats of records, what is cut or has no label, and padding; nothing about a stream of text."""
        usages = {} if self.train_usage is None else {TRAINING_DATA: self.train_usage}
        usages |= {_validation_data(name): usage for name, usage in self.validation_usages.items()}
        lines = (usage.describe(name) for name, usage in usages.items())
        return (*self.reading_notes, *(line for line in lines if line is not None))


TRAINING_DATA = "training data"


def _validation_data(name: str) -> str:
    return "validation data" if name == VALIDATION else f"validation data {name}"


def open_data(run: Run, *, cache: Path | None = None, report: Report | None = None) -> Corpus:
    """Open the data of `run`. The first use tokenises it; other processes wait for that.

    Raises InputError when the data, the tokenizer or the sizes do not work, MissingDependencyError when a library is
    absent.
    """
    cache = default_cache() if cache is None else cache
    length, is_evaluated = run.sequence_length, run.train.evaluate is not None
    if run.data.source == SYNTHETIC:
        _refuse_validation_of_random_tokens(run)
        train = SyntheticSamples(vocab=run.model.vocab, sequence_length=length, seed=run.train.seed)
        held = SyntheticSamples(vocab=run.model.vocab, sequence_length=length, seed=~run.train.seed)
        validations = {VALIDATION: held} if is_evaluated else {}
        return Corpus(train=train, validations=validations, tokenizer=None, num_tokens=None)

    source = open_source(run.data.source, cache=cache)
    tokenizer = _tokenizer(run, source, cache)
    store = _tokens(source, tokenizer, cache, report)
    require_vocab(store, vocab=run.model.vocab, cache=cache)
    notes = _reading_notes(TRAINING_DATA, source, store)
    extents, held_out = everything(store), {}
    if is_evaluated:
        for name, place in run.data.validation_sources.items():
            other = open_source(place, cache=cache)
            other_store = _tokens(other, tokenizer, cache, report)
            notes += _reading_notes(_validation_data(name), other, other_store)
            require_vocab(other_store, vocab=run.model.vocab, cache=cache)
            held_out[name] = _samples(other_store, everything(other_store), length, pads_short=True)
        if not held_out:
            split = hold_out(store, whole_documents=store.is_masked)
            extents = split.train
            held_out[VALIDATION] = _samples(store, split.validation, length, pads_short=True)
    train = _samples(store, extents, length)
    require_samples(train, name=run.data.source, needed=run.global_batch)
    for name, samples in held_out.items():
        place = run.data.validation_sources.get(name, f"the validation part of {run.data.source}")
        # Other engines repeat samples to fill a batch, which would count some of them twice.
        require_samples(samples, name=place, needed=1 if run.engine == NATIVE else run.global_batch)
    return Corpus(
        train=train,
        validations=held_out,
        tokenizer=tokenizer,
        num_tokens=extents.num_tokens,
        train_usage=train.usage,
        validation_usages={name: samples.usage for name, samples in held_out.items()},
        reading_notes=notes,
    )


def require_sources(run: Run) -> None:
    """Raise InputError if data of `run` that is on this machine is absent. Reads no text and downloads nothing."""
    if run.data.source == SYNTHETIC:
        _refuse_validation_of_random_tokens(run)
    held_out = run.data.validation_sources.values() if run.train.evaluate else ()
    for name in (run.data.source, *held_out):
        if name != SYNTHETIC and not is_from_hub(name):
            open_source(name)


def _refuse_validation_of_random_tokens(run: Run) -> None:
    if run.data.validation is not None and run.train.evaluate is not None:
        raise InputError(
            "a model of random tokens is not validated on text: data.source is synthetic",
            hint="name text as data.source, or leave data.validation out",
        )


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


def _samples(
    store: TokenStore, extents: Extents, length: int, *, pads_short: bool = False
) -> StreamSamples | WholeSamples:
    """Answers keep their prompts: a corpus with a mask is packed by whole documents."""
    if store.is_masked:
        return whole_samples(store, extents, sequence_length=length)
    return stream_samples(store, extents, sequence_length=length, pads_short=pads_short)
