"""`meshwright compare`: options and help."""

from __future__ import annotations

from meshwright.cli.options import figure_options, html_option, json_option, markdown_option
from meshwright.cli.verbs import verb


@verb(
    "compare",
    question="meshwright.api.compare:compare",
    body="meshwright.cli.compare:run",
    examples=[
        "meshwright compare runs/before runs/after",
        "meshwright compare runs/native runs/torchtitan --like-for-like --html gap.html",
        "meshwright compare 'mlperf:5.1/*/*B200*/llama2_70b_lora@8' 'mlperf:5.1/AMD/MI355X*/llama2_70b_lora'",
        "meshwright compare claim:s65_02 claim:s65_01 --json",
        "meshwright compare run.yaml runs/after --markdown comparison.md",
    ],
)
@html_option
@markdown_option
@figure_options
@json_option
def command() -> None:
    """Compare records, estimates and published figures with a baseline.

    A side is a folder of records (of train, bench, mlperf run; all below it count), a run file (its estimate),
    claim:ID,..., mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK (with * the mean over submitters), or
    points:KEY=TEXT,... (published rates of inference; replicas=N multiplies them). NAME=SIDE gives it a name.

    Each workload that two sides share gives a ratio with an interval. Means are geometric, with n and
    leave-one-out. What differs is listed, and what one ratio mixes is warned about. --like-for-like refuses sides
    whose work differs (exit code 1).
    """
