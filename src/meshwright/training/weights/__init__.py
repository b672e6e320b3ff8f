"""Weights from and to Hugging Face safetensors, one tensor at a time."""

from __future__ import annotations

from meshwright.training.weights.adapter_beginnings import initial_adapters, plain_adapters
from meshwright.training.weights.adapters import adapter_sizes, adapters_of, load_adapters, read_lora, save_adapters
from meshwright.training.weights.config import config_of
from meshwright.training.weights.names import family_of, file_names
from meshwright.training.weights.origin import Origin, differences, find_description, find_weights, fingerprint
from meshwright.training.weights.reading import load_weights
from meshwright.training.weights.writing import save_weights
