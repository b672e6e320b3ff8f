"""Figures as files of their own, PNG or SVG, with a white ground for documents and slides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.report.figures import DRAWS, HOW_TO_DRAW, chart_config

SCALE = 2.0
"""Pixels of a PNG for one of the figure."""


def write_figures(figures: Iterable[tuple[str, Any]], *, folder: Path, form: str) -> list[Path]:
    """Write each (name, Altair chart) as `svg` or `png`.

    Raises InputError without vl-convert, or where the folder cannot be written.
    """
    if find_spec(DRAWS) is None:
        raise InputError(f"there is no figure: {HOW_TO_DRAW}", hint="pip install vl-convert-python")
    import vl_convert

    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in figures:
            spec = chart.properties(title=name).configure(**{**chart_config(), "background": "white"}).to_dict()
            path = folder / f"{len(written) + 1:02}-{file_name(name)}.{form}"
            if form == "png":
                write_atomically(path, vl_convert.vegalite_to_png(spec, scale=SCALE))
            else:
                write_atomically(path, vl_convert.vegalite_to_svg(spec))
            written.append(path)
    except OSError as error:
        raise InputError(f"figures cannot be written: {error.strerror}", got=str(folder)) from None
    return written


def file_name(title: str) -> str:
    """
    >>> file_name("Throughput, A against B (8 GPUs)")
    'throughput-a-against-b-8-gpus'
    """
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")[:60].rstrip("-")
