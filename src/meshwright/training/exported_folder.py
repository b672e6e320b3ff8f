"""A folder of exported weights, completed so that transformers loads the model and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.catalog.huggingface import model_from_config
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import default_cache
from meshwright.json_values import load_json
from meshwright.training.checkpoints import Content
from meshwright.training.data import open_tokenizer
from meshwright.training.data.chat import CHATML_TEMPLATE, ChatML
from meshwright.training.data.corpus import text_of
from meshwright.training.data.source import DocumentSource, is_from_hub, open_source
from meshwright.training.data.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    notes_on_end,
    tokenizer_from_path,
    turn_end,
    with_added_tokens,
)
from meshwright.training.data.tokenizer_files import TOKENIZER_FILES, copy_files, write_tokenizer
from meshwright.training.weights import find_description, fingerprint
from meshwright.training.weights.origin import MODEL_FILES, positions_of

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
REPLACED = ("rope_theta", "rope_scaling", "rope_parameters", "layer_types")
"""Keys of a config.json that must not stay where training changed the model."""


def complete_folder(folder: Path, content: Content) -> tuple[str, ...]:
    """Complete `folder`, which holds the weights of `content` and a config.json of their shapes.

    Returns notes on files that were not found.
    """
    base, notes = find_base(content)
    tokenizer, tokenizer_notes = find_tokenizer(content)
    is_base_tokenizer = base is not None and (tokenizer is None or is_tokenizer_of(base, tokenizer))
    config = written = load_json(folder / CONFIG)
    base_config, generation = {}, {}
    if base is not None:
        copy_files(base, folder, patterns=(*MODEL_FILES, *(TOKENIZER_FILES if is_base_tokenizer else ())))
        base_config, generation = read_json(base / CONFIG), read_json(base / GENERATION)
        config = _carry_over(base_config, written)
    positions = trained_positions(base_config, content) or written["max_position_embeddings"]
    config |= {"max_position_embeddings": positions}
    if not is_base_tokenizer and content.sequence_length is not None:
        ids = {"bos_token_id": tokenizer and tokenizer.start, "eos_token_id": tokenizer and tokenizer.end}
        config = config | ids
        config.pop("pad_token_id", None)
        if generation:
            generation = {k: v for k, v in generation.items() if k not in TOKEN_IDS} | ids
            _write(folder / GENERATION, generation)
    if content.shapes.num_labels and config.get("pad_token_id") in (None, *end_tokens(config)):
        config["pad_token_id"] = None
        tokenizer_notes += (
            "the tokenizer has no padding token besides its end token, at which the score is: transformers scores one "
            "text at a time, or pads with another token that pad_token_id of config.json names",
        )
    if notes_on_end(tokenizer):
        tokenizer_notes += notes_on_end(tokenizer)
        config |= _name_end(folder, tokenizer, config) if is_base_tokenizer else {}
    _write(folder / CONFIG, config)
    if tokenizer is not None and not is_base_tokenizer and not write_tokenizer(tokenizer, folder):
        tokenizer_notes += (f"transformers has no tokenizer like {tokenizer.name}: none is in the folder",)
    if tokenizer is not None and _has_conversations(content, tokenizer):
        tokenizer_notes += _complete_chat(folder, tokenizer)
    return notes + tokenizer_notes


def _name_end(folder: Path, tokenizer: Tokenizer | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Name the end token in the base's tokenizer_config.json. Returns keys for a config.json that has no end token."""
    assert isinstance(tokenizer, JsonTokenizer)
    given = read_json(folder / TOKENIZER_CONFIG)
    _write(folder / TOKENIZER_CONFIG, given | {"eos_token": tokenizer.end_text})
    return {} if end_tokens(config) else {"eos_token_id": tokenizer.end}


def _has_conversations(content: Content, tokenizer: Tokenizer) -> bool:
    """True if the training data has conversations, by the checkpoint or by the first record of local files."""
    if content.has_conversations is not None or content.data is None:
        return bool(content.has_conversations)
    for place in (source.path for source in content.data.sources.values()):
        try:
            source = None if is_from_hub(place) else open_source(place)
            if isinstance(source, DocumentSource):
                first = next(source.documents(chat=tokenizer.chat), None)
                if first is not None and first.is_rendered:
                    return True
        except MeshwrightError:  # the data is no longer here
            continue
    return False


