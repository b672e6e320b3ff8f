"""`meshwright scale`: options and help."""

from __future__ import annotations

from meshwright.cli.options import html_option, json_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "scale",
    question="meshwright.api.scale:scale",
    body="meshwright.cli.scale:run",
    examples=[
        "meshwright scale examples/runs/moe-2t-mi355x.yaml --devices 8192,98304 --days 22.8",
        "meshwright scale examples/runs/moe-2t-mi300x.yaml --emulate 768 --devices 16384,32768,65536",
        "meshwright scale examples/runs/llama3.1-8b-pretrain.yaml --mode weak --html scale.html",
        "meshwright scale --model moe-2t --cluster mi355x-8x1024 --gbs 32768 --seq 4096 --json",
    ],
)
@key_options("calibration")
@html_option
@json_option
def command() -> None:
    """Scale a run to more devices: efficiency, time, failures, energy, cost.

    The global batch is that of the run file, for the run file's cluster. The planner chooses a plan for each number
    of devices; with --keep-plan only the data-parallel degree of one plan grows. --emulate gives a small cluster the
    share of the batch that it would have in a large one, and says what such a test cannot show.
    """
