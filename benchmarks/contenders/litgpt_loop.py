"""litgpt's GPT and loss under Lightning Fabric, in the order of litgpt's own pre-training loop."""

from __future__ import annotations

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import load_file
from task import Steps, Task, read_task


def build(task: Task) -> GPT:
    m = task.model
    config = Config(
        name=task.folder.name,
        block_size=task.length,
        vocab_size=m["vocab"],
        padded_vocab_size=m["vocab"],
        n_layer=m["num_layers"],
        n_embd=m["hidden"],
        n_head=m["num_heads"],
        n_query_groups=m["num_kv_heads"],
        head_size=m["hidden"] // m["num_heads"],
        intermediate_size=m["ffn_hidden"],
        rotary_percentage=1.0,
        rope_base=int(m["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=m["norm_epsilon"],
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    state: dict[str, torch.Tensor] = {}
    hf = load_file(task.weights / "model.safetensors")
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"]
    copy_weights_hf_llama(config, {}, state, hf)
    model.load_state_dict(state, strict=True)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def train(task: Task) -> None:
    precision = "bf16-mixed" if task.precision == "bf16" else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    model = build(task)
    model = fabric.setup(torch.compile(model) if task.compile else model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **task.adamw(), fused=True))
    torch.set_num_threads(task.threads)
    tokens, labels = task.batches()
    steps = Steps(task)
    for step in range(task.steps):
        total = 0.0
        pairs = list(zip(tokens[step].split(task.micro), labels[step].split(task.micro), strict=True))
        for i, (tokens_BT, labels_BT) in enumerate(pairs):
            with fabric.no_backward_sync(model, enabled=i + 1 < len(pairs)):
                loss = chunked_cross_entropy(model(tokens_BT), labels_BT, chunk_size=0)
                fabric.backward(loss / len(pairs))
            total += float(loss.detach()) / len(pairs)
        fabric.clip_gradients(model, optimizer, max_norm=task.clip, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        steps.write(total)


if __name__ == "__main__":
    train(read_task())
