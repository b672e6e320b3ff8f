"""Completions that the model writes in training, with their rewards: the batches of `train.grpo`.

    prompts of the step's number                                     the same on all processes
    each process writes completions r, r + R, r + 2R, ... of R ranks and scores them
    completions, scores                                              one all-reduce: all processes have all of them
    advantages of the groups                                         each process takes the rows of its data rank

Completions depend on the weights, `train.seed` and the number of the step: a resumed training writes the same ones.
A validation writes one to each held-out prompt, with the same random numbers in every evaluation.
Where a process holds a part of the weights, it gathers them into a whole copy, which writes without communication.

N completions of a step, C tokens of the longest, V verifiers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.assembly import COMPUTE, Assembly
from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch
from meshwright.engines.native.data_position import BatchCounts
from meshwright.engines.native.parallel.fsdp import needs_fsdp
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.step import Accumulation
from meshwright.engines.native.validation import ValidationLosses
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.generation import GenerationEnding, Sampling
from meshwright.specs.reinforcement import Reward
from meshwright.specs.run import Run
from meshwright.training.data.batches import Batch, batch_of
from meshwright.training.data.packing import Sample, answer_at, assemble
from meshwright.training.data.tokenizer import TurnEnd, turn_end
from meshwright.training.distributed_tensors import whole_tensor
from meshwright.training.generation import CachedModel, Completed, Prompt, complete_batch
from meshwright.training.generation.text import TextStream
from meshwright.training.models import Transformer, add_adapters, as_reference, build_model
from meshwright.training.models.reinforcement import advantages_of, token_weights
from meshwright.training.verifiers import Judged, scores

FIRST_OF_VALIDATION = 2**48
"""Number of the first completion of a validation, beyond those of training."""
MAX_SHOWN, MAX_CHARACTERS = 8, 2000
"""Completions in a line of the step log, and characters of each text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptWithAnswer:
    """A prompt of the data, and the answer that it has."""

    tokens: list[int]
    text: str
    reference: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """Completions of all processes."""

    questions: Sequence[PromptWithAnswer]
    tokens_NC: Tensor  # -1 behind the last
    scores_NV: Tensor  # fp64
    rewards_N: Tensor
    is_cut_N: Tensor  # the length has ended it
    lengths_N: Tensor

    def tokens(self, place: int) -> list[int]:
        """Tokens of one."""
        return self.tokens_NC[place, : self.lengths_N[place]].tolist()

    def means(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Means over all, as a record has them."""
        means = {"mean": self.rewards_N, "length": self.lengths_N.double(), "cut": self.is_cut_N}
        means |= zip(_names(rewards), self.scores_NV.T, strict=True)
        return {name: values_N.mean().item() for name, values_N in means.items()}


class Rollouts:
    """Writes and scores the completions of steps."""

    def __init__(self, run: Run, *, assembly: Assembly, loader: BatchLoader, coordinates: MeshCoordinates) -> None:
        assert run.train.grpo is not None
        assert loader.tokenizer is not None
        self.run, self.settings, self.loader, self.where = run, run.train.grpo, loader, coordinates
        self.module, self.stepper, self.tokenizer = assembly.modules[0], assembly.stepper, loader.tokenizer
        self.turn = turn_end(self.tokenizer) if loader.corpus.has_conversations else TurnEnd()
        self._copy: Transformer | None = None  # whole, where `module` is a part
        self._number = -1
        self._last: LoadedBatch | None = None
        self.shown: list[dict[str, Any]] = []  # some of the completions that were written last

    def batch(self, first: int) -> LoadedBatch:
        """The completions of step `first`, or those of the step before it for another update. Collective."""
        number = first // self.settings.iterations
        if self._last is None or number != self._number:
            self._last, self._number = self._step(number), number
        counts = self._last.counts
        now = BatchCounts(first=first, num_batches=1, num_labels=counts.num_labels, num_tokens=counts.num_tokens)
        return LoadedBatch(tensors=self._last.tensors, counts=now, rewards=self._last.rewards)

    def question(self, row: Sequence[int], labels: Sequence[int]) -> PromptWithAnswer:
        """The last answer of a sample and what comes before it. Labels are the next tokens, or `IGNORED_LABEL`."""
        is_trained_T = np.array(labels) != IGNORED_LABEL
        start, stop = answer_at(is_trained_T), len(labels) - int(is_trained_T[::-1].argmax())
        tokens = list(row[: start + 1])
        text = self.tokenizer.decode(tokens)
        return PromptWithAnswer(tokens=tokens, text=text, reference=self._text(labels[start:stop]))

    def validation(self, *, best_by: str, before_batch: Callable[[], None]) -> ValidationLosses:
        """The mean reward of each source of prompts; losses are its negative, so that lower is better. Collective."""
        sums: dict[str, dict[str, float]] = {}
        counts: dict[str, int] = {}
        shown: list[dict[str, Any]] = []
        for name, num_batches in self.loader.num_validation_batches.items():
            sums[name], counts[name] = defaultdict(float), 0
            for index in range(num_batches):
                before_batch()
                questions = self._questions(self.loader.validation_prompts(name, index), times=1)
                written = self._written(questions, FIRST_OF_VALIDATION + index * self.run.global_batch)
                shown += self._shown(written)
                for key, mean in written.means(self.settings.rewards).items():
                    sums[name][key] += mean * len(questions)
                counts[name] += len(questions)
        self.shown = shown[:MAX_SHOWN]
        num = sum(counts.values())
        rewards = {key: sum(of[key] for of in sums.values()) / num for key in next(iter(sums.values()))}
        by_source = {name: -of["mean"] / counts[name] for name, of in sums.items()}
        return ValidationLosses(by_source=by_source, mean=-rewards["mean"], best_by=best_by, rewards=rewards)

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of an answer without the marks of its end."""
        answer = TextStream(self.tokenizer, stops=self.turn.stops)
        for token in tokens:
            if token not in (self.tokenizer.end, *self.turn.tokens):
                answer.push(token)
        answer.finish()
        return answer.text

    def _questions(self, prompts: Batch, *, times: int) -> list[PromptWithAnswer]:
        """Each prompt so often; none of a row of padding."""
        rows = zip(prompts.tokens_BT.tolist(), prompts.labels_BT.tolist(), strict=True)
        asked = [self.question(*row) for row in rows if any(label != IGNORED_LABEL for label in row[1])]
        return [question for question in asked for _ in range(times)]

    def _shown(self, written: Written) -> list[dict[str, Any]]:
        """Some completions of different prompts for the step log."""
        num = len(written.questions)
        return [
            {
                "prompt": asked.text[-MAX_CHARACTERS:],
                "completion": self._text(written.tokens(place))[:MAX_CHARACTERS],
                "reference": asked.reference[:MAX_CHARACTERS],
                "reward": written.rewards_N[place].item(),
            }
            for place in range(0, num, -(-num // MAX_SHOWN))
            for asked in [written.questions[place]]
        ]

    def _step(self, number: int) -> LoadedBatch:
        questions = self._questions(self.loader.prompts(number), times=self.settings.group)
        written = self._written(questions, number * len(questions))
        self.shown, lengths_N = self._shown(written), written.lengths_N
        advantages_N = advantages_of(self.settings, written.rewards_N)
        advantages_N2 = torch.stack([advantages_N, token_weights(self.settings, lengths_N.double())], dim=1).float()
        plan = self.where.plan
        num = len(questions) // plan.data
        own = range(self.where.data_rank * num, (self.where.data_rank + 1) * num)
        samples = [self._sample(questions[i].tokens, written.tokens(i)) for i in own]
        tensors = self.loader.on_device(batch_of(samples))
        tensors["advantages_B2"] = advantages_N2[own.start : own.stop].to(self.where.device)
        if self.settings.iterations > 1:
            assert isinstance(self.stepper, Accumulation)  # pipelines are refused
            tensors["old_BT"] = self.stepper.scores(tensors, is_reference=False)
        num_tokens = float(sum(len(question.tokens) for question in questions) + lengths_N.sum() - len(questions))
        counts = BatchCounts(first=number, num_batches=1, num_labels=float(lengths_N.sum()), num_tokens=num_tokens)
        rewards = {**written.means(self.settings.rewards), **self._of_groups(written.rewards_N)}
        return LoadedBatch(tensors=tensors, counts=counts, rewards=rewards)

    def _written(self, questions: Sequence[PromptWithAnswer], first: int) -> Written:
        """Write and score a completion to each; `first` is the number of the first."""
        own = range(self.where.rank, len(questions), self.where.num_ranks)
        done = self._write([questions[i].tokens for i in own], [first + i for i in own])
        judged = [
            Judged(prompt=questions[i].text, completion=one.text, reference=questions[i].reference,
                   num_tokens=len(one.tokens))
            for i, one in zip(own, done, strict=True)
        ]  # fmt: skip
        rewards = self.settings.rewards
        width = self.settings.completion_tokens
        found = torch.zeros(len(questions), width + 1 + len(rewards), dtype=torch.float64)
        for i, one in zip(own, done, strict=True):
            found[i, : len(one.tokens)] = torch.tensor(one.tokens, dtype=torch.float64) + 1
            found[i, width] = one.ending is GenerationEnding.MAX_TOKENS
        for column, reward in enumerate(rewards if done else ()):
            found[list(own), width + 1 + column] = torch.tensor(scores(reward, judged), dtype=torch.float64)
        if self.where.num_ranks > 1:
            found = found.to(self.where.device)
            dist.all_reduce(found)
            found = found.cpu()
        scores_NV = found[:, width + 1 :]
        weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
        return Written(
            questions=questions, tokens_NC=found[:, :width].long() - 1, lengths_N=(found[:, :width] > 0).sum(1),
            scores_NV=scores_NV, rewards_N=scores_NV @ weights, is_cut_N=found[:, width],
        )  # fmt: skip

    def _write(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Completed]:
        s = self.settings
        ends, stops = (self.tokenizer.end, *self.turn.tokens), self.turn.stops
        asked = [
            Prompt(number=number, tokens=prompt, max_tokens=s.completion_tokens, ends=ends, stops=stops)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        sampling = Sampling(
            temperature=s.temperature, top_k=s.top_k, top_p=None if s.top_p == 1 else s.top_p, seed=self.run.train.seed
        )
        model = self._whole()
        if not asked:  # there are more processes than prompts
            return []
        with as_reference(model, adapters=()), CachedModel(model) as cached:
            return complete_batch(cached, asked, sampling=sampling, tokenizer=self.tokenizer)

    def _whole(self) -> Transformer:
        """The model with all weights as they are now, on this process's device. Collective where it is divided."""
        if self.where.plan.tensor == 1 and not needs_fsdp(self.where.plan):
            return self.module
        if self._copy is None:
            self._copy = build_model(self.run.model, dtype=COMPUTE[self.run.precision.name])
            if self.run.lora is not None:
                add_adapters(self._copy, self.run.lora)
            self._copy.to_empty(device=self.where.device)
        kept = self._copy.state_dict()
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                kept[name].copy_(whole_tensor(tensor))
        return self._copy

    def _sample(self, prompt: list[int], completion: list[int]) -> Sample:
        tokens_N = np.array([*prompt, *completion])
        is_written_N = np.arange(len(tokens_N)) >= len(prompt)
        return assemble(tokens_N, is_written_N, np.zeros(1, np.int64), length=self.run.sequence_length)

    def _of_groups(self, rewards_N: Tensor) -> Mapping[str, float]:
        groups_XS = rewards_N.view(-1, self.settings.group)
        is_equal_X = (groups_XS == groups_XS[:, :1]).all(1).double()
        return {"deviation": groups_XS.std(1).mean().item(), "equal_groups": is_equal_X.mean().item()}


def _names(rewards: Sequence[Reward]) -> list[str]:
    """Names of verifiers; those of one kind are numbered."""
    kinds = [reward.verifier.value for reward in rewards]
    return [
        f"score_{kind}" + (f"_{kinds[:i].count(kind) + 1}" if kinds.count(kind) > 1 else "")
        for i, kind in enumerate(kinds)
    ]
