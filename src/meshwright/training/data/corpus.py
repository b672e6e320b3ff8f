"""The data of a run, ready to train on: source, tokenizer, tokens in the cache, samples, validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.specs.run import NATIVE, SYNTHETIC, TRAINING, VALIDATION, Data, Preference, PreferenceLoss, Run
from meshwright.training.data.bpe import bpe_tokenizer
from meshwright.training.data.mixture import Mixture
from meshwright.training.data.packing import (
    Samples,
    SyntheticSamples,
    TextSamples,
    pair_samples,
    require_samples,
    stream_samples,
    whole_samples,
)
from meshwright.training.data.records import RecordFormat
from meshwright.training.data.source import DocumentSource, TokenFiles, in_turns, is_from_hub, open_source
from meshwright.training.data.split import Extents, everything, hold_out
from meshwright.training.data.store import TokenStore, open_store
from meshwright.training.data.token_range import require_vocab
from meshwright.training.data.tokenization import Report, tokenise
from meshwright.training.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    notes_on_end,
    tokenizer_from_hub,
    tokenizer_from_path,
    with_added_tokens,
)
from meshwright.training.data.usage import DataUsage, describe_records, usages_as_json


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and validation data of a run."""

    train: Samples
    validations: Mapping[str, Samples]  # by name; always the same, in the same order. Empty: no validation loss
    tokenizer: Tokenizer | None  # None: the data is tokens already, or random ones
    num_tokens: int | None  # of the training part; None: endless
    train_usages: Mapping[str, DataUsage] = field(default_factory=dict)  # by source; empty: random tokens
    validation_usages: Mapping[str, DataUsage] = field(default_factory=dict)
    has_conversations: bool | None = None  # in the training data; None: unknown
    reading_notes: tuple[str, ...] = ()  # formats of records, and what of the sources is not used

    @property
    def validation(self) -> Samples | None:
        """The first validation source; None: the run has no validation loss."""
        return next(iter(self.validations.values()), None)

    @property
    def usage(self) -> dict[str, Any]:
        """`statistics.data_usage` of a record."""
        return usages_as_json(self.train_usages, self.validation_usages)

    @property
    def usages(self) -> dict[str, DataUsage]:
        """Counts of all sources by the names that lines and tables have for them."""
        usages = {_training_data(name): usage for name, usage in self.train_usages.items()}
        return usages | {_validation_data(name): usage for name, usage in self.validation_usages.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on formats of records, on cut or unlabelled records, and on padding; a stream of text has none."""
        lines = (usage.describe(name) for name, usage in self.usages.items())
        return (*self.reading_notes, *(line for line in lines if line is not None))

    @property
    def label_ratio(self) -> float:
        """Labels that the loss counts over positions, in the samples that training reads."""
        if not self.train_usages:
            return 1.0
        if not isinstance(self.train, Mixture):
            return self.train_usages[TRAINING].label_ratio
        sources = self.train.progress(0)
        return sum(source.share * self.train_usages[name].label_ratio for name, source in sources.items())

    def planned_epochs(self, *, num_steps: int | None, num_sequences: int) -> Iterator[str]:
        """Lines about the share of each source of a mixture, and how often a run reads it that takes `num_steps` steps
        and ends before sequence `num_sequences`."""
        if not isinstance(self.train, Mixture):
            return
        for name, source in self.train.progress(num_sequences).items():
            num_samples = self.train.sources[name].num_samples
            epochs = "" if num_steps is None else f", {source.num_epochs:.2f} epochs in {num_steps:,} steps"
            yield f"{_training_data(name)}: {100 * source.share:.1f} % of the samples, {num_samples:,} an epoch{epochs}"


def _training_data(name: str) -> str:
    return "training data" if name == TRAINING else f"training data {name}"


def _validation_data(name: str) -> str:
    return "validation data" if name == VALIDATION else f"validation data {name}"


def open_data(run: Run, *, cache: Path | None = None, report: Report | None = None) -> Corpus:
    """Open the data of `run`. The first use tokenises it; other processes wait for that.

    Raises InputError when the data, the tokenizer or the sizes do not work, MissingDependencyError when a library is
    absent.
    """
    cache = default_cache() if cache is None else cache
    is_evaluated = run.train.evaluate is not None
    if run.data.is_synthetic:
        _refuse_validation_of_random_tokens(run)
        return random_corpus(run)

    sources = {name: open_source(source.path, cache=cache) for name, source in run.data.sources.items()}
    tokenizer = _tokenizer(run, sources, cache)
    parts: dict[str, TextSamples] = {}
    held_out: dict[str, TextSamples] = {}
    places = dict(run.data.validation_sources) if is_evaluated else {}
    notes = notes_on_end(tokenizer)
    num_tokens, num_conversations = 0, []
    for name, source in sources.items():
        store, of_store = _open_store(run, source, tokenizer, cache, report, name=_training_data(name))
        notes += of_store
        num_conversations.append((store.counts or {}).get("num_conversations"))
        extents = everything(store)
        if is_evaluated and not run.data.validation_sources:
            split = hold_out(store, whole_documents=store.is_masked, group=1 if run.train.preference is None else 2)
            extents, held = split.train, name if len(sources) > 1 else VALIDATION
            held_out[held] = _samples(store, split.validation, run, pads_short=True)
            places[held] = f"the validation part of {source.name}"
        parts[name] = _samples(store, extents, run)
        num_tokens += extents.num_tokens
        # Of a mixture a source is repeated as its weight asks; alone it fills whole batches.
        group = 1 if run.train.grpo is None else run.train.grpo.group
        require_samples(parts[name], name=source.name, needed=1 if len(sources) > 1 else run.global_batch // group)
    for name, place in run.data.validation_sources.items() if is_evaluated else ():
        other = open_source(place, cache=cache)
        store, of_store = _open_store(run, other, tokenizer, cache, report, name=_validation_data(name))
        notes += of_store
        if any(_is_same(other, source) for source in sources.values()):
            notes += (f"{_validation_data(name)} is training data too: its loss says nothing about other text",)
        held_out[name] = _samples(store, everything(store), run, pads_short=True)
    for name, samples in held_out.items():
        # Other engines repeat samples to fill a batch, which would count some of them twice.
        require_samples(samples, name=places[name], needed=1 if run.engine == NATIVE else run.global_batch)
    return Corpus(
        train=_mixed(run.data, parts),
        validations=held_out,
        tokenizer=tokenizer,
        num_tokens=num_tokens,
        train_usages={name: part.usage for name, part in parts.items()},
        validation_usages={name: samples.usage for name, samples in held_out.items()},
        has_conversations=any(num_conversations) or (None if None in num_conversations else False),
        reading_notes=notes,
    )


def _is_same(one: DocumentSource | TokenFiles, other: DocumentSource | TokenFiles) -> bool:
    """True if both hold the same documents."""
    if isinstance(one, TokenFiles) or isinstance(other, TokenFiles):
        places = [{file.resolve() for file in s.prefixes} if isinstance(s, TokenFiles) else s for s in (one, other)]
        return places[0] == places[1]
    return one.fingerprint == other.fingerprint


def random_corpus(run: Run) -> Corpus:
    """Random tokens in the shape of the data of `run`: documents, or pairs of answers."""
    train = SyntheticSamples(
        vocab=run.model.vocab,
        sequence_length=run.sequence_length,
        seed=run.train.seed,
        num_documents=1 if run.train.preference is None else 2,
    )
    validations = {} if run.train.evaluate is None else {VALIDATION: replace(train, seed=~run.train.seed)}
    return Corpus(train=train, validations=validations, tokenizer=None, num_tokens=None)


def _mixed(data: Data, parts: Mapping[str, TextSamples]) -> Samples:
    if isinstance(data.source, str):
        return parts[TRAINING]
    return Mixture(sources=parts, weights={name: source.weight for name, source in data.sources.items()})


def _open_store(
    run: Run,
    source: DocumentSource | TokenFiles,
    tokenizer: Tokenizer | None,
    cache: Path,
    report: Report | None,
    *,
    name: str,
) -> tuple[TokenStore, tuple[str, ...]]:
    """The tokens of a source, all in the model's vocabulary, and notes about its records."""
    if isinstance(source, TokenFiles):
        store = open_store(list(source.prefixes))
    elif tokenizer is None:
        raise InputError("text needs a tokenizer", got=source.name, hint="name one as data.tokenizer")
    else:
        store = tokenise(source, tokenizer, cache=cache, report=report)
    require_pairs(store, name=name, preference=run.train.preference)
    if run.train.grpo is not None:
        _require_prompts(store, name=name)
    require_vocab(store, vocab=run.model.vocab, cache=cache)
    of_source = source.notes if isinstance(source, DocumentSource) else ()
    return store, (*(f"{name}: {line}" for line in of_source), *describe_records(name, store.counts))


def require_pairs(store: TokenStore, *, name: str, preference: Preference | None, hint: str | None = None) -> None:
    """Raise InputError where the data is not of the format that the loss compares, or is one and cross-entropy counts.

    `hint`: the way on without a preference; None: that of a training.
    """
    formats = set((store.counts or {}).get("formats", ()))
    keys = {RecordFormat.PREFERENCE: "chosen and rejected", RecordFormat.JUDGED: "prompt, completion and label"}
    is_judged = preference is not None and preference.loss is PreferenceLoss.KTO
    wanted = RecordFormat.JUDGED if is_judged else RecordFormat.PREFERENCE
    if preference is not None and formats != {wanted}:
        raise InputError(
            f"{name}: train.preference: {preference.loss} needs {'judged' if is_judged else 'pairs of'} answers",
            got=", ".join(sorted(formats)) or "tokens", allowed=f"records with {keys[wanted]}",
            hint="leave train.preference out to train on these",
        )  # fmt: skip
    if preference is None and (found := formats & keys.keys()):
        raise InputError(
            f"{name} has pairs of answers, or judged ones, which cross-entropy does not tell apart",
            got=", ".join(sorted(found)),
            hint=hint or "--set train.preference=dpo, or =kto; or name the key of one answer: source: NAME?text=chosen",
        )


def _require_prompts(store: TokenStore, *, name: str) -> None:
    formats = set((store.counts or {}).get("formats", ()))
    if not formats or RecordFormat.TEXT in formats:
        raise InputError(
            f"{name}: train.grpo needs prompts with the answers that completions are compared with",
            got=", ".join(sorted(formats)) or "tokens",
            allowed="records with prompt and answer, question and answer, or messages",
        )


def require_sources(run: Run) -> None:
    """Raise InputError if data of `run` that is on this machine is absent. Reads no text and downloads nothing."""
    if run.data.is_synthetic:
        _refuse_validation_of_random_tokens(run)
    held_out = run.data.validation_sources.values() if run.train.evaluate else ()
    for name in (*(source.path for source in run.data.sources.values()), *held_out):
        if name != SYNTHETIC and not is_from_hub(name):
            open_source(name)


def _refuse_validation_of_random_tokens(run: Run) -> None:
    if run.data.validation is not None and run.train.evaluate is not None:
        raise InputError(
            "a model of random tokens is not validated on text: data.source is synthetic",
            hint="name text as data.source, or leave data.validation out",
        )


def open_tokenizer(name: str, *, source: DocumentSource | TokenFiles | None, cache: Path) -> Tokenizer:
    """The tokenizer that a run file calls `name`; `bpe:SIZE` is trained on `source`.

    Raises InputError when there is no such tokenizer.
    """
    kind, colon, size = name.partition(":")
    if name == "bytes":
        return ByteTokenizer()
    if kind == "bpe" and colon:
        if not size.isdecimal():
            raise InputError("the size of a trained tokenizer", got=name, allowed="bpe:SIZE, such as bpe:4096")
        if not isinstance(source, DocumentSource):
            raise InputError(f"{name} is trained on text", got="no text", hint="name text as data.source")
        return bpe_tokenizer(int(size), source=source, cache=cache)
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.endswith(".json"):
        return tokenizer_from_path(path)
    return tokenizer_from_hub(name)


def text_of(sources: Iterable[DocumentSource | TokenFiles]) -> DocumentSource | TokenFiles | None:
    """The text that `bpe:SIZE` is trained on: all sources of documents in turns; token files where that is all."""
    every = list(sources)
    documents = [source for source in every if isinstance(source, DocumentSource)]
    return in_turns(documents) if documents else next(iter(every), None)


def _tokenizer(run: Run, sources: Mapping[str, DocumentSource | TokenFiles], cache: Path) -> Tokenizer | None:
    text = next((s.name for s in sources.values() if isinstance(s, DocumentSource)), None)
    if run.data.tokenizer is None and text is None:
        return None
    if run.data.tokenizer is None:
        raise InputError(
            f"data.tokenizer is missing: {text} is text",
            allowed="bytes, bpe:SIZE, a tokenizer.json or its folder, OWNER/NAME[@REVISION] on the Hugging Face hub",
            hint=f"tokenizer: bpe:{run.model.vocab} trains one of the model's size on this text",
        )
    tokenizer = open_tokenizer(run.data.tokenizer, source=text_of(sources.values()), cache=cache)
    tokenizer = with_added_tokens(tokenizer, run.data.added_tokens)
    if tokenizer.vocab > run.model.vocab:
        raise InputError(
            f"the tokenizer {tokenizer.name} has more tokens than the model's vocabulary",
            got=tokenizer.vocab, allowed=f"<= {run.model.vocab}",
            hint=f"--set model.vocab={tokenizer.vocab} adds rows" if run.data.added_tokens else None,
        )  # fmt: skip
    return tokenizer


def _samples(store: TokenStore, extents: Extents, run: Run, *, pads_short: bool = False) -> TextSamples:
    """Answers keep their prompts: a corpus with a mask is packed by whole documents, or in pairs."""
    if run.train.grpo is not None:
        most = run.sequence_length - run.train.grpo.completion_tokens
        return whole_samples(store, extents, sequence_length=run.sequence_length, most_prompt=most)
    if run.train.preference is not None:
        is_judged = run.train.preference.loss is PreferenceLoss.KTO
        return pair_samples(store, extents, sequence_length=run.sequence_length, is_judged=is_judged)
    if store.is_masked:
        return whole_samples(store, extents, sequence_length=run.sequence_length)
    return stream_samples(
        store,
        extents,
        sequence_length=run.sequence_length,
        pads_short=pads_short,
        joins_documents=run.data.joined_documents,
    )
