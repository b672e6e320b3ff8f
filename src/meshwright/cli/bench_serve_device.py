"""The devices behind a server that `bench serve` measures: named by the user, or found on this node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.doctor.checks import Node
from meshwright.doctor.devices import find_devices
from meshwright.doctor.examine import facts
from meshwright.doctor.host import host_at
from meshwright.errors import InputError, UnknownNameError

_NAMED = re.compile(r"(?P<name>.+?)(?:-(?P<devices>[1-9]\d*)(?:x(?P<nodes>[1-9]\d*))?)?")
GIVEN, FOUND = "given with --device", "found on the node that started the server"


def served_device(text: str | None, *, is_here: bool) -> dict[str, Any] | None:
    """Accelerator and number of the devices of a server, for its record; None: it is not known.

    `text` is ACCELERATOR, ACCELERATOR-DEVICES or ACCELERATOR-DEVICESxNODES. Without it a server of this node has the
    devices that `doctor` finds here; their number is that of the server only where there is one.
    Raises InputError or UnknownNameError where `text` names no accelerator.

    >>> found = served_device("h200-8x2", is_here=False)
    >>> found["accelerator"], found["count"]
    ('h200', 16)
    """
    if text is not None:
        return _named(text)
    return _found(Path("/")) if is_here else None


def _named(text: str) -> dict[str, Any]:
    match = _NAMED.fullmatch(text.strip())
    if match is None:
        raise InputError("--device names no device", got=text, allowed="ACCELERATOR-DEVICES, as in h200-8")
    try:
        known = catalog.accelerator(match["name"])
    except UnknownNameError as error:
        raise UnknownNameError("accelerator of --device", match["name"], known=catalog.accelerator_names()) from error
    count = int(match["devices"] or 1) * int(match["nodes"] or 1)
    return {"name": known.name, "accelerator": known.name, "count": count, "source": GIVEN}


def _found(root: Path) -> dict[str, Any] | None:
    host = host_at(root)
    found = find_devices(host).found
    if not found:
        processor = facts(Node(host=host)).get("processor")
        return None if processor is None else {
            "name": processor, "accelerator": None, "count": None, "source": FOUND,
        }  # fmt: skip
    names = {d.name for d in found}
    known = {d.accelerator for d in found}
    return {
        "name": ", ".join(sorted(names)),
        "accelerator": next(iter(known)) if len(known) == 1 else None,
        "count": 1 if len(found) == 1 else None,
        "source": FOUND,
    }
