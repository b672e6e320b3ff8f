"""Read configurations of trainers on PyTorch's FSDP and DeepSpeed. Imports no torch.

transformers and TRL, axolotl, LLaMA-Factory, torchtune, litgpt, oumi, NeMo AutoModel; accelerate and DeepSpeed beside
them.
"""
