"""`meshwright mlperf`: benchmarks of the shape of MLPerf Training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.api.mlperf import mlperf_check, mlperf_compare, mlperf_package, mlperf_rcp, mlperf_score
from meshwright.api.question import ask
from meshwright.api.run_benchmark import mlperf_run, plan_benchmark, rate_of_shape
from meshwright.cli import output
from meshwright.cli.options import count_option, html_option
from meshwright.cli.verbs import verb, verb_group
from meshwright.targets import load
from meshwright.training.cpu_libraries import require_torch
from meshwright.units import format_duration

if TYPE_CHECKING:
    from meshwright.mlperf.check import CheckReport
    from meshwright.mlperf.compare import ResultComparison
    from meshwright.mlperf.official import OfficialCheck
    from meshwright.mlperf.package import SubmissionPackage
    from meshwright.mlperf.results import BenchmarkScores
    from meshwright.mlperf.score import Score

RESULTS = "meshwright.mlperf.results"
_SHOWN = 60
"""Findings printed of one set; --json has all."""


@verb("mlperf run", question="meshwright.api.run_benchmark:mlperf_run")
@click.option(
    "--shape", "is_shape", is_flag=True,
    help="Train the benchmark's shapes on random tokens for --steps: a rate, and no result.",
)  # fmt: skip
@count_option("--steps", "num_steps", high=10_000, default=20, help="Steps of --shape.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the run file; train nothing.")
def run(*, asked: dict[str, Any], is_shape: bool, num_steps: int, dry_run: bool) -> None:
    """Run a benchmark: N timed runs to a target loss, with logs in the format of MLPerf Training.

    A run initializes its model and warms up on random tokens; then the clock starts, and only then its data is opened.
    It evaluates at the exact samples of the rules and ends at the first evaluation that meets the target. Seeds are
    drawn from the system once. The same command continues a set that was interrupted; a run in its middle starts again.

    Proxies bring their data. Other benchmarks need --data, and say where to get it. RUN.yaml is a run file whose `name`
    is a benchmark. Exit code 1 says that fewer runs reached the target than a score needs.
    """
    require_torch("training")
    if is_shape:
        given = {name: asked[name] for name in ("name", "round_name", "overrides")}
        document = rate_of_shape(**given, num_steps=num_steps, dry_run=dry_run)
        _show_shape(document)
        return
    if dry_run:
        _show_plan(plan_benchmark(**asked))
        return
    done = ask(mlperf_run, asked, say=output.say)
    document = done.to_dict()
    output.emit(document, _show)
    output.exit_unless(document["num_converged"] >= document["num_runs"] - (1 if document["num_runs"] > 2 else 0))


@verb("mlperf check", question="meshwright.api.mlperf:mlperf_check")
def check(*, asked: dict[str, Any]) -> None:
    """Check result files by the rules of MLPerf Training, strictly and with the official checker.

    Each finding names file, line and rule, what the log says, why it matters and how to mend it. A folder of
    result_*.txt is also checked as a set: number of runs, seeds, copies, reference convergence, and the system
    description where the folder stands in a submission.

    Exits with 1 if a rule is broken or the official checker rejects a file. Without the package mlperf-logging the
    official checker does not run, and the output says so.
    """
    found = ask(mlperf_check, asked)
    if not output.emitted_json(found):
        for checked in found.sets:
            _print_check(checked.report, checked.official)
    for row in found.skipped:
        output.note(f"{row.where} is not checked: {row.reason}")
    output.exit_unless(found.passes)


@verb("mlperf score", question="meshwright.api.mlperf:mlperf_score")
def score(*, asked: dict[str, Any]) -> None:
    """Score sets of runs: olympic mean, reference-convergence test, normalization.

    A set is a folder of result_*.txt at or below DIR. A score is the mean of the minutes from run_start to run_stop
    without the fastest and the slowest run, times the factor of the reference-convergence test. With fewer runs than a
    score needs, the command prints how likely the whole set passes that test; with more, it takes the window of
    consecutive runs with the median score.

    Exits with 1 if a set is no result. A computed score is not verified by the MLCommons Association.
    """
    found = ask(mlperf_score, asked)
    output.emit(found, _print_scores)
    for row in found.skipped:
        output.note(f"{row.where} is not scored: {row.reason}")
    output.exit_unless(found.passes)


@verb("mlperf compare", question="meshwright.api.mlperf:mlperf_compare")
@html_option
def compare(*, asked: dict[str, Any], html_path: Path | None) -> None:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Published results of the rounds 5.0 and 5.1 ship. Folders of result_*.txt at and below DIR are scored and stand in
    the same tables; a score that is not a published one is labelled as not verified by the MLCommons Association.
    Results of your own benchmarks are never compared with MLPerf results.
    """
    found = ask(mlperf_compare, asked)
    output.write_page(found, html_path)
    output.emit(found, _print_comparison)


