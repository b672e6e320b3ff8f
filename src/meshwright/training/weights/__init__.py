"""Weights from and to Hugging Face safetensors, one tensor at a time.

names     names of our tensors in each family's files
config    the config.json of a model
safetensors_format   read slices, write without a copy
fusing    tensors of files that hold several of our tensors
reading   files into a model, whole or sharded
writing   a model into files
folder    folders that appear whole or not at all
origin    the folder that a run file means
adapters  LoRA adapters in PEFT's format
"""

from __future__ import annotations

from meshwright.training.weights.adapters import adapter_sizes, adapters_of, load_adapters, read_lora, save_adapters
from meshwright.training.weights.config import config_of
from meshwright.training.weights.names import family_of, file_names
from meshwright.training.weights.origin import Origin, differences, find_description, find_weights, fingerprint
from meshwright.training.weights.reading import load_weights
from meshwright.training.weights.writing import save_weights
