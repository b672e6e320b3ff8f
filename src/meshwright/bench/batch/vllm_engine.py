"""vLLM: `LLM.generate`, which schedules the whole batch itself (docs.vllm.ai, "LLM Class").

Prompts are token numbers, answers have exactly the asked length (`ignore_eos`). Options are arguments of `vllm.LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from meshwright.bench.batch.engines import BatchTokens, EngineRequest, software_versions
from meshwright.errors import InputError
from meshwright.json_values import parse_json


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """A model of vLLM."""

    vllm: Any  # the package
    llm: Any
    software: Mapping[str, str]

    @property
    def vocabulary(self) -> int:
        return len(self.llm.get_tokenizer())

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> BatchTokens:
        """Answer the prompts. Raises InputError for requests that vLLM refuses."""
        sampling = self.vllm.SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=output_tokens, min_tokens=output_tokens, detokenize=False
        )
        tokens = import_module("vllm.inputs").TokensPrompt
        try:
            answered = self.llm.generate(
                [tokens(prompt_token_ids=list(prompt)) for prompt in prompts], sampling, use_tqdm=False
            )
        except ValueError as error:
            line = " ".join(str(error).split())[:300]
            raise InputError(f"vLLM refuses the batch ({line})") from None
        lengths = [len(request.outputs[0].token_ids) for request in answered]
        return BatchTokens(
            input_tokens=sum(len(request.prompt_token_ids) for request in answered),
            output_tokens=sum(lengths),
            num_ok=len(answered),
            num_short=sum(length < output_tokens for length in lengths),
        )


def arguments_of(request: EngineRequest) -> dict[str, Any]:
    """Return arguments of `vllm.LLM`. Options are JSON values or else text; a key without value is true.

    >>> from pathlib import Path
    >>> asked = EngineRequest(
    ...     model="m", scratch=Path("."), options={"tensor-parallel-size": "2", "enforce-eager": ""}, longest=64, most=1
    ... )
    >>> arguments_of(asked)
    {'max_model_len': 64, 'tensor_parallel_size': 2, 'enforce_eager': True, 'model': 'm'}
    """
    found: dict[str, Any] = {"max_model_len": request.longest}
    for key, text in request.options.items():
        try:
            found[key.replace("-", "_")] = parse_json(text) if text else True
        except ValueError:
            found[key.replace("-", "_")] = text
    return found | {"model": request.model}


def load(request: EngineRequest) -> VllmEngine:
    """Load a model. Raises InputError for arguments that vLLM does not take."""
    vllm = import_module("vllm")
    try:
        llm = vllm.LLM(**arguments_of(request))
    except (TypeError, ValueError, OSError) as error:
        line = " ".join(str(error).split())[:300]
        raise InputError(f"vLLM cannot load the model ({line})", got=request.model) from None
    return VllmEngine(vllm=vllm, llm=llm, software=software_versions("vllm", "torch"))
