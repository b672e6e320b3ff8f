"""Read configurations of Primus that Megatron-LM trains. Imports no torch."""
