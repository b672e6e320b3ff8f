"""Results of a complete training besides its checkpoints: a sample of text, and trained adapters."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import torch

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.generation import SAMPLE_TOKENS, generate_sample
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.prepared import PreparedRun
from meshwright.specs.run import Run
from meshwright.training.weights import save_adapters

ADAPTER = "adapter"  # folder of trained LoRA adapters, in the folder of results


def sample_of(run: Run, *, assembly: Assembly, loader: BatchLoader, coordinates: MeshCoordinates) -> str | None:
    """Text that the trained model generates; None without a tokenizer. Collective."""
    if loader.tokenizer is None:
        return None
    assembly.eval_mode()
    # A text grows, and compiled layers have one length.
    with torch.compiler.set_stance("force_eager") if run.train.compile else nullcontext():
        tokens = generate_sample(
            assembly.stepper.logits,
            coordinates=coordinates,
            prompt=loader.prompt(),
            num_tokens=SAMPLE_TOKENS,
            context=run.sequence_length,
            seed=run.train.seed,
        )
    return loader.tokenizer.decode(tokens)


def write_adapters(prepared: PreparedRun, *, assembly: Assembly, is_main: bool) -> Path | None:
    """Write trained LoRA adapters to the folder of results; None: the run has none. Collective."""
    run, folder = prepared.run, prepared.options.folder / ADAPTER
    if run.lora is None:
        return None
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed
    base = prepared.weights and prepared.weights.name
    save_adapters(assembly.trained(), folder, model=run.model, lora=run.lora, base=base)
    return folder
