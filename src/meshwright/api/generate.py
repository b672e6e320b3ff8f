"""`meshwright.generate`: text from a trained model. Imports PyTorch when it is called."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.api import arguments
from meshwright.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from meshwright.answers.generation import Generation
    from meshwright.training.generation import Completed, Prompt, TextGenerator

DTYPES = ("fp32", "bf16", "fp16")
MAX_SEED = 2**63 - 1
MAX_BATCH = 4096

PromptLike = str | Sequence[Mapping[str, Any]]
"""A text to continue, or the messages of a conversation: [{"role": "user", "content": "Hello"}]."""


def generate(
    model: str | os.PathLike[str],
    prompts: PromptLike | Sequence[PromptLike],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    batch: int = 8,
    step: int | Literal["best"] | None = None,
    dtype: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    beyond_positions: bool = False,
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Continue prompts with a trained model, on this machine's accelerator or its CPU.

    Without a temperature the most probable token is taken, unless the model's generation_config.json says otherwise or
    a filter is given. The other settings of that file hold too, where they are not given.

    Args:
        model: run folder, run file, folder of checkpoints or one of them, Hugging Face folder, PEFT adapter, or
            OWNER/NAME[@REVISION] on the Hugging Face hub.
        prompts: a text, the messages of a conversation, or a list of such.
        max_tokens: most tokens of a completion. Default: 256, or what the model's positions leave room for.
        temperature: 0 takes the most probable token.
        top_k: draw from this many most probable tokens.
        top_p: draw from the most probable tokens that together have this probability.
        min_p: draw from tokens with at least this share of the largest probability.
        repetition_penalty: divide positive logits of tokens that are there already by this, multiply negative ones.
        seed: of the random streams, one for each prompt. Default: a new one, in `settings`.
        stop: texts before which a completion ends.
        batch: prompts that are completed at once.
        step: of the checkpoint; "best": that of the lowest validation loss. Default: the newest.
        dtype: fp32, bf16 or fp16. Default: as trained, or as the files are.
        tokenizer: another tokenizer: `bytes`, a tokenizer.json, its folder, OWNER/NAME on the hub.
        adapter: folder of a LoRA adapter to add to the weights.
        beyond_positions: allow more positions than the model is trained for.
        on_text: called with the number of a prompt and each new part of its completion.

    Returns:
        The completions in the order of the prompts, the settings, the times and the device.

    Raises:
        InputError: there is no such model, a setting is outside its range, or a prompt is too long.
        MissingDependencyError: PyTorch or a package that the files need is absent.

    Example:
        >>> import meshwright as mw
        >>> mw.generate("runs/first", "def main(", max_tokens=20).text  # doctest: +SKIP
        'self):'
    """
    requests = _requests(prompts)
    size = arguments.count("batch", batch, most=MAX_BATCH)
    generator, about = open_generator(
        model, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=stop, step=step, dtype=dtype, tokenizer=tokenizer,
        adapter=adapter, beyond_positions=beyond_positions,
    )  # fmt: skip
    return completions(generator, requests, batch=size, about=about, on_text=on_text)


def open_generator(
    model: str | os.PathLike[str],
    *,
    max_tokens: int | None,
    seed: int | None,
    stop: Sequence[str],
    step: int | Literal["best"] | None,
    dtype: str | None,
    tokenizer: str | os.PathLike[str] | None,
    adapter: str | os.PathLike[str] | None,
    beyond_positions: bool,
    **sampling: float | int | None,
) -> tuple[TextGenerator, tuple[str, ...]]:
    """The model with checked settings, and notes. Arguments and errors as in `generate`."""
    most = None if max_tokens is None else arguments.count("max_tokens", max_tokens)
    stops = _stops(stop)
    draws = secrets.randbits(31) if seed is None else arguments.count("seed", seed, least=0, most=MAX_SEED)
    for name, value in sampling.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(name, got=value, allowed="a number")
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "generation needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )
    from meshwright.training.generation import TextGenerator
    from meshwright.training.generation.settings import sampling_for
    from meshwright.training.trained_model import load_trained

    trained = load_trained(
        str(arguments.path("model", model)),
        step=arguments.checkpoint_step(step),
        dtype=None if dtype is None else arguments.choice("dtype", dtype, DTYPES),
        tokenizer=_optional("tokenizer", tokenizer),
        adapter=_optional("adapter", adapter),
    )
    chosen, notes = sampling_for(trained.generation, given=sampling, seed=draws)
    generator = TextGenerator(
        trained=trained,
        sampling=chosen,
        max_tokens=most,
        stops=stops,
        is_beyond=arguments.flag("beyond_positions", beyond_positions),
    )
    return generator, trained.notes + notes


