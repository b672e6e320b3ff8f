"""Hugging Face transformers: `generate` with static batches, greedy, with exactly the requested number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.bench.batch.engines import BatchTokens, EngineRequest, software_versions, whole_option
from meshwright.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TransformersEngine:
    """A model of transformers. `batch` prompts are answered at once."""

    model: Any
    device: torch.device
    batch: int
    software: Mapping[str, str]

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> BatchTokens:
        """Answer the prompts, `batch` at a time. Raises InputError beyond the model's positions or its memory."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts)) + output_tokens
        if positions is not None and longest > positions:
            raise InputError("a request is longer than the model's positions", got=longest, allowed=f"1 to {positions}")
        made = num_short = 0
        for first in range(0, len(prompts), self.batch):
            chosen = torch.tensor(prompts[first : first + self.batch], device=self.device)
            try:
                answered = self.model.generate(
                    chosen, attention_mask=torch.ones_like(chosen), max_new_tokens=output_tokens,
                    min_new_tokens=output_tokens, do_sample=False, use_cache=True,
                )  # fmt: skip
            except torch.OutOfMemoryError:
                raise InputError(
                    "a batch does not fit in memory", got=len(chosen), hint="--engine-option batch=N for fewer at once"
                ) from None
            new = answered.shape[1] - chosen.shape[1]
            made += new * len(chosen)
            num_short += (new < output_tokens) * len(chosen)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return BatchTokens(
            input_tokens=sum(map(len, prompts)), output_tokens=made, num_ok=len(prompts), num_short=num_short
        )


def load(request: EngineRequest) -> TransformersEngine:
    """Load a model from its folder, or by a name that transformers resolves."""
    from transformers import AutoModelForCausalLM

    options = request.options
    dtype = options.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise InputError("--engine-option dtype", got=dtype, allowed=", ".join(DTYPES))
    if "threads" in options:
        torch.set_num_threads(whole_option(options, "threads", 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(  # without an answer it asks whether code may run, and waits
            request.model, dtype=DTYPES[dtype] if dtype else "auto", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(f"transformers cannot load the model ({line})", got=request.model) from None
    model.generation_config.eos_token_id = None  # answers have the asked length
    model.generation_config.pad_token_id = 0
    return TransformersEngine(
        model=model.to(device).eval(),
        device=device,
        batch=whole_option(options, "batch", request.most),
        software=software_versions("transformers", "torch"),
    )
