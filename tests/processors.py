"""Processors as a dimension of the tests: profiles that this machine can play, and stand-ins inside a test.

A profile (`tests/profiles.py`) needs a process of its own. A stand-in replaces what the product believes of its
processor, and so the routes that it offers and refuses; what the libraries compute stays.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.profiles import LIMITS, PROFILES, playable_with

from meshwright.kernels import processor
from meshwright.kernels.processor import Multiplies


def playable() -> list[str]:
    """The profiles that this machine can play. Those of x86 mean nothing to another processor."""
    chip = torch.cpu.get_capabilities()
    if not chip.get("avx") or not torch.backends.mkldnn.is_available():
        return []
    return playable_with([flag for flag, is_there in chip.items() if is_there is True])


def current() -> str | None:
    """The profile of this process: the one of its variables, and without any the most that the chip can play."""
    here = {name: os.environ[name] for name in LIMITS if name in os.environ}
    names = [name for name, profile in PROFILES.items() if profile.environment == here]
    return next(iter(names if here else reversed(playable())), None)


def pretend(monkeypatch: pytest.MonkeyPatch, onednn: Multiplies, **facts: Any) -> None:
    """Take this processor for one whose oneDNN multiplies with these instructions, with other `facts` of it."""
    monkeypatch.setattr(processor, "HERE", replace(processor.HERE, onednn=onednn, **facts))


def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this processor for one that is like it, without AMX: attention takes its own blocks there."""
    pretend(monkeypatch, min(processor.HERE.onednn, Multiplies.AVX512))
