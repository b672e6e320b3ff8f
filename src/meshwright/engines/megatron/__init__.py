"""The megatron engine: Megatron-Core 0.16, unpatched. Runs that it does not support are refused.

contract       the functions that `engines.base` requires
facts          the facts that the planner uses
check          the parts of a run that Megatron-Core 0.16 does not support
lower          a run as files for Megatron's processes, for Megatron-LM and for Megatron-Bridge
exporting      checkpoints as Hugging Face weights
worker         a process of a training: starts the training loop
probe          devices and versions, detected in a separate process

megatron_core          a run as arguments of Megatron-Core's constructors; names of its tensors
megatron_lm            options of `pretrain_gpt.py`, written and read
megatron_bridge        configurations of Megatron-Bridge, written and read
primus                 configurations of Primus, read
shell_scripts          scripts that call Megatron-LM, read without running them
in_megatron_process    code that imports Megatron: model, training loop, checkpoints
"""

VERSION = "0.16.1"
