"""Sources of documents, by the name in a run file."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import parse_qsl

from meshwright.errors import InputError, nearest
from meshwright.files import default_cache
from meshwright.training.data.cache import remembered_digest
from meshwright.training.data.chat import ChatML
from meshwright.training.data.documents import Chat, TextDocument
from meshwright.training.data.hub import HubDataset, dataset_from_disk, dataset_from_hub, is_saved_to_disk
from meshwright.training.data.readers import COMPRESSIONS, READERS, read_text, reader_of
from meshwright.training.data.records import RecordCounts, RecordFormat, RecordRules, read_records, rules_from_options

PYTHON_STDLIB = "python-stdlib"

_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_GLOB_MARKS = "*?["
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_RECORD_OPTIONS = ("text", "format", "answers")
_HUB_OPTIONS = ("config", "split", *_RECORD_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class DocumentSource:
    """Documents of one corpus, in an order that never changes."""

    name: str
    num_bytes: int | None  # size of its files, for progress; None: not known
    read: Callable[[Chat, RecordCounts], Iterator[TextDocument]] = field(repr=False)
    identify: Callable[[], str] = field(repr=False)
    notes: tuple[str, ...] = ()  # what of it is not read

    def documents(self, *, chat: Chat | None = None, counts: RecordCounts | None = None) -> Iterator[TextDocument]:
        """Yield every document. `chat` writes conversations; `counts` counts the records read.

        Raises InputError at the first record that cannot be read.
        """
        return self.read(chat if chat is not None else ChatML(), counts if counts is not None else RecordCounts())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content: the same corpus elsewhere has the same one."""
        return self.identify()


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """A corpus of token files."""

    name: str
    prefixes: tuple[Path, ...]


def open_source(name: str, *, cache: Path | None = None) -> DocumentSource | TokenFiles:
    """Open the corpus `name`. `cache` keeps the digests of large files.

    Raises InputError when there is no such corpus, a folder holds no readable file, or an option is unknown.
    """
    try:
        return _open(name, default_cache() if cache is None else cache)
    except (OSError, ValueError) as error:  # no permission, or an invalid name or pattern
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot open the data: {reason}", got=name[:200]) from error


def in_turns(sources: Sequence[DocumentSource]) -> DocumentSource:
    """One corpus of several: a document of each in turn, until the last one ends."""
    if len(sources) == 1:
        return sources[0]

    def read(chat: Chat, counts: RecordCounts) -> Iterator[TextDocument]:
        left = [source.read(chat, counts) for source in sources]
        while left:
            for documents in list(left):
                document = next(documents, None)
                if document is None:
                    left.remove(documents)
                else:
                    yield document

    def identify() -> str:
        return hashlib.sha256("\n".join(source.fingerprint for source in sources).encode()).hexdigest()

    return DocumentSource(
        name=", ".join(source.name for source in sources), num_bytes=None, read=read, identify=identify
    )


def is_from_hub(name: str) -> bool:
    """Return True if `name` can only name a data set of the Hugging Face hub: no file here has that name."""
    place, _ = _split(name)
    path = Path(place).expanduser()
    is_here = place == PYTHON_STDLIB or path.exists() or _indexed_prefix(path) is not None
    return not is_here and not _looks_like_path(place) and _HUB_NAME.fullmatch(place) is not None


def absolute_source(name: str) -> str:
    """The name with an absolute path, so that it is found from other folders; the name of no file or glob as it is."""
    try:
        place, _ = _split(name)
        path = Path(place).expanduser()
        is_glob = any(mark in place for mark in _GLOB_MARKS) and not path.is_absolute()
        if path.exists():
            return f"{path.resolve()}{name[len(place) :]}"
        is_here = _indexed_prefix(path) is not None or (is_glob and any(Path().glob(str(path))))
        return f"{path.absolute()}{name[len(place) :]}" if is_here else name
    except (OSError, ValueError):  # an invalid name or pattern
        return name


def _open(name: str, cache: Path) -> DocumentSource | TokenFiles:
    place, options = _split(name)
    if place == PYTHON_STDLIB:
        _refuse_unknown(options, (), name)
        # Without tests, generated tables, and files that vary by machine.
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(f for f in root.rglob("*.py") if not _EXCLUDED_FOLDERS & set(f.relative_to(root).parts))
        files = [f for f in files if not f.name.startswith("_sysconfigdata")]
        if not files:
            raise InputError(
                f"{PYTHON_STDLIB}: this interpreter has no library source", got=str(root),
                hint="name a text file or a folder as data.source",
            )  # fmt: skip
        return _from_files(PYTHON_STDLIB, _Found(files=tuple(files)), RecordRules(), cache)
    path = Path(place).expanduser()
    if (prefix := _indexed_prefix(path)) is not None:
        _refuse_unknown(options, (), name)
        return TokenFiles(name=name, prefixes=(prefix,))
    if is_saved_to_disk(path):
        _refuse_unknown(options, ("split", *_RECORD_OPTIONS), name)
        rules = rules_from_options(options, name=name)
        return _from_rows(name, dataset_from_disk(path, split=options.get("split")), rules)
    found = _files(path)
    if found.files:
        _refuse_unknown(options, _RECORD_OPTIONS, name)
        return _from_files(name, found, rules_from_options(options, name=name), cache)
    if _looks_like_path(place) or _HUB_NAME.fullmatch(place) is None:
        raise InputError(
            "no such data", got=place,
            hint=f"a file, folder or glob of {' '.join(READERS)}, NAME.bin with NAME.idx, or {PYTHON_STDLIB}",
        )  # fmt: skip
    _refuse_unknown(options, _HUB_OPTIONS, name)
    rows = dataset_from_hub(place, config=options.get("config"), split=options.get("split", "train"))
    return _from_rows(name, rows, rules_from_options(options, name=name))


