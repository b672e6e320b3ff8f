"""A byte-level BPE tokenizer, trained on the corpus itself and kept by the hash of its training text.

Words are split as GPT-2 splits them; the first 256 tokens are the bytes, so no text is unknown. Source:
Radford et al. (2019), Language Models are Unsupervised Multitask Learners, section 2.2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import InputError
from meshwright.training.data.cache import build_once
from meshwright.training.data.chat import END_OF_TURN, START_OF_TURN
from meshwright.training.data.source import DocumentSource
from meshwright.training.data.tokenizer import JsonTokenizer, require_tokenizers

END = "<|endoftext|>"
SPECIAL_TOKENS = (END, START_OF_TURN, END_OF_TURN)
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)
LARGEST_VOCAB = 1 << 20
TRAINED_ON_CHARACTERS = 32 << 20
"""Characters of the corpus that training reads; more hardly change merges, but cost time and memory."""
_EXCERPT_CHARACTERS = 1 << 16  # of one document, so that one long file does not decide alone


def bpe_tokenizer(vocab: int, *, source: DocumentSource, cache: Path) -> JsonTokenizer:
    """The tokenizer of `vocab` tokens for this corpus: read from the cache, or trained now and put there.

    Raises InputError when the size is impossible. A small corpus can yield fewer tokens than asked for.
    """
    if not SMALLEST_VOCAB <= vocab <= LARGEST_VOCAB:
        raise InputError("the size of a BPE vocabulary", got=vocab, allowed=f"{SMALLEST_VOCAB} to {LARGEST_VOCAB}")
    about = {
        "kind": "byte-level BPE", "format": 1, "vocab": vocab, "source": source.fingerprint,
        "characters": TRAINED_ON_CHARACTERS, "excerpt": _EXCERPT_CHARACTERS,
    }  # fmt: skip
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
    folder = cache / "tokenizers" / key

    def build(partial: Path) -> None:
        library = require_tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_excerpts(source), trainer)
        text = tokenizer.to_str()
        (partial / "tokenizer.json").write_text(text, encoding="utf-8")
        (partial / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")

    build_once(folder, build, about=about)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return JsonTokenizer(text, name=f"bpe:{vocab}", config={"eos_token": END})


def _excerpts(source: DocumentSource) -> Iterator[str]:
    left = TRAINED_ON_CHARACTERS
    for document in source.documents():
        excerpt = document.text[: min(left, _EXCERPT_CHARACTERS)]
        left -= len(excerpt)
        yield excerpt
        if left == 0:
            return
