"""The label of a token that the loss does not count."""

from __future__ import annotations

IGNORED_LABEL = -100
"""The default `ignore_index` of `torch.nn.functional.cross_entropy`; data sets made for it carry this label too."""