def _split(name: str) -> tuple[str, dict[str, str]]:
    """A name and its options. A question mark that is part of an existing path or a glob stays there."""
    place, mark, query = name.rpartition("?")
    if not mark or "=" not in query or Path(name).exists():
        return name, {}
    return place, dict(parse_qsl(query, keep_blank_values=True))


def _refuse_unknown(options: Mapping[str, str], allowed: tuple[str, ...], name: str) -> None:
    for option in options:
        if option not in allowed:
            near = nearest(option, allowed)
            raise InputError(
                f"{name}: unknown option of a data source", got=option, allowed=", ".join(allowed) or "none",
                hint=f"did you mean {near!r}?" if near else None,
            )  # fmt: skip


def _looks_like_path(place: str) -> bool:
    return place.startswith((".", "/", "~")) or place.count("/") > 1 or reader_of(Path(place)) is not None


def _indexed_prefix(path: Path) -> Path | None:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if prefix.with_name(prefix.name + ".idx").is_file() else None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Files in the order of their names, and the suffixes of files that no reader knows."""

    files: tuple[Path, ...] = ()
    other_suffixes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The files that are not read."""
        if not self.other_suffixes:
            return ()
        kinds = ", ".join(sorted({suffix or "without a suffix" for suffix in self.other_suffixes})[:8])
        return (f"{len(self.other_suffixes)} files of other kinds are not read ({kinds})",)


def _files(path: Path) -> _Found:
    """Find the files of a path. A path that is a file need not have a known suffix."""
    if path.is_file():
        return _Found(files=(path,))
    if path.is_dir():
        found = [f for f in path.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(path))]
    elif any(mark in str(path) for mark in _GLOB_MARKS):
        anchor = Path(path.anchor)
        pattern = str(path.relative_to(anchor)) if path.is_absolute() else str(path)
        found = [f for f in anchor.glob(pattern) if f.is_file()]
    else:
        return _Found()
    files = tuple(sorted(f for f in found if reader_of(f) is not None))
    if not files:
        raise InputError("no readable file there", got=str(path), allowed=_ALLOWED_FILES)
    return _Found(files=files, other_suffixes=tuple(f.suffix for f in found if reader_of(f) is None))


_ALLOWED_FILES = f"{', '.join(READERS)}; also {' '.join(COMPRESSIONS)}, except Parquet and Arrow"


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _from_files(name: str, found: _Found, rules: RecordRules, cache: Path) -> DocumentSource:
    files = found.files
    for file in files:
        if reader_of(file) is None:
            raise InputError("a file of unknown kind", got=str(file), allowed=_ALLOWED_FILES)
    states: dict[Path, tuple[int, int]] = {}  # when their digests were taken

    def read(chat: Chat, counts: RecordCounts) -> Iterator[TextDocument]:
        for file in files:
            reader = reader_of(file)
            assert reader is not None
            records = reader(file, rules.text_key)
            if reader is read_text:
                yield from read_records(records, rules=RecordRules(format=RecordFormat.TEXT), chat=chat, counts=counts)
            else:
                yield from read_records(records, rules=rules, chat=chat, counts=counts)
            if states.get(file, state := _state(file)) != state:
                raise InputError(f"{file} was changed while it was read", hint="start again when it is complete")

    def identify() -> str:
        facts = [rules.identity]
        for file in files:
            states[file] = _state(file)
            try:
                facts.append(f"{''.join(file.suffixes)} {remembered_digest(file, cache=cache)}")
            except OSError as error:
                raise InputError(f"cannot read {file}: {error.strerror}") from error
        return _digest(facts)

    return DocumentSource(
        name=name,
        num_bytes=sum(size for size, _ in map(_state, files)),
        read=read,
        identify=identify,
        notes=found.notes,
    )


def _state(file: Path) -> tuple[int, int]:
    """Size and time of the last change."""
    try:
        fact = file.stat()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    return fact.st_size, fact.st_mtime_ns


def _from_rows(name: str, rows: HubDataset, rules: RecordRules) -> DocumentSource:
    def read(chat: Chat, counts: RecordCounts) -> Iterator[TextDocument]:
        records = rows.rows(name, text_key=rules.text_key)
        return read_records(records, rules=rules, chat=chat, counts=counts)

    return DocumentSource(
        name=name, num_bytes=rows.num_bytes, read=read, identify=lambda: _digest([rules.identity, rows.fingerprint])
    )


def _digest(facts: list[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
