"""llama.cpp's scheduler inside this process, through xllamacpp: slots that share each batch, no connection, no HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from meshwright.bench.batch.engines import BatchTokens, EngineRequest, software_versions, whole_option
from meshwright.bench.serving.servers.gguf_file import gguf_of
from meshwright.bench.serving.servers.llamacpp import start
from meshwright.bench.serving.servers.served import gguf_config
from meshwright.errors import InputError

MOST_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class LlamaCppEngine:
    """A model of llama.cpp with `slots` requests in flight; the others wait."""

    server: Any
    slots: int
    context: int  # tokens of a slot
    vocabulary: int
    software: Mapping[str, str]

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> BatchTokens:
        """Answer the prompts. Raises InputError beyond the context of a slot, or for a request that fails."""
        longest = max(map(len, prompts)) + output_tokens
        if longest > self.context:
            raise InputError(
                "a request is longer than a slot's context", got=longest, allowed=f"1 to {self.context}",
                hint="--engine-option context=N",
            )  # fmt: skip

        def answered(prompt: Sequence[int]) -> tuple[int, int]:
            body = {
                "prompt": list(prompt), "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0,
                "cache_prompt": False, "stream": False,
            }  # fmt: skip
            usage = self.server.handle_completions(body).get("usage")
            if not isinstance(usage, dict):
                raise InputError("llama.cpp refuses a request of the batch")
            return usage["prompt_tokens"], usage["completion_tokens"]

        with ThreadPoolExecutor(self.slots) as pool:
            counts = list(pool.map(answered, prompts))
        return BatchTokens(
            input_tokens=sum(inputs for inputs, _ in counts),
            output_tokens=sum(outputs for _, outputs in counts),
            num_ok=len(counts),
            num_short=sum(outputs < output_tokens for _, outputs in counts),
        )


def load(request: EngineRequest) -> LlamaCppEngine:
    """Load a GGUF file, or a Hugging Face folder that is converted first."""
    dtype = request.options.get("dtype")
    path, _ = gguf_of(request.model, request.scratch, dtype=dtype, option="--engine-option dtype")
    config, _ = gguf_config(path)
    slots = whole_option(request.options, "parallel", min(MOST_SLOTS, request.most))
    context = whole_option(request.options, "context", min(request.longest, config["max_position_embeddings"]))
    threads = whole_option(request.options, "threads", len(os.sched_getaffinity(0)))
    return LlamaCppEngine(
        server=start(str(path), port=0, slots=slots, context=context, threads=threads), slots=slots, context=context,
        vocabulary=int(config["vocab_size"]), software=software_versions("xllamacpp"),
    )  # fmt: skip