def completions(
    generator: TextGenerator,
    requests: Sequence[PromptLike],
    *,
    batch: int,
    about: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    on_text: Callable[[int, str], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Generation:
    """The completions of `requests`. `about` are notes; `on_batch` is called with the size of each batch."""
    prompts = generator.prompts(requests)
    done = generator.answer(
        prompts,
        batch=batch,
        on_text=on_text,
        on_batch=None if on_batch is None else lambda d: on_batch(len(d)),
    )
    return as_generation(generator, requests, prompts, done, batch=batch, about=about, command=command)


def as_generation(
    generator: TextGenerator,
    requests: Sequence[PromptLike],
    prompts: Sequence[Prompt],
    done: Sequence[Completed],
    *,
    batch: int,
    about: tuple[str, ...],
    command: tuple[str, ...],
) -> Generation:
    """The result of requests that are completed."""
    from meshwright.answers.generation import Completion, Generation
    from meshwright.training import telemetry
    from meshwright.training.metrics import spread_of
    from meshwright.training.trained_model import model_document

    timing, trained = generator.timing, generator.trained
    lengths = [len(prompt.tokens) + len(c.tokens) for prompt, c in zip(prompts, done, strict=True)]
    if trained.positions is not None and (beyond := sum(length > trained.positions for length in lengths)):
        about += (f"{beyond} of {len(done)} texts go beyond the {trained.positions:,} trained positions",)
    return Generation(
        model=model_document(trained),
        settings=asdict(generator.sampling)
        | {"max_tokens": generator.max_tokens, "stop": list(generator.stops), "batch": batch},
        completions=tuple(
            Completion(
                prompt=request,
                text=completed.text,
                tokens=completed.tokens,
                num_prompt_tokens=len(prompt.tokens),
                ending=completed.ending,
            )
            for request, prompt, completed in zip(requests, prompts, done, strict=True)
        ),
        time_s={"first_token": spread_of(timing.first_s), "later_tokens": timing.decode_s},
        rates={"tokens_per_s": timing.tokens_per_s, "later_tokens": timing.later_tokens},
        device=telemetry.device_facts(trained.device, accelerator=None),
        software=telemetry.software_facts(),
        command=command,
        git_commit=telemetry.git_commit(Path.cwd()),
        notes=about,
    )


def _requests(prompts: object) -> list[Any]:
    """A list of prompts. One conversation is a list too, of messages."""
    if isinstance(prompts, str):
        return [prompts]
    found = arguments.items("prompts", prompts, example='["Once upon a time"]')
    if not found:
        raise InputError("prompts", got="none", allowed="at least one")
    if all(isinstance(item, Mapping) for item in found):
        return [found]
    for number, item in enumerate(found):
        is_messages = isinstance(item, list | tuple) and item and all(isinstance(m, Mapping) for m in item)
        if not isinstance(item, str) and not is_messages:
            raise InputError(
                f"prompts[{number}]", got=type(item).__name__, allowed="text, or a list of messages"
            )
    return found


def _stops(stop: object) -> tuple[str, ...]:
    found = arguments.items("stop", stop, example='["\\n\\n"]')
    for item in found:
        if not isinstance(item, str) or not item:
            raise InputError("stop", got=item, allowed="texts of at least one character")
    return tuple(found)


def _optional(name: str, value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else str(arguments.path(name, value))