@verb("mlperf rcp", question="meshwright.api.mlperf:mlperf_rcp")
def rcp(*, asked: dict[str, Any]) -> None:
    """Make reference convergence points from 2 N runs at each batch size.

    DIR is a folder of result_*.txt of one global batch size. All runs must converge and share their hyperparameters.
    The points have the official schema, so `mlperf_logging.rcp_checker --custom_rcps` reads them too.
    """
    found = ask(mlperf_rcp, asked)
    if asked["out"] is not None:
        output.note(f"{asked['out']} has {len(found.document)} points")
    if output.emitted_json(found):
        return
    output.print_table(
        {"batch size": "right", "runs": "right", "mean": "right", "std": "right", "least": "right", "": "left"},
        [
            (
                row["global_batch_size"], row["num_runs"], f"{row['mean']:,.1f}", f"{row['std']:,.1f}",
                f"{row['min_ok']:,.1f}", "pruned" if row["is_pruned"] else "",
            )
            for row in found.to_rows()
        ],
        caption=f"{found.benchmark.name}: samples to convergence",
    )  # fmt: skip


@verb("mlperf package", question="meshwright.api.mlperf:mlperf_package")
def package(*, asked: dict[str, Any]) -> None:
    """Build a submission folder and run the official package checker on a copy.

    DIR is a folder of result_*.txt, one for each benchmark. Of a set with more runs than a score needs, the median
    window goes in. The same inputs give the same tree; an interrupted command leaves the old one.

    Exits with 1 if a set is no result or the package checker finds errors.
    """
    package = ask(mlperf_package, asked)
    output.emit(package, _print_package)
    output.exit_unless(package.passes)


# --- tables ---


def _print_check(report: CheckReport, verdict: OfficialCheck | None) -> None:
    rules = report.benchmark
    output.print_line(f"{report.where}: {rules.name}, round {rules.round} ({report.round_from})", style="bold")
    rows = [
        (
            f.file if f.line is None else f"{f.file}:{f.line}",
            output.styled(f.rule, "red" if f.severity == "error" else "yellow"),
            f.message,
        )
        for f in report.findings[:_SHOWN]
    ]
    if rows:
        output.print_table({"where": "left", "rule": "left", "found": "left"}, rows)
    if len(report.findings) > _SHOWN:
        output.print_line(f"and {len(report.findings) - _SHOWN} more; --json prints all")
    for finding in {f.rule: f for f in report.findings}.values():
        output.print_line(f"{finding.rule} ({finding.severity}): {finding.why}. Mend: {finding.fix}.")
    for name, keys in report.pending.items():
        output.print_line(f"{name} is not finished; still to come: {', '.join(keys) or 'nothing that is required'}")
    warnings = len(report.findings) - len(report.errors)
    output.print_line(f"{len(report.files)} files: {len(report.errors)} errors, {warnings} warnings")
    if verdict is not None:
        _print_official(verdict)
    output.print_line()


def _print_official(verdict: OfficialCheck) -> None:
    if verdict.not_run:
        output.print_line(f"official compliance checker: not run: {verdict.not_run}", style="yellow")
        return
    failed = [v for v in verdict.verdicts if not v.passes]
    outcome = "passes" if not failed else f"rejects {len(failed)} of {len(verdict.verdicts)} files"
    output.print_line(f"official compliance checker {verdict.version}, rule set {verdict.ruleset}: {outcome}")
    for each in failed:
        output.print_line(f"{each.file}: {each.messages[0] if each.messages else 'no message'}")


def _print_comparison(comparison: ResultComparison) -> None:
    output.print_text_tables(load("meshwright.report.mlperf:tables_of")(comparison))
    for number, text in enumerate(comparison.endnotes, start=1):
        output.print_line(f"[{number}] {text}")


def _print_package(package: SubmissionPackage) -> None:
    state = "written" if package.changed else "unchanged"
    output.print_line(f"{package.folder}: {state}, {len(package.files)} files", style="bold")
    rows = [
        (s.benchmark.name, len(s.scored), s.score_min and f"{s.score_min:.3f}", "passes" if s.passes else "no result")
        for s in package.scores
    ]
    output.print_table({"benchmark": "left", "runs": "right", "score min": "right", "result": "left"}, rows)
    for score in package.scores:
        if not score.passes:
            output.print_line(f"{score.benchmark.name}: {'; '.join(score.problems) or score.test.message}", style="red")
    output.note(*package.notes)
    check = package.check
    if check.not_run:
        output.print_line(f"official package checker: not run: {check.not_run}", style="yellow")
        return
    output.print_line(f"official package checker: {'no errors' if check.passes else 'found errors'}")
    for line in check.not_checked:
        output.print_line(f"not checked officially: {line}")
    for message in check.messages if not check.passes else ():
        output.print_line(message)


