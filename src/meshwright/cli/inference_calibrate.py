"""`meshwright inference calibrate`: constants of one server from records of `bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.answers.serving_calibration import ServingCalibrationResult
from meshwright.api.inference import inference_calibrate
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.inference.server_fit import to_document
from meshwright.json_values import jsonable


def run(*, asked: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Fit, write the file, and show the errors."""
    found = ask(inference_calibrate, asked)
    target = out or Path(f"{found.calibration.engine.name}-{found.calibration.accelerator}.json")
    document = jsonable(to_document(found.calibration))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r} ({error.strerror})") from None
    if as_json:
        emit_json({"calibration": target, **document})
        return
    _show(found)
    note(f"wrote {target}")


def _show(found: ServingCalibrationResult) -> None:
    print_line(found.summary(), style="bold")
    print_line()
    print_text_tables(found.tables())
    for reason, count in found.calibration.unused.items():
        note(f"{count} loads {reason} are not used")
