"""A package with the names of vLLM that the adaptor uses, for machines without it.

Names and arguments are those of github:vllm-project/vllm vllm/benchmarks/throughput.py, vllm/entrypoints/llm.py,
vllm/sampling_params.py, vllm/inputs and vllm/outputs.py. Requests of 13 prompt tokens end the process, of 14 raise.
"""

from __future__ import annotations

from pathlib import Path

SECONDS = 0.3
PACKAGE = f"""
import os, sys, time

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens, min_tokens, detokenize):
        assert ignore_eos and temperature == 0.0 and not detokenize
        self.max_tokens, self.min_tokens = max_tokens, min_tokens

class CompletionOutput:
    def __init__(self, count):
        self.token_ids = list(range(count))

class RequestOutput:
    def __init__(self, prompt_token_ids, count):
        self.prompt_token_ids, self.outputs = prompt_token_ids, [CompletionOutput(count)]

class LLM:
    def __init__(self, model, *, max_model_len, tensor_parallel_size=1, enforce_eager=False):
        if model == "missing":
            raise OSError("no such model")
        self.max_model_len = max_model_len
        print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), "tensor", tensor_parallel_size)

    def get_tokenizer(self):
        return ["token"] * 100

    def generate(self, prompts, sampling_params, *, use_tqdm):
        lengths = {{len(p["prompt_token_ids"]) for p in prompts}}
        if 13 in lengths:
            print("the driver is gone")
            sys.stdout.flush()
            os._exit(7)
        if 14 in lengths:
            raise ValueError("prompt is longer than the maximum model length")
        if 15 in lengths:
            raise RuntimeError("CUDA error")
        time.sleep({SECONDS} if len(prompts) > 1 else 0)
        return [RequestOutput(p["prompt_token_ids"], sampling_params.max_tokens) for p in prompts]
"""
INPUTS = """
class TokensPrompt(dict):
    pass
"""


def write_fake_vllm(folder: Path) -> Path:
    """Write the package with its metadata, and return the folder for PYTHONPATH."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(PACKAGE)
    (folder / "vllm" / "inputs.py").write_text(INPUTS)
    (folder / "vllm-0.0.1.dist-info").mkdir()
    (folder / "vllm-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n")
    return folder
