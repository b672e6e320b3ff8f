"""Read shell scripts that call Megatron-LM without running them."""
