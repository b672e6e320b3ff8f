"""A Llama and its training loop in plain PyTorch, without a framework. Started by `train_cpu`.

fp32 trains the parameters themselves. bf16 keeps bf16 parameters that compute and fp32 masters that AdamW moves,
gradients of micro-batches accumulated in fp32. The passes have no casts, unlike autocast.

B sequences, T tokens, D hidden, H query heads, G key/value heads, K width of a head.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from task import Steps, Task, read_task
from torch import Tensor, nn
from torch.nn import functional


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-right, left), dim=-1) * sin_TK


class Attention(nn.Module):
    def __init__(self, m: dict) -> None:
        super().__init__()
        self.width = m["hidden"] // m["num_heads"]
        self.q_proj = nn.Linear(m["hidden"], m["num_heads"] * self.width, bias=False)
        self.k_proj = nn.Linear(m["hidden"], m["num_kv_heads"] * self.width, bias=False)
        self.v_proj = nn.Linear(m["hidden"], m["num_kv_heads"] * self.width, bias=False)
        self.o_proj = nn.Linear(m["num_heads"] * self.width, m["hidden"], bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q, k, v = (
            p(x_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, m: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(m["hidden"], m["ffn_hidden"], bias=False)
        self.up_proj = nn.Linear(m["hidden"], m["ffn_hidden"], bias=False)
        self.down_proj = nn.Linear(m["ffn_hidden"], m["hidden"], bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    def __init__(self, m: dict) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(m["hidden"], eps=m["norm_epsilon"])
        self.self_attn = Attention(m)
        self.post_attention_layernorm = nn.RMSNorm(m["hidden"], eps=m["norm_epsilon"])
        self.mlp = FeedForward(m)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Llama(nn.Module):
    """Parameters are named as Hugging Face names them."""

    def __init__(self, m: dict, *, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(m["vocab"], m["hidden"])
        self.layers = nn.ModuleList(Layer(m) for _ in range(m["num_layers"]))
        self.norm = nn.RMSNorm(m["hidden"], eps=m["norm_epsilon"])
        width = m["hidden"] // m["num_heads"]
        angle_TJ = torch.outer(
            torch.arange(length).float(), m["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
        )
        angle_TK = torch.cat((angle_TJ, angle_TJ), dim=-1)
        self.register_buffer("cos_TK", angle_TK.cos(), persistent=False)
        self.register_buffer("sin_TK", angle_TK.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """The mean loss. The head is the embedding."""
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos_TK, self.sin_TK)
        logits_BTV = functional.linear(self.norm(x_BTD), self.embed_tokens.weight)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def train(task: Task) -> None:
    torch.set_float32_matmul_precision("high")
    model = Llama(task.model, length=task.length)
    state = load_file(task.weights / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    parameters = list(model.parameters())
    masters = parameters
    if task.precision == "bf16":
        masters = [p.detach().clone() for p in parameters]
        model.bfloat16()
        for master in masters:
            master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, **task.adamw(), fused=True)
    run = torch.compile(model) if task.compile else model
    tokens, labels = task.batches()
    steps = Steps(task)
    for step in range(task.steps):
        total = 0.0
        for tokens_BT, labels_BT in zip(tokens[step].split(task.micro), labels[step].split(task.micro), strict=True):
            loss = run(tokens_BT, labels_BT) / task.num_micro_batches
            loss.backward()
            total += loss.detach()
            if masters is not parameters:
                torch._foreach_add_([m.grad for m in masters], [p.grad for p in parameters])
                for p in parameters:
                    p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, task.clip)
        optimizer.step()
        if masters is not parameters:
            torch._foreach_copy_([p.data for p in parameters], masters)
            torch._foreach_zero_([m.grad for m in masters])
        else:
            optimizer.zero_grad(set_to_none=True)
        steps.write(float(total))


if __name__ == "__main__":
    train(read_task())
