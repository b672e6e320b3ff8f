"""`meshwright compare`: records, estimates and published figures side by side."""

from __future__ import annotations

from typing import Any

from meshwright.api.question import ask
from meshwright.api.report import compare
from meshwright.cli.options import figure_options, html_option, markdown_option
from meshwright.cli.output import emitted_json, print_line, print_text_tables, write_forms
from meshwright.cli.verbs import verb
from meshwright.targets import load


@verb("compare", question="meshwright.api.report:compare")
@html_option
@markdown_option
@figure_options
def command(*, asked: dict[str, Any], **options: Any) -> None:
    """Compare records, estimates and published figures with a baseline.

    A side is a folder of records (of train, bench, mlperf run; all below it count), a run file (its estimate),
    claim:ID,..., mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK (with * the mean over submitters), or
    points:KEY=TEXT,... (published rates of inference; replicas=N multiplies them). NAME=SIDE gives it a name.

    Each workload that two sides share gives a ratio with an interval. Means are geometric, with n and
    leave-one-out. Differences are listed, and a warning names the causes that one ratio mixes. --like-for-like
    refuses sides whose work differs (exit code 1).
    """
    found = ask(compare, asked)
    home = "meshwright.report.comparison"
    write_forms(found, markdown=f"{home}.tables:markdown", figures=f"{home}.page:figures_of", options=options)
    if emitted_json(found):
        return
    print_text_tables(load(f"{home}.tables:tables_of")(found))
    print_line()
    for text in found.cautions:
        print_line(f"caution: {text}")
