"""Write and read the options of Megatron-LM's `pretrain_gpt.py`. Imports no torch."""
