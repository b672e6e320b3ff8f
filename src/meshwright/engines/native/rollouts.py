"""Completions that the model writes in training, with their rewards: the batches of `train.grpo`.

    prompts of the step's number                                     the same on all processes
    each process writes completions r, r + R, r + 2R, ... of R ranks and scores them
    completions, scores                                              one all-reduce: all processes have all of them
    advantages of the groups                                         each process takes the rows of its data rank

Completions depend on the weights, `train.seed` and the number of the step: a resumed training writes the same ones.
Where a process holds a part of the weights, it gathers them into a whole copy, which writes without communication.

N completions of a step, C tokens of the longest, V verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.generation import GenerationEnding, Sampling
from meshwright.specs.reinforcement import Reward
from meshwright.specs.run import Run
from meshwright.training.data.batches import batch_of
from meshwright.training.data.packing import Sample, answer_at, assemble
from meshwright.training.data.tokenizer import TurnEnd, turn_end
from meshwright.training.distributed_tensors import whole_tensor
from meshwright.training.generation import CachedModel, Completed, Prompt, complete_batch
from meshwright.training.generation.text import TextStream
from meshwright.training.models import Transformer, add_adapters, as_reference, build_model
from meshwright.training.models.reinforcement import advantages_of, token_weights
from meshwright.training.verifiers import Judged, scores


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptWithAnswer:
    """A prompt of the data, and the answer that it has."""

    tokens: list[int]
    text: str
    reference: str


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

    def batch(self, first: int) -> LoadedBatch:
        """The completions of step `first`, or those of the step before it for another update. Collective."""
        number = first // self.settings.iterations
        if self._last is None or number != self._number:
            self._last, self._number = self._written(number), number
        counts = self._last.counts
        now = BatchCounts(first=first, num_batches=1, num_labels=counts.num_labels, num_tokens=counts.num_tokens)
        return LoadedBatch(tensors=self._last.tensors, counts=now, rewards=self._last.rewards)

    def question(self, row: Sequence[int], labels: Sequence[int]) -> PromptWithAnswer:
        """The last answer of a sample and what comes before it. Labels are the next tokens, or `IGNORED_LABEL`."""
        is_trained_T = np.array(labels) != IGNORED_LABEL
        start, stop = answer_at(is_trained_T), len(labels) - int(is_trained_T[::-1].argmax())
        tokens, answer = list(row[: start + 1]), TextStream(self.tokenizer, stops=self.turn.stops)
        for label in labels[start:stop]:
            if label not in (self.tokenizer.end, *self.turn.tokens):
                answer.push(label)
        answer.finish()
        return PromptWithAnswer(tokens=tokens, text=self.tokenizer.decode(tokens), reference=answer.text)

    def _written(self, number: int) -> LoadedBatch:
        prompts = self.loader.prompts(number)
        rows = zip(prompts.tokens_BT.tolist(), prompts.labels_BT.tolist(), strict=True)
        questions = [asked for row in rows for asked in [self.question(*row)] * self.settings.group]
        tokens_NC, scores_NV, is_cut_N = self._completions(questions, number)
        lengths_N = (tokens_NC >= 0).sum(1)
        weights = torch.tensor([reward.weight for reward in self.settings.rewards], dtype=torch.float64)
        rewards_N = scores_NV @ weights
        advantages_N = advantages_of(self.settings, rewards_N)
        advantages_N2 = torch.stack([advantages_N, token_weights(self.settings, lengths_N.double())], dim=1).float()
        plan = self.where.plan
        num = len(questions) // plan.data
        own = range(self.where.data_rank * num, (self.where.data_rank + 1) * num)
        samples = [self._sample(questions[i].tokens, tokens_NC[i, : lengths_N[i]].tolist()) for i in own]
        tensors = self.loader.on_device(batch_of(samples))
        tensors["advantages_B2"] = advantages_N2[own.start : own.stop].to(self.where.device)
        if self.settings.iterations > 1:
            assert isinstance(self.stepper, Accumulation)  # pipelines are refused
            tensors["old_BT"] = self.stepper.scores(tensors, is_reference=False)
        num_tokens = float(sum(len(question.tokens) for question in questions) + lengths_N.sum() - len(questions))
        counts = BatchCounts(first=number, num_batches=1, num_labels=float(lengths_N.sum()), num_tokens=num_tokens)
        rewards = self._rewards(rewards_N, scores_NV, lengths_N, is_cut_N)
        return LoadedBatch(tensors=tensors, counts=counts, rewards=rewards)

    def _completions(self, questions: Sequence[PromptWithAnswer], number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [N, C], -1 behind the last; scores [N, V], fp64; whether the length has cut it [N]."""
        own = range(self.where.rank, len(questions), self.where.num_ranks)
        done = self._write([questions[i].tokens for i in own], [number * len(questions) + i for i in own])
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
        for column, reward in enumerate(rewards):
            found[list(own), width + 1 + column] = torch.tensor(scores(reward, judged), dtype=torch.float64)
        if self.where.num_ranks > 1:
            found = found.to(self.where.device)
            dist.all_reduce(found)
            found = found.cpu()
        return found[:, :width].long() - 1, found[:, width + 1 :], found[:, width]

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

    def _rewards(
        self, rewards_N: Tensor, scores_NV: Tensor, lengths_N: Tensor, is_cut_N: Tensor
    ) -> Mapping[str, float]:
        """Means over the completions of a step, as a record has them."""
        groups_XS = rewards_N.view(-1, self.settings.group)
        means = {
            "mean": rewards_N.mean(),
            "deviation": groups_XS.std(1).mean(),
            "length": lengths_N.double().mean(),
            "cut": is_cut_N.mean(),
            "equal_groups": (groups_XS == groups_XS[:, :1]).all(1).double().mean(),
        }
        of_verifiers = zip(_names(self.settings.rewards), scores_NV.mean(0), strict=True)
        return {name: mean.item() for name, mean in (*means.items(), *of_verifiers)}


def _names(rewards: Sequence[Reward]) -> list[str]:
    """Names of verifiers; those of one kind are numbered."""
    kinds = [reward.verifier.value for reward in rewards]
    return [
        f"score_{kind}" + (f"_{kinds[:i].count(kind) + 1}" if kinds.count(kind) > 1 else "")
        for i, kind in enumerate(kinds)
    ]
