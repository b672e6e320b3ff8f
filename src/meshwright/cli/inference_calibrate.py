"""`meshwright inference calibrate`: constants of one server from records of `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.answers.serving_calibration import ServingCalibrationResult, serving_calibration
from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.inference.measured import ServedGiven
from meshwright.inference.server_fit import to_document
from meshwright.json_values import jsonable
from meshwright.runfile import named_model


def given_served(options: Mapping[str, Any]) -> ServedGiven:
    """Model, formats and engine from the options, for records that do not name them."""
    model = options["model"]
    return ServedGiven(
        model=None if model is None else named_model(model),
        precision=options["precision"],
        kv_precision=options["kv_precision"],
        engine=options["engine"],
    )


def run(*, folders: tuple[Path, ...], cluster: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Fit, write the file, and show the errors."""
    found = serving_calibration(records=folders, cluster=cluster, given=given_served(options))
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
