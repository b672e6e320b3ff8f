"""`meshwright mlperf compare`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "compare",
    question="meshwright.api.mlperf:mlperf_compare",
    body="meshwright.cli.mlperf_compare:run",
    examples=[
        "meshwright mlperf compare --benchmark llama2_70b_lora --round 5.1 --devices 8 --accelerator MI355X",
        "meshwright mlperf compare --benchmark llama2_70b_lora --devices 8 --baseline MI300X",
        "meshwright mlperf compare my/results --benchmark llama31_8b --round 5.1 --devices 8 --json",
    ],
)
@json_option
def command() -> None:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Published results of the rounds 5.0 and 5.1 ship. Folders of result_*.txt at and below DIR are scored and stand in
    the same tables; a score that is not a published one is labelled as not verified by the MLCommons Association.
    Results of benchmarks of one's own are never compared with those of MLPerf.
    """
