"""Sampling settings: the caller's, over the settings of the model's generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.generation import Sampling

FILTERS = ("top_k", "top_p", "min_p")
SETTINGS = ("temperature", *FILTERS, "repetition_penalty")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "num_beams": (1,),
    "num_return_sequences": (1,), "guidance_scale": (1.0,), "min_length": (0,), "min_new_tokens": (0,),
    "bad_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({},),
    "penalty_alpha": (0.0,), "stop_strings": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "dola_layers": (), "watermarking_config": (), "max_time": (),
    "renormalize_logits": (), "remove_invalid_values": (), "top_h": (), "token_healing": (),
}  # fmt: skip
"""Keys of a generation_config.json that change a text, and their values that do not; null and false never do."""


def sampling_for(
    generation: Mapping[str, Any], *, given: Mapping[str, float | int | None], seed: int
) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling settings, and notes on generation_config.json.

    `given` has the caller's values of `SETTINGS`, None where the caller sets none. Without a temperature the
    most probable token is chosen, unless generation_config.json has `do_sample`, or a filter is given. Raises
    InputError for values outside their range, and for filters at temperature 0.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("temperature") == 0 and (idle := [name for name in FILTERS if name in given]):
        raise InputError(
            f"temperature 0 always takes the most probable token: {' and '.join(idle)} would do nothing",
            hint="give a temperature above 0, or leave the filter out",
        )
    named = _of_config(generation)
    settings: dict[str, Any] = {"temperature": 1.0 if any(name in given for name in FILTERS) else 0.0} | named | given
    if settings["temperature"] == 0:
        settings = {name: value for name, value in settings.items() if name not in FILTERS}
    for name, value in settings.items():
        _require(name, value, where="" if name in given else "generation_config.json: ")
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values: dict[str, Any] = {name: None if value == neutral.get(name) else value for name, value in settings.items()}
    applied = ", ".join(f"{name} {values[name]:g}" for name in named if values.get(name) and name not in given)
    notes = [f"as generation_config.json says: {applied}"] if applied else []
    ignored = [key for key in NEUTRAL if generation.get(key) not in (None, False, *NEUTRAL[key])]
    notes += [f"generation_config.json: {key} {generation[key]!r} is not applied" for key in ignored]
    return Sampling(**values, seed=seed), tuple(notes)


def _of_config(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that transformers would take from a generation_config.json."""
    is_sampled = generation.get("do_sample") is True
    names = SETTINGS if is_sampled else ("repetition_penalty",)
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    if is_sampled:
        found.setdefault("temperature", 1.0)
    return {name: value for name, value in found.items() if (name, value) != ("repetition_penalty", 1.0)}


def _require(name: str, value: Any, *, where: str) -> None:
    """Raise InputError where a setting is outside its range."""
    ranges = {
        "temperature": (lambda v: v >= 0, "0, or a number above"),
        "top_k": (lambda v: v >= 0 and v == int(v), "a whole number above 0, or 0 for all tokens"),
        "top_p": (lambda v: 0 < v <= 1, "above 0, to 1"),
        "min_p": (lambda v: 0 <= v <= 1, "0 to 1"),
        "repetition_penalty": (lambda v: v > 0, "above 0; 1 is none"),
    }
    is_inside, allowed = ranges[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_inside(value):
        raise InputError(f"{where}{name}", got=value, allowed=allowed)
