"""`meshwright mlperf`: benchmarks of the shape of MLPerf Training."""

from __future__ import annotations

import click

from meshwright.cli.options import count_option, json_option
from meshwright.cli.verbs import verb, verb_group


@verb(
    "run",
    question="meshwright.api.run_benchmark:mlperf_run",
    body="meshwright.cli.mlperf:run",
    examples=[
        "meshwright mlperf run proxy_pretrain_xs --out runs/p1",
        "meshwright mlperf run proxy_pretrain_xs --out runs/p2 --set batch.global_sequences=32 --dry-run",
        "meshwright mlperf run llama31_8b --out runs/8b --data /data/c4 --set parallel.tensor=2",
        "meshwright mlperf run llama31_8b --shape --set cluster=h100-8x1 --dry-run",
    ],
)
@click.option(
    "--shape",
    "is_shape",
    is_flag=True,
    help="Train the benchmark's shapes on random tokens for --steps: a rate, and no result.",
)
@count_option("--steps", "num_steps", high=10_000, default=20, help="Steps of --shape.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the run file; train nothing.")
@json_option
def run() -> None:
    """Run a benchmark: N timed runs to a target loss, with logs in the format of MLPerf Training.

    A run initializes its model and warms up on random tokens; then the clock starts, and only then its data is opened.
    It evaluates at the exact samples of the rules and ends at the first evaluation that meets the target. Seeds are
    drawn from the system once. The same command continues a set that was interrupted; a run in its middle starts again.

    Proxies bring their data. Other benchmarks need --data, and say where to get it. RUN.yaml is a run file whose `name`
    is that of a benchmark. Exit code 1 says that fewer runs reached the target than a score needs.
    """


@verb(
    "check",
    question="meshwright.api.mlperf:mlperf_check",
    body="meshwright.cli.mlperf:check",
    examples=[
        "meshwright mlperf check results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf check results/MI355X/llama2_70b_lora/result_0.txt --round 5.1 --json",
        "meshwright mlperf check running/result_3.txt --unfinished --no-official",
        "meshwright mlperf check training_results_v5.1/AMD",
    ],
)
@json_option
def check() -> None:
    """Check result files by the rules of MLPerf Training, strictly and with the official checker.

    Each finding names file, line and rule, what the log says, why it matters and how to mend it. A folder of
    result_*.txt is also checked as a set: number of runs, seeds, copies, reference convergence, and the system
    description where the folder stands in a submission.

    Exits with 1 if a rule is broken or the official checker rejects a file. Without the package mlperf-logging the
    official checker does not run, and the output says so.
    """


@verb(
    "score",
    question="meshwright.api.mlperf:mlperf_score",
    body="meshwright.cli.mlperf:score",
    examples=[
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --json",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1 --runs 4",
        "meshwright mlperf score training_results_v5.1/AMD",
    ],
)
@json_option
def score() -> None:
    """Score sets of runs: olympic mean, reference-convergence test, normalization.

    A set is a folder of result_*.txt at or below DIR. A score is the mean of the minutes from run_start to run_stop
    without the fastest and the slowest run, times the factor of the reference-convergence test. With fewer runs than a
    score needs, the command prints how likely the whole set passes that test; with more, it takes the window of
    consecutive runs with the median score.

    Exits with 1 if a set is no result. A computed score is not verified by the MLCommons Association.
    """


@verb(
    "compare",
    question="meshwright.api.mlperf:mlperf_compare",
    body="meshwright.cli.mlperf:compare",
    examples=[
        "meshwright mlperf compare --benchmark llama2_70b_lora --round 5.1 --devices 8 --accelerator MI355X",
        "meshwright mlperf compare --benchmark llama2_70b_lora --devices 8 --baseline MI300X",
        "meshwright mlperf compare my/results --benchmark llama31_8b --round 5.1 --devices 8 --json",
    ],
)
@json_option
def compare() -> None:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Published results of the rounds 5.0 and 5.1 ship. Folders of result_*.txt at and below DIR are scored and stand in
    the same tables; a score that is not a published one is labelled as not verified by the MLCommons Association.
    Results of benchmarks of one's own are never compared with those of MLPerf.
    """


@verb(
    "rcp",
    question="meshwright.api.mlperf:mlperf_rcp",
    body="meshwright.cli.mlperf:rcp",
    examples=[
        "meshwright mlperf rcp runs/batch16 runs/batch32 --creator Reference --platform 1xH200 --out rcps.json",
        "meshwright mlperf rcp runs/batch16 --creator Reference --platform 1xH200 --json",
    ],
)
@json_option
def rcp() -> None:
    """Make reference convergence points from 2 N runs at each batch size.

    DIR is a folder of result_*.txt of one global batch size. All runs must converge and share their hyperparameters.
    The points have the official schema, so `mlperf_logging.rcp_checker --custom_rcps` reads them too.
    """


@verb(
    "package",
    question="meshwright.api.mlperf:mlperf_package",
    body="meshwright.cli.mlperf:package",
    examples=["meshwright mlperf package runs/llama31_8b --org Org --system h200x8.json --code src --out submission"],
)
@json_option
def package() -> None:
    """Build a submission folder and run the official package checker on a copy.

    DIR is a folder of result_*.txt, one for each benchmark. Of a set with more runs than a score needs, the median
    window goes in. The same inputs give the same tree; an interrupted command leaves the old one.

    Exits with 1 if a set is no result or the package checker finds errors.
    """


command = verb_group(
    "mlperf",
    about="""Run, check and score benchmarks of MLPerf Training, and proxies of the same shape.

Rules of llama31_8b, llama2_70b_lora, gpt_oss_20b, deepseekv3_671b and llama31_405b ship for the rounds 5.0 to 6.1. A
further benchmark is a TOML file of the same form in a folder that --benchmarks names.""",
    verbs={"Runs": [run], "Results": [check, score, compare, rcp, package]},
    examples=[
        "meshwright mlperf run proxy_pretrain_xs --out runs/p1",
        "meshwright mlperf check results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf score results/MI355X/llama2_70b_lora --round 5.1",
    ],
)
