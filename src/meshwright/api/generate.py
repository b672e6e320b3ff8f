"""`meshwright.generate`: text from a trained model. Imports PyTorch when it is called."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwright.api import arguments
from meshwright.api import question as api
from meshwright.api.question import answered_by_body, question
from meshwright.errors import InputError
from meshwright.training.cpu_libraries import require_torch

if TYPE_CHECKING:
    from meshwright.answers.generation import Generation
    from meshwright.training.generation import Completed, Prompt, TextGenerator

MAX_SEED = 2**63 - 1
MAX_BATCH = 4096

PromptLike = str | Sequence[Mapping[str, Any]]
"""A text to continue, or the messages of a conversation: [{"role": "user", "content": "Hello"}]."""


MODEL = api.AnyName(
    "Run folder, run file, folder of checkpoints or one of them, Hugging Face folder, PEFT adapter, or "
    "OWNER/NAME[@REVISION] on the Hugging Face hub."
)
STEP = api.Step("Step of the checkpoint, or `best`: the step with the lowest validation loss.", unset="the newest")
DTYPE = api.OneOf("Number format.", unset="as trained, or as the files are", values=("fp32", "bf16", "fp16"))
TOKENIZER = api.AnyName("Another tokenizer: `bytes`, a tokenizer.json, its folder, OWNER/NAME.")
ADAPTER = api.Folders(
    "LoRA adapter to add to the weights, or the run that trained it. Several have names: each answers.",
    metavar="[NAME=]FOLDER",
)
AdapterLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@question("meshwright.api.generate:generated")
def generate(
    model: Annotated[str | os.PathLike[str], MODEL],
    prompts: Annotated[
        PromptLike | Sequence[PromptLike], api.Hook("A text, the messages of a conversation, or a list of such.")
    ],
    *,
    max_tokens: Annotated[
        int | None, api.Count("Most tokens of a completion.", unset="256, or what the trained positions leave room for")
    ] = None,
    temperature: Annotated[
        float | None, api.Number("0 takes the most probable token.", unset="the model's, or 0", metavar="T")
    ] = None,
    top_k: Annotated[
        int | None, api.Count("Draw from the K most probable tokens; 0: from all.", low=0, metavar="K")
    ] = None,
    top_p: Annotated[
        float | None, api.Number("Draw from the most probable tokens that together have P.", metavar="P")
    ] = None,
    min_p: Annotated[
        float | None, api.Number("Draw from tokens with at least P times the largest probability.", metavar="P")
    ] = None,
    repetition_penalty: Annotated[
        float | None, api.Number("Above 1 makes tokens that are there already less probable.", metavar="R")
    ] = None,
    seed: Annotated[
        int | None, api.Count("Seed of the random streams.", unset="a new one, in the settings", low=0, high=MAX_SEED)
    ] = None,
    stop: Annotated[Sequence[str], api.PlainText("Text before which a completion ends.")] = (),
    batch: Annotated[int, api.Count("Prompts that are completed at once.", high=MAX_BATCH)] = 8,
    step: Annotated[int | Literal["best"] | None, STEP] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    tokenizer: Annotated[str | os.PathLike[str] | None, TOKENIZER] = None,
    adapter: Annotated[AdapterLike | None, ADAPTER] = None,
    beyond_positions: Annotated[bool, api.Flag("Allow more positions than the model is trained for.")] = False,
    on_text: Annotated[
        Callable[[int, str], None] | None,
        api.Hook("Called with the number of a prompt and each new part of its completion."),
    ] = None,
) -> Generation:
    """Continue prompts with a trained model, on this machine's accelerator or its CPU.

    Without a temperature the most probable token is taken, unless the model's generation_config.json says otherwise or
    a filter is given. The other settings of that file hold too, where they are not given.

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
    return answered_by_body()


def generated(
    *, prompts: object, batch: int, on_text: Callable[[int, str], None] | None, **settings: Any
) -> Generation:
    """The answer to `generate`."""
    requests = _requests(prompts)
    generator, about = open_generator(**settings)
    return completions(generator, requests, batch=batch, about=about, on_text=on_text)


def open_generator(
    *,
    model: str,
    max_tokens: int | None,
    seed: int | None,
    stop: Sequence[str],
    step: int | Literal["best"] | None,
    dtype: str | None,
    tokenizer: str | None,
    adapter: Sequence[Path] | None,
    beyond_positions: bool,
    **sampling: float | int | None,
) -> tuple[TextGenerator, tuple[str, ...]]:
    """The model with its settings, and notes. Arguments as `generate` checks them."""
    require_torch("generation")
    from meshwright.training.generation import TextGenerator
    from meshwright.training.generation.settings import sampling_for
    from meshwright.training.trained_model import load_trained

    trained = load_trained(model, step=step, dtype=dtype, tokenizer=tokenizer, adapter=adapter)
    draws = secrets.randbits(31) if seed is None else seed
    chosen, notes = sampling_for(trained.generation, given=sampling, seed=draws)
    generator = TextGenerator(
        trained=trained, sampling=chosen, max_tokens=max_tokens, stops=tuple(stop), is_beyond=beyond_positions
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
    from meshwright.training.generation.requests import notes_on_spaces

    prompts = generator.prompts(requests)
    about += notes_on_spaces(requests, generator.tokenizer)
    done: list[Completed] = []
    adapters = generator.trained.adapters
    for name in adapters.names if adapters else (None,):
        generator.use_adapter(name)
        done += generator.answer(
            prompts, batch=batch, on_text=on_text, on_batch=None if on_batch is None else lambda d: on_batch(len(d))
        )
    times = len(done) // len(prompts)
    return as_generation(
        generator, [*requests] * times, prompts * times, done, batch=batch, about=about, command=command
    )


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
                adapter=completed.adapter,
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
            raise InputError(f"prompts[{number}]", got=type(item).__name__, allowed="text, or a list of messages")
    return found
