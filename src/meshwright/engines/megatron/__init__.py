"""Megatron-Core 0.16 behind the contract of `engines.base`. No part of it is patched; what it lacks is refused.

    contract   what the command line sees
    check      what Megatron-Core 0.16 cannot do of a run
    settings   a run as the arguments of Megatron's own constructors; `lower` writes them as a file
    arguments  the same as arguments of Megatron-LM's pretrain_gpt.py
    bridge     the same as a configuration of Megatron-Bridge
    importing  arguments of Megatron-LM as a run file: `options` reads them, a script by `shell`; `described` is the
               model, `divided` the plan, `sums` what they count
    bridge_importing  configurations of Megatron-Bridge as run files, read by `bridge_files`, in the same way
    probe      what Megatron finds on this machine, asked in a process of its own
    reading    what its processes leave behind; `engines.workers` starts them, `engines.outcome` makes the record
    names      what Megatron calls our tensors

In the processes of a training:

    worker     starts `training`, the loop
    layers     parts of Megatron's layers that stand in for Transformer Engine's
    model      GPTModel out of Megatron's own layers, its data parallelism and its distributed optimizer
    passes     batches in our order through Megatron's schedules
    weights    first weights, and those of Hugging Face safetensors
    states     Megatron's distributed checkpoints, whole or absent; `convert` writes them as safetensors
"""

VERSION = "0.16.1"
