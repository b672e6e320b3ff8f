"""`meshwright mlperf package`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "package",
    question="meshwright.api.mlperf:mlperf_package",
    body="meshwright.cli.mlperf_package:run",
    examples=["meshwright mlperf package runs/llama31_8b --org Org --system h200x8.json --code src --out submission"],
)
@json_option
def command() -> None:
    """Build a submission folder and run the official package checker on a copy.

    DIR is a folder of result_*.txt, one for each benchmark. Of a set with more runs than a score needs, the median
    window goes in. The same inputs give the same tree; an interrupted command leaves the old one.

    Exits with 1 if a set is no result or the package checker finds errors.
    """