def _complete_chat(folder: Path, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Write what ends an answer, and the template where the tokenizer has none, as conversations were trained.

    Returns a note where no single token ends an answer.
    """
    if isinstance(tokenizer.chat, ChatML) and (folder / "tokenizer.json").is_file():
        (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE, encoding="utf-8")
    turn = turn_end(tokenizer)
    stops = {stop: tokenizer.encode([stop])[0].tolist() for stop in turn.stops}
    config, generation = read_json(folder / CONFIG), read_json(folder / GENERATION)
    ends = end_tokens(generation) or end_tokens(config)
    marks = (*turn.tokens, *(ids[0] for ids in stops.values() if len(ids) == 1))
    wanted = list(dict.fromkeys((*ends, tokenizer.end, *marks)))
    if wanted != list(ends):
        ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
        _write(folder / GENERATION, ids | generation | {"eos_token_id": wanted if len(wanted) > 1 else wanted[0]})
    return tuple(
        f"answers end at the text {stop!r}, which is {len(ids)} tokens: transformers' generate needs it as stop_strings"
        for stop, ids in stops.items()
        if len(ids) > 1
    )


def notes_on_adapter(content: Content) -> tuple[str, ...]:
    """Note on adapters that were trained on conversations which their base does not write, or does not end."""
    tokenizer, _ = find_tokenizer(content)
    if tokenizer is None or not _has_conversations(content, tokenizer):
        return ()
    base, _ = find_base(content)
    ends = () if base is None else end_tokens(read_json(base / GENERATION)) or end_tokens(read_json(base / CONFIG))
    if not isinstance(tokenizer.chat, ChatML) and set(turn_end(tokenizer).tokens) <= set(ends):
        return ()
    return (
        "training was on conversations, and an adapter's folder holds neither their template nor the token that ends "
        "an answer, which the base lacks: --merge writes both",
    )


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens of a config.json or generation_config.json: a number, a list, or nothing."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [v for v in values if not isinstance(v, int) or isinstance(v, bool) or v < 0]:
        raise InputError("eos_token_id", got=repr(wrong[0]), allowed="a token id, or a list of them")
    return tuple(values)


def find_base(content: Content) -> tuple[Path | None, tuple[str, ...]]:
    """The folder whose config.json and tokenizer belong to the weights that training started from."""
    if content.weights is None:
        return None, ()
    defaults = "config.json has no more than the shapes of the model"
    try:
        found = find_description(content.weights)
    except MeshwrightError as error:
        return None, (f"{content.weights}, where training started, is not found; {defaults}: {error}",)
    expected = content.weights_fingerprint
    if expected is not None and any(found.glob("*.safetensors")) and fingerprint(found) != expected:
        return None, (f"the weights in {content.weights} have changed since the training; {defaults}",)
    return found, ()


def find_tokenizer(content: Content) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """The tokenizer of the training."""
    data = content.data
    if data is None:
        return None, ("an old checkpoint does not name its tokenizer and its sequence length",)
    if data.is_synthetic or data.tokenizer is None:
        return None, ("the run has no tokenizer",) if content.weights is None else ()
    instead = "none is written" if content.weights is None else "the weights' tokenizer is written, if there is one"
    cache = default_cache()
    try:
        is_trained = data.tokenizer.startswith("bpe:")
        places = [source.path for source in data.sources.values()] if is_trained else []
        source = text_of(open_source(place, cache=cache) for place in places)
        tokenizer = open_tokenizer(data.tokenizer, source=source, cache=cache)
        tokenizer = with_added_tokens(tokenizer, data.added_tokens)
    except MeshwrightError as error:
        return None, (f"the tokenizer {data.tokenizer} is not found; {instead}: {error}",)
    if content.tokenizer_fingerprint not in (None, tokenizer.fingerprint):
        return None, (f"the tokenizer {data.tokenizer} has changed since the training; {instead}",)
    return tokenizer, ()


def is_tokenizer_of(base: Path, tokenizer: Tokenizer) -> bool:
    """Return True if `tokenizer` is the tokenizer in the folder `base`."""
    if not (base / "tokenizer.json").is_file():
        return False
    try:
        return tokenizer_from_path(base).fingerprint == tokenizer.fingerprint
    except InputError:  # without an end token, for example
        return False


def _carry_over(base: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The config of the base in the number format of `written`, and with its model where that is another one."""
    dtype = "dtype" if "dtype" in base else "torch_dtype"
    if _is_same_model(base, written):
        return base | {dtype: written["torch_dtype"]}
    is_other = base.get("architectures") != written["architectures"]
    kept = {key: base[key] for key in (TOKEN_IDS if is_other else base) if key in base}
    kept = {key: value for key, value in kept.items() if key not in (*REPLACED, dtype)}
    return kept | written


def _is_same_model(base: dict[str, Any], written: dict[str, Any]) -> bool:
    try:
        models = [model_from_config(config, name="model") for config in (base, written)]
    except MeshwrightError:
        return False
    return replace(models[0], unsupported=()) == replace(models[1], unsupported=())


def trained_positions(base: dict[str, Any], content: Content) -> int:
    """Return the largest of trained sequence length, RoPE-scaled context and the base's positions; 0: all unknown."""
    rope = content.shapes.rope
    scaled_context = int(rope.original_context * rope.factor)
    return max(positions_of(base) or 0, scaled_context, content.sequence_length or 0)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty without the file. Raises InputError where it is something else."""
    try:
        document = load_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} is no JSON object", got=type(document).__name__)
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
