"""Sources of documents, by the name in a run file.

    python-stdlib    the source of this interpreter's standard library: nothing to download, about 10 MB
    PATH             a file, a folder (searched to the bottom) or a glob: text, JSONL, Parquet
    PATH             a folder written by `datasets.save_to_disk`
    PATH             Megatron's NAME.bin and NAME.idx, named with or without the suffix: already tokens
    NAME             a data set of the Hugging Face hub, through the `datasets` library

Options follow a question mark: `corpus.jsonl?text=content`, `wikitext?config=wikitext-2-raw-v1&split=train`.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
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
from meshwright.training.data.readers import READERS, reader_of

PYTHON_STDLIB = "python-stdlib"
SYNTHETIC = "synthetic"

_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_OPTIONS, _HUB_OPTIONS = ("text",), ("config", "split", "text")


@dataclass(frozen=True, kw_only=True)
class DocumentSource:
    """Documents of one corpus, in an order that never changes."""

    name: str
    num_bytes: int | None  # size of its files, for progress; None: not known
    read: Callable[[Chat], Iterator[TextDocument]] = field(repr=False)
    identify: Callable[[], str] = field(repr=False)

    def documents(self, *, chat: Chat | None = None) -> Iterator[TextDocument]:
        """Every document; conversations are written with `chat`. Raises InputError at the first unreadable one."""
        return self.read(chat if chat is not None else ChatML())

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
    """The corpus of that name. In `cache` the digests of large files are kept.

    Raises InputError when there is none, a folder holds nothing readable, or an option is unknown.
    """
    try:
        return _open(name, default_cache() if cache is None else cache)
    except (OSError, ValueError) as error:  # no permission, or an invalid name or pattern
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot open the data: {reason}", got=name[:200]) from error


def is_from_hub(name: str) -> bool:
    """True if the name can only be that of a data set of the Hugging Face hub: nothing of that name is here."""
    place, _ = _split(name)
    path = Path(place).expanduser()
    is_here = place == PYTHON_STDLIB or path.exists() or _indexed_prefix(path) is not None
    return not is_here and not _looks_like_path(place) and _HUB_NAME.fullmatch(place) is not None


def _open(name: str, cache: Path) -> DocumentSource | TokenFiles:
    place, options = _split(name)
    if place == PYTHON_STDLIB:
        _refuse_unknown(options, (), name)
        return _python_library(cache)
    path = Path(place).expanduser()
    if (prefix := _indexed_prefix(path)) is not None:
        _refuse_unknown(options, (), name)
        return TokenFiles(name=name, prefixes=(prefix,))
    if is_saved_to_disk(path):
        _refuse_unknown(options, ("split", "text"), name)
        return _from_rows(name, dataset_from_disk(path, split=options.get("split")), options.get("text"))
    if files := _files(path):
        _refuse_unknown(options, _FILE_OPTIONS, name)
        return _from_files(name, files, options.get("text"), cache)
    if _looks_like_path(place) or _HUB_NAME.fullmatch(place) is None:
        raise InputError(
            "no such data", got=place,
            hint=f"a file, folder or glob of {' '.join(READERS)}, NAME.bin with NAME.idx, or {PYTHON_STDLIB}",
        )  # fmt: skip
    _refuse_unknown(options, _HUB_OPTIONS, name)
    rows = dataset_from_hub(place, config=options.get("config"), split=options.get("split", "train"))
    return _from_rows(name, rows, options.get("text"))


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


def _files(path: Path) -> list[Path]:
    """Readable files in the order of their names. A file that was named itself need not have a known suffix."""
    if path.is_file():
        return [path]
    if path.is_dir():
        found = (f for f in path.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(path)))
    elif any(mark in str(path) for mark in "*?["):
        anchor = Path(path.anchor)
        pattern = str(path.relative_to(anchor)) if path.is_absolute() else str(path)
        found = (f for f in anchor.glob(pattern) if f.is_file())
    else:
        return []
    files = sorted(f for f in found if reader_of(f) is not None)
    if not files:
        raise InputError("no readable file there", got=str(path), allowed=f"{', '.join(READERS)}; also .gz")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _from_files(name: str, files: list[Path], text_key: str | None, cache: Path) -> DocumentSource:
    for file in files:
        if reader_of(file) is None:
            raise InputError(
                "a file of unknown kind", got=str(file), allowed=f"{', '.join(READERS)}; also .gz"
            )

    def read(chat: Chat) -> Iterator[TextDocument]:
        for file in files:
            reader = reader_of(file)
            assert reader is not None
            yield from reader(file, text_key=text_key, chat=chat)

    def identify() -> str:
        facts = [f"text={text_key}"]
        for file in files:
            try:
                facts.append(f"{''.join(file.suffixes)} {remembered_digest(file, cache=cache)}")
            except OSError as error:
                raise InputError(f"cannot read {file}: {error.strerror}") from error
        return _digest(facts)

    num_bytes = sum(file.stat().st_size for file in files)
    return DocumentSource(name=name, num_bytes=num_bytes, read=read, identify=identify)


def _python_library(cache: Path) -> DocumentSource:
    """The standard library's source without tests, generated tables, and files that vary by machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if not _EXCLUDED_FOLDERS & set(f.relative_to(root).parts))
    files = [f for f in files if not f.name.startswith("_sysconfigdata")]
    if not files:
        raise InputError(
            f"{PYTHON_STDLIB}: this interpreter has no library source", got=str(root),
            hint="name a text file or a folder as data.source",
        )  # fmt: skip
    return _from_files(PYTHON_STDLIB, files, None, cache)


def _from_rows(name: str, rows: HubDataset, text_key: str | None) -> DocumentSource:
    def read(chat: Chat) -> Iterator[TextDocument]:
        return rows.documents(name, text_key=text_key, chat=chat)

    return DocumentSource(
        name=name,
        num_bytes=rows.num_bytes,
        read=read,
        identify=lambda: _digest([f"text={text_key}", rows.fingerprint]),
    )


def _digest(facts: list[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
