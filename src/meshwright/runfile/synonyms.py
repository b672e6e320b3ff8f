"""Keys of the run file by the names that other tools give them: PyTorch, Megatron, DeepSpeed, Hugging Face.

Used in hints alone: a run file is written with our keys.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.files import toml_table

_TABLES = toml_table(Path(__file__).with_suffix(".toml"))

SYNONYMS = {name: key for key, names in _TABLES["keys"].items() for name in names}
"""Name elsewhere -> key of the run file."""

LORA_TARGETS = {name: ours for ours, names in _TABLES["lora_targets"].items() for name in names}
"""Matrix in PEFT, Llama's code or Megatron -> word of `lora.targets`."""

_REASON = (
    "no engine trains on without a lost replica: after a fault all processes restart from the newest checkpoint "
    "(`meshwright train --max-restarts N`, and `train.checkpoint`)"
)
_NAMES_OF_IT = ["torchft", "fault_tolerance", "ft", "elastic", "min_replicas", "min_replica_size"]
UNSUPPORTED = dict.fromkeys(_NAMES_OF_IT, _REASON)
"""Keys of other tools that have no counterpart, with the reason."""


def key_for(name: str) -> str | None:
    """The key of the run file that other tools call `name`, in any case and with - or _; None if there is none.

    >>> key_for("micro-batch-size")
    'batch.micro'
    """
    return SYNONYMS.get(name.lower().replace("-", "_"))
