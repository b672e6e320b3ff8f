"""`meshwright mlperf check`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "check",
    question="meshwright.api.mlperf:mlperf_check",
    body="meshwright.cli.mlperf_check:run",
    examples=[
        "meshwright mlperf check results/MI355X/llama2_70b_lora --round 5.1",
        "meshwright mlperf check results/MI355X/llama2_70b_lora/result_0.txt --round 5.1 --json",
        "meshwright mlperf check running/result_3.txt --unfinished --no-official",
        "meshwright mlperf check training_results_v5.1/AMD",
    ],
)
@json_option
def command() -> None:
    """Check result files by the rules of MLPerf Training, strictly and with the official checker.

    Each finding names file, line and rule, what the log says, why it matters and how to mend it. A folder of
    result_*.txt is also checked as a set: number of runs, seeds, copies, reference convergence, and the system
    description where the folder stands in a submission.

    Exits with 1 if a rule is broken or the official checker rejects a file. Without the package mlperf-logging the
    official checker does not run, and the output says so.
    """
