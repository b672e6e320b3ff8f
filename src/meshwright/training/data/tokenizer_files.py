"""The files of a tokenizer, as `transformers.AutoTokenizer` loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.training.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

_FILES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt
    tokenizer.model spiece.model tekken.json chat_template.jinja chat_template.json additional_chat_templates/*.jinja
    tokenization_*.py
"""
TOKENIZER_FILES = (*_FILES.split(),)
"""Patterns of the files in a repository of the Hugging Face hub that belong to its tokenizer."""

BYTE_END = "<|endoftext|>"


def copy_files(source: Path, folder: Path, *, patterns: tuple[str, ...]) -> None:
    """Copy the files of `source` that match to `folder`, byte by byte.

    Raises InputError for a link that leads elsewhere: a folder from somebody else could name any file of this machine.
    """
    places = [place := source.resolve()]
    if place.parent.name == "snapshots":  # the hub's cache: models--NAME/snapshots/REVISION links to models--NAME/blobs
        places.append(place.parent.parent / "blobs")
    for pattern in patterns:
        for file in source.glob(pattern):
            if not any(file.resolve().is_relative_to(place) for place in places):
                hint = "put the file itself there"
                raise InputError("a link leads out of the folder", got=f"{file} -> {file.resolve()}", hint=hint)
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> bool:
    """Write a tokenizer with the start and end tokens of training; return False if transformers has no such one."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer = JsonTokenizer(_byte_level(), name=tokenizer.name, config={"eos_token": BYTE_END})
    if not isinstance(tokenizer, JsonTokenizer):
        return False
    if tokenizer.folder is not None:
        copy_files(tokenizer.folder, folder, patterns=TOKENIZER_FILES)
    written = folder / "tokenizer.json"
    is_whole = written.is_file() and written.read_text(encoding="utf-8") == tokenizer.text
    if not is_whole or tokenizer.whole_config() != tokenizer.config:
        tokenizer.save(folder)
    return True


def _byte_level() -> str:
    """The `tokenizer.json` of `ByteTokenizer`: a BPE without merges whose tokens are the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end: dict[str, Any] = {"id": ByteTokenizer.end, "content": BYTE_END, "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    document = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_characters(), "merges": []},
    }
    return json.dumps(document)


def _byte_characters() -> dict[str, int]:
    """The bytes by their printable characters in GPT-2's byte-level vocabularies.

    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
