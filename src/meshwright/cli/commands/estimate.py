"""`meshwright estimate`: options and help."""

from __future__ import annotations

from meshwright.cli.options import file_option, html_option, json_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb(
    "estimate",
    question="meshwright.api.estimate:estimate",
    body="meshwright.cli.estimate:run",
    examples=[
        "meshwright estimate examples/runs/deepseek-v3-pinned.yaml",
        "meshwright estimate examples/runs/deepseek-v3-pinned.yaml --trace step.json --html step.html",
        "meshwright estimate examples/runs/llama3.1-8b-pretrain.yaml --set cluster=h100-8x8 --json",
    ],
)
@key_options("accelerator", "network", "device_memory", "calibration")
@file_option(
    "--trace", "trace_path", metavar="FILE.json",
    help="Write the timeline of the step for Perfetto (ui.perfetto.dev).",
)  # fmt: skip
@html_option
@json_option
def command() -> None:
    """Estimate step time, memory, timeline and cost of one plan.

    Prints the step time by component, the memory per device by part, and time, energy and cost of the whole training,
    with 80 % intervals. The plan is the one that RUN.yaml pins; with `parallel: auto` it is the planner's best.
    """
