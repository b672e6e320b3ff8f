"""Positions that a model was trained for: a limit of the length of a request that its shapes do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.catalog.models import model_of_repository
from meshwright.files import toml_table
from meshwright.hub import is_hub_name
from meshwright.inference.formats import DATA
from meshwright.json_values import load_json
from meshwright.specs.model import Model


def trained_positions(name: str, model: Model) -> int | None:
    """Positions of the model that `name` names: those of its config.json, or the table's; None where neither says.

    >>> from meshwright import catalog
    >>> trained_positions("llama3-8b", catalog.model("llama3-8b"))
    8192
    """
    config = config_of(name)
    if config is None:
        return toml_table(DATA / "positions.toml").get(model.name)
    found = config.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else None


def config_of(name: str) -> dict[str, Any] | None:
    """The config.json that `name` names, a file, its folder or a repository of the hub; None for other names."""
    file = Path(name)
    if not file.exists() and is_hub_name(name) and model_of_repository(name) is None:
        from meshwright.catalog.huggingface import hub_folder

        file = hub_folder(name)
    file = file / "config.json" if file.is_dir() else file
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        found = load_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def positions_note(name: str, model: Model, tokens: int) -> str | None:
    """Caution for requests of `tokens` tokens, prompt and answer; None where they are within the positions."""
    positions = trained_positions(name, model)
    if positions is None or tokens <= positions:
        return None
    return (
        f"{tokens:,} tokens are more than the {positions:,} positions that {model.name} was trained for: engines "
        "refuse them unless positions are scaled"
    )
