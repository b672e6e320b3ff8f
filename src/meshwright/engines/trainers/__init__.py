"""Read configurations of trainers on PyTorch's FSDP and DeepSpeed. Imports no torch.

transformers and TRL, axolotl, LLaMA-Factory, torchtune, litgpt; accelerate and DeepSpeed beside them.
"""