def _print_scores(found: BenchmarkScores) -> None:
    scores = found.scores
    if len(scores) == 1:
        _print_runs(scores[0])
    columns = {"set": "left", "benchmark": "left", "round": "left", "runs": "right", "batch": "right"}
    columns |= {"raw min": "right", "factor": "right", "score min": "right", "result": "left"}
    output.print_table(
        columns,  # pyright: ignore[reportArgumentType]
        [
            (
                _name(s), s.benchmark.name, s.benchmark.round, len(s.runs), s.global_batch_size, _minutes(s.raw_min),
                f"{s.test.scaling:.4f}", _minutes(s.score_min), "passes" if s.passes else "no result",
            )
            for s in scores
        ],
        caption=load(f"{RESULTS}:UNVERIFIED") if any(s.benchmark.official for s in scores) else None,
    )  # fmt: skip
    for score in scores:
        name = f"{_name(score)}: " if len(scores) > 1 else ""
        for problem in score.problems:
            output.print_line(f"{name}{problem}", style="red")
        if len(scores) == 1 or not score.test.passes:
            output.print_line(f"{name}{score.test.message}")
        written = load(f"{RESULTS}:scaling_file")(score)
        if written is not None and abs(written - score.test.scaling) > 1e-6:
            output.print_line(
                f"{name}scaling.json says {written:.4f}; the logs give {score.test.scaling:.4f}", style="yellow"
            )
        _print_prospect(score, name)


def _print_runs(score: Score) -> None:
    rows = [
        (r.name, _minutes(r.minutes), r.samples and f"{r.samples:,.0f}", _place(score, r.name, r.problem))
        for r in score.runs
    ]
    output.print_table({"run": "left", "minutes": "right", "samples": "right", "": "left"}, rows)
    output.print_line()


def _print_prospect(score: Score, name: str) -> None:
    found = load(f"{RESULTS}:score_prospect")(score)
    if found is None:
        return
    if found.problem:
        output.print_line(f"{name}a set of {found.num_runs} cannot pass: {found.problem}", style="red")
        return
    scaling = "" if found.expected_scaling is None else f"; expected factor {found.expected_scaling:.3f}"
    output.print_line(
        f"{name}after {found.num_seen} runs, a set of {found.num_runs} passes with probability "
        f"{found.probability:.0%}{scaling}"
    )


def _place(score: Score, name: str, problem: str) -> str:
    if problem:
        return problem
    if name in score.kept:
        return "kept"
    return "dropped" if name in score.dropped else "outside the median window"


def _name(score: Score) -> str:
    parts = score.folder.absolute().parts
    return "/".join(parts[-2:]) if len(parts) > 2 else str(score.folder)


def _minutes(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _show_plan(document: dict[str, Any]) -> None:
    if output.emitted_json(document):
        return
    output.note(*document["notes"])
    output.print_line(
        f"{document['benchmark']}, round {document['round']}: {document['num_runs']} runs, "
        f"{document['num_concurrent']} side by side, {document['warm_up_steps']} warm-up steps each. "
        "Nothing was trained. The run file:",
        style="bold",
    )
    click.echo(document["run_file"])


def _show(document: dict[str, Any]) -> None:
    output.note(*document["notes"])
    output.print_table(
        {"run": "right", "seed": "right", "status": "left", "samples": "right", "loss": "right", "minutes": "right"},
        [
            (r["index"], r["seed"], r["status"], f"{r['samples']:,}", f"{r['loss']:.4f}", f"{r['minutes']:.3f}")
            for r in document["runs"]
        ],
    )
    if document["raw_min"] is not None:
        output.print_line(f"Olympic mean: {document['raw_min']:.3f} min, raw.", style="bold")
    output.print_line(f"{document['num_converged']} of {document['num_runs']} runs reached {document['target']:g}.")
    output.print_line(document["label"])
    if document["missing_system_fields"]:
        output.note(
            f"the machine does not tell: {', '.join(document['missing_system_fields'])}; give them with --system FILE"
        )
    output.print_line(
        f"Check and score: meshwright mlperf check {document['folder']}, meshwright mlperf score {document['folder']}"
    )


def _show_shape(document: dict[str, Any]) -> None:
    if output.emitted_json(document):
        return
    output.note(*document["notes"])
    if document["tokens_per_s_per_device"] is None:
        output.print_line(f"Memory: {document['memory']}. Nothing was trained.")
    else:
        mfu = "unknown" if document["mfu"] is None else f"{100 * document['mfu']:.1f} %"
        output.print_line(
            f"{document['steps']} steps of {document['model']}: {document['tokens_per_s_per_device']:,.0f} "
            f"tokens/s/device, MFU {mfu} ({document['mfu_convention']}), step {format_duration(document['step_s'])}.",
            style="bold",
        )
    output.print_line(document["label"])


command = verb_group(
    "mlperf",
    about="""Run, check and score benchmarks of MLPerf Training, and proxies of the same shape.

Rules of llama31_8b, llama2_70b_lora, gpt_oss_20b, deepseekv3_671b, llama31_405b and (checked and scored alone)
qwen35_397b_grpo ship for the rounds 5.0 to 6.1. A
further benchmark is a TOML file of the same form in a folder that --benchmarks names.""",
    verbs={"Runs": [run], "Results": [check, score, compare, rcp, package]},
)
