"""The model as one of lm-evaluation-harness (EleutherAI), version 0.4: `lm_eval.simple_evaluate` on our forward pass.

Prefixes and pairs are encoded as in `choices`: they begin with the start token if the tokenizer has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import install_command
from meshwright.specs.generation import Sampling
from meshwright.training.data.conversations import Conversation
from meshwright.training.evaluation.choices import encode_pair, likelihoods
from meshwright.training.generation import TextGenerator
from meshwright.training.generation.settings import sampling_for
from meshwright.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from lm_eval.api.model import LM

Pair = tuple[Sequence[int], Sequence[int]]


def run_tasks(
    trained: TrainedModel,
    tasks: Sequence[str],
    *,
    folder: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    batch: int,
) -> dict[str, Any]:
    """Run tasks of the harness: its own tasks by name, or tasks in files of `folder`.

    Raises MissingDependencyError without `lm_eval`, InputError where a task is unknown or its data cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        raise MissingDependencyError(
            "tasks of lm-evaluation-harness need the package lm_eval", hint=install_command("evaluate")
        )
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise InputError("unknown task", got=unknown[0], hint="`lm_eval ls tasks` lists the harness's tasks")
    try:
        done: Any = simple_evaluate(
            model=harness_model(trained, batch=batch),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,  # for metrics whose error has no formula
            log_samples=False,
        )
    except (OSError, ValueError) as error:  # its data cannot be had: `datasets` raises all kinds below these
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"the tasks cannot be run: {reason}", got=", ".join(tasks)) from error
    return {
        "results": done["results"],
        "versions": done["versions"],
        "num_fewshot": done["n-shot"],
        "num_samples": done["n-samples"],
    }


def harness_model(trained: TrainedModel, *, batch: int) -> LM:
    """The model with the interface of the harness."""
    from lm_eval.api.model import LM

    tokenizer = trained.require_tokenizer()

    class HarnessModel(LM):
        """A trained model of Meshwright."""

        @property
        def tokenizer_name(self) -> str:
            return tokenizer.name.replace("/", "__")

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            conversation = Conversation(messages=chat_history)
            if add_generation_prompt:
                return tokenizer.chat.prompt(conversation)
            return tokenizer.chat.render(conversation).text

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            pairs = [encode_pair(tokenizer, *request.args) for request in requests]
            return [(found.total, found.is_greedy) for found in likelihoods(trained, pairs, batch=batch)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [_rolling(trained, request.args[0], batch=batch) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [_until(trained, *request.args) for request in requests]

    return HarnessModel()


def _rolling(trained: TrainedModel, text: str, *, batch: int) -> float:
    """Log-probability of a whole text in windows that do not overlap; the first token follows start or end token."""
    tokenizer = trained.require_tokenizer()
    ids = [int(i) for i in tokenizer.encode([text])[0]]
    before = [tokenizer.end if tokenizer.start is None else tokenizer.start]
    length = trained.positions or max(1, len(ids))
    pairs: list[Pair] = []
    for at in range(0, len(ids), length):
        pairs.append((before, ids[at : at + length]))
        before = ids[at + length - 1 : at + length]
    return sum(found.total for found in likelihoods(trained, pairs, batch=batch))


def _until(trained: TrainedModel, context: str, settings: dict[str, Any]) -> str:
    """The continuation of `context` until one of the texts that the task names."""
    until = settings.get("until") or ()
    names = ("temperature", "top_k", "top_p") if settings.get("do_sample") else ()
    sampling, _ = sampling_for({}, given={name: settings.get(name) for name in names}, seed=0)
    generator = TextGenerator(
        trained=trained,
        sampling=sampling if names else Sampling(),
        max_tokens=settings.get("max_gen_toks", 256),
        stops=(until,) if isinstance(until, str) else tuple(until),
    )
    try:
        (done,) = generator.answer(generator.prompts([context]))
    finally:
        generator.close()
    return done.text
