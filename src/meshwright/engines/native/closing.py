"""Results of a complete training besides its checkpoints: a sample of text, and trained adapters.

S tokens of the sequence, T tokens of it on this process, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.parallel.context import chunks_of
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.prepared import PreparedRun
from meshwright.specs.generation import Sampling
from meshwright.specs.run import Run
from meshwright.training.data.tokenizer import turn_end
from meshwright.training.generation import Sampler
from meshwright.training.generation.text import TextStream
from meshwright.training.weights import save_adapters

SAMPLE_TOKENS = 64
TEMPERATURE = 0.8


@torch.no_grad()
def generate_sample(
    logits_of: Callable[[Tensor], Tensor],
    *,
    coordinates: MeshCoordinates,
    prompt: Sequence[int],
    num_tokens: int,
    context: int,
    seed: int,
) -> list[int]:
    """Return `prompt` and `num_tokens` tokens after it. `logits_of` maps the last `context` tokens [1, T] to [1, T, V].

    All processes of a model take part, with the same `prompt`. Keys and values are not cached: a sample is short.
    Every process draws the same tokens.
    """
    chunks = chunks_of(coordinates)
    unit = coordinates.plan.tensor * (2 * coordinates.plan.context if coordinates.plan.context > 1 else 1)
    tokens, sampler = list(prompt), None
    for _ in range(num_tokens):
        seen = tokens[-context:]
        padding = [0] * (-len(seen) % unit)  # to whole chunks; causal attention never reaches it
        tokens_1S = torch.tensor([seen + padding], device=coordinates.device)
        order_T = chunks.order(tokens_1S.shape[1] // chunks.width, device=coordinates.device)
        logits_TV = logits_of(tokens_1S[:, order_T])[0].float()
        logits_V = logits_TV[order_T == len(seen) - 1].sum(dim=0)  # 0 on ranks without the last token
        if coordinates.context_mesh is not None:
            dist.all_reduce(logits_V, group=coordinates.context_mesh.get_group())
        sampler = sampler or Sampler(
            Sampling(temperature=TEMPERATURE, seed=seed), tokens=[prompt], numbers=[0], vocab=len(logits_V)
        )
        tokens += sampler.choose(logits_V.cpu().unsqueeze(0))
    return tokens


ADAPTER = "adapter"  # folder of trained LoRA adapters, in the folder of results


def sample_of(run: Run, *, assembly: Assembly, loader: BatchLoader, coordinates: MeshCoordinates) -> str | None:
    """Text that the trained model generates; None without a tokenizer. Collective."""
    tokenizer = loader.tokenizer
    if tokenizer is None or run.model.num_labels:
        return None
    assembly.eval_mode()
    prompt = loader.prompt()
    # A text grows, and compiled layers have one length.
    with torch.compiler.set_stance("force_eager") if run.train.compile else nullcontext():
        tokens = generate_sample(
            assembly.stepper.logits,
            coordinates=coordinates,
            prompt=prompt,
            num_tokens=SAMPLE_TOKENS,
            context=run.sequence_length,
            seed=run.train.seed,
        )
    if not loader.corpus.has_conversations:
        return tokenizer.decode(tokens)
    turn = turn_end(tokenizer)
    answer = TextStream(tokenizer, stops=turn.stops)
    for token in takewhile(lambda token: token not in (tokenizer.end, *turn.tokens), tokens[len(prompt) :]):
        answer.push(token)
    answer.finish()
    return tokenizer.decode(prompt) + answer.text


def write_adapters(prepared: PreparedRun, *, assembly: Assembly, is_main: bool) -> Path | None:
    """Write trained LoRA adapters to the folder of results; None: the run has none. Collective."""
    run, folder = prepared.run, prepared.options.folder / ADAPTER
    if run.lora is None:
        return None
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed
    base = prepared.weights and prepared.weights.name
    save_adapters(assembly.adapters(), folder, model=run.model, lora=run.lora, base=base)
    return folder
