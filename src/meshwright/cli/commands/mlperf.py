"""`meshwright mlperf`: benchmarks of the shape of MLPerf Training."""

from __future__ import annotations

from meshwright.cli.verbs import Verb, verb_group

SECTION = "Results"

command = verb_group(
    "mlperf",
    about="""Run, check and score benchmarks of MLPerf Training, and proxies of the same shape.

Rules of llama31_8b, llama2_70b_lora, gpt_oss_20b, deepseekv3_671b and llama31_405b ship for the rounds 5.0 to 6.1. A
further benchmark is a TOML file of the same form in a folder that --benchmarks names.""",
    verbs={
        "run": Verb(
            target="meshwright.cli.commands.mlperf_run:command",
            section="Runs",
            help="Run a benchmark: N timed runs to a target loss, with logs in the format of MLPerf Training.",
        ),
        "check": Verb(
            target="meshwright.cli.commands.mlperf_check:command",
            section=SECTION,
            help="Check result files by the rules of MLPerf Training, strictly and with the official checker.",
        ),
        "score": Verb(
            target="meshwright.cli.commands.mlperf_score:command",
            section=SECTION,
            help="Score sets of runs: olympic mean, reference-convergence test, normalization.",
        ),
        "compare": Verb(
            target="meshwright.cli.commands.mlperf_compare:command",
            section=SECTION,
            help="Compare results: makers and partners by accelerator, spread, generation over generation.",
        ),
        "rcp": Verb(
            target="meshwright.cli.commands.mlperf_rcp:command",
            section=SECTION,
            help="Make reference convergence points from 2 N runs at each batch size.",
        ),
        "package": Verb(
            target="meshwright.cli.commands.mlperf_package:command",
            section=SECTION,
            help="Build a submission folder and run the official package checker on a copy.",
        ),
    },
    examples=[
        "meshwright mlperf run proxy_pretrain_xs --out runs/p1",
        "meshwright mlperf check results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1",
    ],
)
