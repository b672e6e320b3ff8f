"""Accelerators as tables spell them: "H100 SXM5 80GB", "8x NVIDIA A100-80G", "MI300X OAM".

A part, its form and its memory are told apart. A spelling with a word that is none of these, with a form that the part
is not known in, or with another memory, names no known accelerator: an H200 NVL is not an H200. Nor do the watts of a
sibling: an H100 of 350 W may be the card.
"""

from __future__ import annotations

import re
from functools import cache

from meshwright.accuracy.shipped import wordings
from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import accelerator_names, accelerator_with_driver_name
from meshwright.catalog.entries import CatalogKind, entry
from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Accelerator

_KIND = re.compile(r"sxm\d|hbm\d?e?|gddr\d\w?|\d+x|gfx\d\w+|hl|\d{3}l|p\d\w{0,2}|48xlarge")
_MEMORY = re.compile(r"(\d+) ?(?:g|gb|gib)\b")

_WATTS = re.compile(r"[ ,(-]+(\d{3,4}) ?w\b\)?", re.IGNORECASE)
_COUNT = re.compile(r"^\d+ ?(?:x|\u00d7) ?(?=[a-z])|[ (]+(?:x|\u00d7) ?\d+\)?$")
_TPU = re.compile(
    r"(?:google )?(?:cloud )?(?:(?:tpu ?v? ?|v ?)(4|5e|5 lite|5litepod|5p|6e|7x?)(?: \d+)?(?: pod)?"
    r"(?: (?:trillium|ironwood|\d+x\d+(?:x\d+)?))*|(?:tpu ?)?(trillium|ironwood))"
)
"""A TPU by its generation, with or without the size of its slice: "v5p-128", "TPU v6e-256", "Trillium"."""
_SLICE = re.compile(r"\bv(4|5p|5e|5litepod|6e)-(\d+)\b", re.IGNORECASE)
_CORES_A_CHIP = {"4": 2, "5p": 2}
"""Generations whose slices are named by TensorCores (Google Cloud documentation, TPU configurations)."""

MEMORY_DIFFERS = 0.08
"""Labels of one part differ by less: 180 and 192 GB of a B200, 186 and 192 GB of a GB200."""


def spelled(name: str) -> str | None:
    """The catalogue's name of the accelerator that `name` spells; None where it spells none or several.

    >>> spelled("8x NVIDIA H100 SXM5 80GB"), spelled("A100-40G"), spelled("H100 NVL 94 GB"), spelled("H200 NVL")
    ('h100', 'a100-40gb', 'h100-nvl', None)
    """
    text = re.sub(r"[^a-z0-9]+", " ", _COUNT.sub("", _WATTS.sub("", name).strip().lower())).strip()
    if watts := watts_of(name):  # a limit of power is another condition, and no part of the name
        found = spelled(_WATTS.sub("", name))
        return None if found is None or _is_sibling(found, watts, has_memory=bool(_MEMORY.search(text))) else found
    if tpu := _TPU.fullmatch(text):
        return wordings()["accelerator"]["tpus"][tpu[1] or tpu[2]]
    noise, form_of = (wordings()["accelerator"][name] for name in ("noise", "forms"))
    memory = [int(size) for size in _MEMORY.findall(text)]
    parts = [w for w in _MEMORY.sub(" ", text).split() if w not in noise and not _KIND.fullmatch(w)]
    forms = {form_of[w] for w in parts if w in form_of}
    part = "-".join(w for w in parts if w not in form_of)
    if part not in accelerator_names() or len(forms) > 1 or len(memory) > 1:
        return None
    known = [n for n in accelerator_names() if n == part or n.startswith(f"{part}-")]
    if forms:
        known = [n for n in known if n == f"{part}-{min(forms)}"]
    if not memory:
        return part if not forms else next(iter(known), None)
    same = [n for n in known if _gigabytes(n) == memory[0]]
    if part in same or len(same) == 1:
        return part if part in same else same[0]
    near = [n for n in known if abs(_gigabytes(n) / memory[0] - 1) < MEMORY_DIFFERS]
    return near[0] if len(near) == 1 and not same else None


@cache
def catalogued(name: str) -> Accelerator | None:
    """The accelerator with a published name, of its driver or as tables spell it; None when the catalogue has none."""
    try:
        return catalog.accelerator(accelerator_with_driver_name(name) or name)
    except UnknownNameError:
        known = spelled(name)
        return None if known is None else catalog.accelerator(known)


def watts_of(name: str) -> int | None:
    """Limit of power that `name` states, in watts; None where it states none.

    >>> watts_of("H100 SXM5 80GB (600W)"), watts_of("H100")
    (600, None)
    """
    found = _WATTS.search(name)
    return int(found[1]) if found else None


def chips_of_slice(name: str) -> int | None:
    """Chips of the slice that `name` names; None where it names none.

    >>> chips_of_slice("v5p-128"), chips_of_slice("TPU v6e-256"), chips_of_slice("TPU v5p")
    (64, 256, None)
    """
    found = _SLICE.search(name)
    return int(found[2]) // _CORES_A_CHIP.get(found[1].lower(), 1) if found else None


def _is_sibling(name: str, watts: int, *, has_memory: bool) -> bool:
    """True where `watts` are the usual limit of another part of the family, of any memory or of the stated one."""
    usual_w = {n: entry(CatalogKind.ACCELERATOR, n).values.get("tdp_w") for n in accelerator_names()}
    family = name.partition("-")[0]
    return usual_w[name] != watts and any(
        w == watts and n.partition("-")[0] == family and (not has_memory or _gigabytes(n) == _gigabytes(name))
        for n, w in usual_w.items()
    )


def _gigabytes(name: str) -> int:
    label = entry(CatalogKind.ACCELERATOR, name).values["marketed_memory"]
    return int(re.findall(r"\d+", label)[0])
