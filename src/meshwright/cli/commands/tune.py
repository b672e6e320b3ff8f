"""`meshwright tune`: a group of commands; each tunes one thing, and changes nothing without --apply or --write."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from meshwright import runfile
from meshwright.cli import options, output
from meshwright.cli.question import key_options
from meshwright.cli.run_input import tuned_run
from meshwright.cli.verbs import verb, verb_group
from meshwright.doctor import settings as settings
from meshwright.doctor.host import host_at
from meshwright.doctor.settings import KernelSetting, SettingAction, SettingValue, SystemNote
from meshwright.doctor.tuning import TuningOutcome, apply, default_state, restore
from meshwright.errors import InputError
from meshwright.records.rate_range import RateRange
from meshwright.specs.run import Run

Document = dict[str, Any]


@verb("tune system")
@click.option("--apply", "is_apply", is_flag=True, help="Change the settings; their old values are saved first.")
@click.option("--restore", "is_restore", is_flag=True, help="Restore the saved values.")
@click.option("--only", metavar="NAMES", help="These settings only, separated by commas.")
@click.option("--skip", metavar="NAMES", help="All settings but these.")
@click.option("--why", is_flag=True, help="Explain every setting: its benefit, its risk and its source.")
@options.file_option(
    "--state",
    help="File of the saved values.  [default: meshwright/tune-system.json in the XDG state folder]",
)  # fmt: skip
@options.root_option
def system(
    *, is_apply: bool, is_restore: bool, only: str | None, skip: str | None, why: bool, state: Path | None, root: Path
) -> None:
    """Show, change or restore kernel settings that affect training.

    Without --apply it is a dry run that prints what would change. --apply saves the value of every setting and then
    changes all of them or none: if one cannot be changed, the others are restored and the exit code is 1. --restore
    restores the saved values. Settings that this process cannot read or write are skipped, with the reason. Changes
    need root, and last until the node restarts.
    """
    if is_apply and is_restore:
        raise InputError("--apply and --restore are opposites", allowed="one of them")
    if is_restore and (only or skip):
        raise InputError("--restore restores everything that was saved", got="--only or --skip")
    host = host_at(root)
    state = state or default_state(host)
    if is_restore:
        outcome = restore(host, state=state)
        document = {"mode": "restore", "state": state, **_outcome(outcome)}
    else:
        values = settings.survey(host, settings.choose(only=options.names_in(only), skip=options.names_in(skip)))
        seen = settings.notes(host)
        outcome = None
        document = {"mode": "dry run", "state": state, "settings": _rows(values), "notes": seen}
        if not output.wants_json():
            _show_settings(values, seen, why=why)
        if is_apply:
            outcome = apply(host, values, state=state)
            document |= {"mode": "apply", **_outcome(outcome)}
        elif not output.wants_json():
            _show_dry_run(values)
    if not output.emitted_json(document) and outcome is not None:
        _show_outcome(outcome, state, is_restore=is_restore)
    output.exit_unless((outcome is None or outcome.is_done) and not (is_apply and _nothing_was_possible(document)))


# --- the document ---


def _rows(values: list[SettingValue]) -> list[Document]:
    """One row per setting, with its files."""
    rows = []
    for setting, own in _by_setting(values).items():
        about = asdict(setting) | {"comparison": setting.comparison.value}
        kept = [
            {"path": v.path, "current": v.current, "target": v.target, "action": v.action, "reason": v.reason}
            for v in own
        ]
        rows.append({**about, "values": kept})
    return rows


def _by_setting(values: list[SettingValue]) -> dict[KernelSetting, list[SettingValue]]:
    found: dict[KernelSetting, list[SettingValue]] = {}
    for value in values:
        found.setdefault(value.setting, []).append(value)
    return found


def _outcome(outcome: TuningOutcome) -> Document:
    return {
        "done": outcome.is_done,
        "changed": [c.path for c in outcome.changed],
        "put_back": [s.path for s in outcome.put_back],
        "failure": outcome.failure,
        "stuck": outcome.stuck,
    }


def _nothing_was_possible(document: Document) -> bool:
    """True if a setting differs from its target and none could be written."""
    unwanted = [v for row in document["settings"] for v in row["values"] if v["current"] not in (None, v["target"])]
    return bool(unwanted) and not document["changed"] and document["done"]


# --- tables ---


def _show_settings(values: list[SettingValue], seen: list[SystemNote], *, why: bool) -> None:
    rows = [_cells(setting, own) for setting, own in _by_setting(values).items()]
    output.print_table({"setting": "left", "files": "right", "now": "left", "wanted": "left", "": "left"}, rows)
    if seen:
        output.print_line()
        states = {True: "well", False: "look at it", None: "not seen"}
        output.print_table(
            {"only noted": "left", "now": "left", "wanted": "left", "": "left"},
            [(n.name, n.current, n.wanted, states[n.is_well] + (f": {n.reason}" if n.reason else "")) for n in seen],
        )
        for n in seen:
            if n.is_well is False:
                output.print_line(f"{n.name}: {n.why}; {n.how}.")
    if why:
        for setting in _by_setting(values):
            output.print_line()
            output.print_line(setting.name, style="bold")
            output.print_line(f"Benefit: {setting.why}. Risk: {setting.risk}.")
            output.print_line(f"{setting.path} ({setting.source})")


def _cells(setting: KernelSetting, own: list[SettingValue]) -> tuple[object, ...]:
    held = [v.current for v in own if v.current is not None]
    now = ", ".join(dict.fromkeys(held)) or None
    targets = ", ".join(dict.fromkeys(v.target for v in own))
    parts = []
    for action in SettingAction:
        counted = [v for v in own if v.action is action]
        if counted:
            reasons = ", ".join(dict.fromkeys(v.reason for v in counted if v.reason))
            number = f" {len(counted)}" if len(counted) < len(own) else ""
            parts.append(f"{action.value}{number}" + (f": {reasons}" if reasons else ""))
    is_there = any(v.reason != settings.ABSENT for v in own)
    return setting.name, len(own) if is_there else 0, now, targets, "; ".join(parts)


def _show_dry_run(values: list[SettingValue]) -> None:
    changes = [v for v in values if v.action is SettingAction.CHANGE]
    skipped = len({v.setting.name for v in values if v.action is SettingAction.SKIP})
    output.print_line()
    files = "1 file" if len(changes) == 1 else f"{len(changes)} files"
    output.print_line(f"--apply would write {files}; {skipped} settings are skipped.", style="bold")


def _show_outcome(outcome: TuningOutcome, state: Path, *, is_restore: bool) -> None:
    if not is_restore:
        output.print_line()
    if outcome.failure is not None:
        f = outcome.failure
        output.print_line(f"{f.setting} could not be changed ({f.path}: {f.reason}).", style="bold red")
        output.print_line(f"Restored: {len(outcome.put_back)} files. Nothing is changed." if not outcome.stuck else "")
    elif is_restore:
        output.print_line(f"Restored: {len(outcome.changed)} files.", style="bold")
    elif outcome.changed:
        output.print_line(f"Changed: {len(outcome.changed)} files. Their old values are in {state}.", style="bold")
        output.print_line("`meshwright tune system --restore` restores them.")
    else:
        output.print_line("Nothing was changed.", style="bold")
    for f in outcome.stuck:
        output.print_line(f"Not restored: {f.path}: {f.reason}; its value is still in {state}.", style="bold red")


MAX_WORKERS = 256  # `data.workers` of the run file


@verb("tune dataloader")
@options.run_argument()
@key_options("overrides")
@click.option(
    "--workers", "counts", callback=options.numbers(low=0, high=MAX_WORKERS, example="0,1,2,4", word="auto"),
    default="auto", show_default=True, metavar="N,N,...",
    help="Numbers of threads to try, 0 to 256. 0 reads in the training thread; auto: up to the cores of a process.",
)  # fmt: skip
@options.seconds_option(
    "--step-time", "step_s", above=True,
    help="Measured time of a training step.  [default: the planner's estimate]",
)  # fmt: skip
@options.budget_option(
    default="60s", help="Time to measure, as in 90s, 3m or 1h; every number is measured at least 3 times."
)
@options.write_option(help="Write a copy of the run file with the numbers found.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the numbers found into RUN.yaml.")
def dataloader(*, counts: tuple[int, ...] | None, step_s: float | None, budget_s: float, **files: Any) -> None:
    """Find the number of data loading threads for training and validation.

    Reads the run's own data, with its tokenizer and sequence length, with each number of threads: at full speed, and
    with a consumer that takes as long as a training step. Training gets the smallest number with which no step waits.
    Validation is short, and gets the smallest number with which a whole pass, start included, is no slower.

    Changes nothing without --write or --apply. They set data.workers and train.evaluate.workers in a run file.
    """
    run, target = tuned_run("data loading is", **files)
    tune = output.load_with_torch("meshwright.cli.tune_dataloader_torch:tune_run", what="measuring data loading")
    found = tune(run, counts=counts, step_s=step_s, budget_s=budget_s)
    if target is not None:
        runfile.write_text(found.text(), target)
    if not output.emitted_json(found.document(target)):
        found.show(target)


@verb("tune gemm")
@options.run_argument()
@key_options("overrides")
@options.file_option(
    "--out", "out",
    help="Tuning file to write.  [default with --write or --apply: the run file's name with .gemm.json]",
)  # fmt: skip
@options.write_option(help="Write a copy of the run file that names the tuning file.")
@click.option("--apply", "is_apply", is_flag=True, help="Name the tuning file in RUN.yaml.")
@options.budget_option(default="60s", help="Time to measure, one part to search and one to confirm: 90s, 3m, 1h.")
def gemm(*, run_path: Path, out: Path | None, budget_s: float, **files: Any) -> None:
    """Find the fastest GEMM kernels, library and threads for a run.

    Measures every GEMM of the run's model and plan as it runs now, tries the alternatives, and measures again, before
    and after in turns. The alternatives are, on a CPU, the number of threads and a route for each GEMM; on NVIDIA
    GPUs, the library; on AMD GPUs, every kernel of rocBLAS and hipBLASLt through PyTorch's TunableOp. Only
    significantly faster choices are kept. Results change by rounding only: number formats and the precision of fp32
    GEMMs stay.

    --out writes a tuning file for this device and this version of PyTorch. A run names it as gemm_tuning; --apply and
    --write do so. If nothing is faster, nothing is written.
    """
    run, target = tuned_run("GEMMs are", out, run_path=run_path, **files)
    if out is not None and out.resolve() in {p.resolve() for p in (run_path, target) if p}:
        raise InputError("--out is the run file itself", got=str(out), hint="name another file")
    tune = output.load_with_torch("meshwright.cli.tune_gemm_torch:tune_run", what="tuning GEMMs")
    found = tune(run, budget_s=budget_s)
    if out is None and target is not None:
        out = run_path.with_suffix(".gemm.json")
    written = [path for path in (out, target) if path is not None]
    if found.is_usual:
        written = []
    elif out is not None:
        text = _run_text(run, out) if target is not None else None  # may refuse, before anything is written
        runfile.write_text(found.tuning_text(), out)
        if text is not None and target is not None:
            runfile.write_text(text, target)
    if not output.emitted_json(found.document(written)):
        found.show(written)


def _run_text(run: Run, out: Path) -> str:
    wanted = replace(run, gemm_tuning=str(out))
    return runfile.changed_text(run, {"gemm_tuning": str(out)}, wanted=wanted, what="the tuning file")


MOST_ROWS = 12  # of the table


@verb("tune learning-rate")
@options.run_argument()
@key_options("overrides")
@click.option("--from", "low", type=float, default=1e-7, show_default=True, metavar="RATE", help="First rate.")
@click.option("--to", "high", type=float, default=1.0, show_default=True, metavar="RATE", help="Last rate.")
@options.count_option(
    "--steps", "num_steps", low=10, high=100_000, default=100,
    help="Steps from the first rate to the last.",
)  # fmt: skip
@options.html_option
@options.write_option(help="Write a copy of the run file with the suggested rate.")
@click.option("--apply", "is_apply", is_flag=True, help="Write the suggested rate into RUN.yaml.")
def learning_rate(*, low: float, high: float, num_steps: int, html_path: Path | None, **files: Any) -> None:
    """Find a learning rate for a run by a range test.

    Trains the run's own model on its own data, with its batch, plan and optimizer, while the rate rises exponentially
    from step to step, until the loss diverges. The suggestion is the rate of the steepest descent of the smoothed loss,
    or a tenth of the rate of divergence where that is smaller (Smith 2017; fastai's lr_find). --html draws the curve.

    Saves nothing of the training. Changes nothing without --write or --apply. They set optimizer.learning_rate.
    """
    _check_range(low, high)
    run, target = tuned_run("rate is", html_path, **files)
    test = output.load_with_torch(
        "meshwright.engines.native.rate_range_test:run_range_test", what="a learning-rate range test"
    )
    found: RateRange = test(run, num_steps=num_steps, low=low, high=high)
    values = _rate_values(run, found)
    if not values:
        target = None
    elif target is not None:
        runfile.write_text(_rate_text(run, values), target)
    output.write_html("meshwright.report.learning_rate_page:learning_rate_page", found, run=run, path=html_path)
    if not output.emitted_json(_rate_document(run, found, values=values, written=target)):
        _show_rates(run, found, values=values, written=target)


def _check_range(low: float, high: float) -> None:
    for option, rate in (("--from", low), ("--to", high)):
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"{option} is no learning rate", got=rate, allowed="a number above 0")
    if low >= high:
        raise InputError("--from is not below --to", got=f"{low:g} to {high:g}")


def _rate_values(run: Run, found: RateRange) -> dict[str, float]:
    """Keys of the run file that the suggestion sets; empty: there is none. Both rates of Muon rise together."""
    if found.suggested is None:
        return {}
    values = {"optimizer.learning_rate": found.suggested}
    adamw = run.optimizer.adamw_learning_rate
    if adamw is not None:
        own = float(f"{found.suggested * adamw / run.optimizer.learning_rate:.1e}")
        values["optimizer.adamw_learning_rate"] = own
    return values


def _rate_text(run: Run, values: dict[str, float]) -> str:
    fields = {key.partition(".")[2]: value for key, value in values.items()}
    wanted = replace(run, optimizer=replace(run.optimizer, **fields))
    return runfile.changed_text(run, values, wanted=wanted, what="the learning rate")


def _rate_document(run: Run, found: RateRange, *, values: dict[str, float], written: Path | None) -> dict[str, Any]:
    steps = zip(found.rates, found.losses, found.smoothed, strict=True)
    return {
        "run": run.name,
        "optimizer": run.optimizer.name,
        "before": run.optimizer.learning_rate,
        "suggested": found.suggested,
        "steepest": found.steepest,
        "divergence": found.divergence,
        "values": values,
        "steps": [
            {"learning_rate": rate, "loss": _finite(loss), "smoothed": _finite(smoothed)}
            for rate, loss, smoothed in steps
        ],
        "written": written,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show_rates(run: Run, found: RateRange, *, values: dict[str, float], written: Path | None) -> None:
    every = max(1, -(-len(found.rates) // MOST_ROWS))
    rows = list(zip(found.rates, found.losses, found.smoothed, strict=True))
    shown = [*rows[:-1:every], rows[-1]]
    output.print_table(
        {"learning rate": "right", "loss": "right", "smoothed": "right"},
        [(f"{rate:.2e}", f"{loss:.4f}", f"{smoothed:.4f}") for rate, loss, smoothed in shown],
    )
    if found.divergence is None:
        output.note(f"the loss did not diverge up to {found.end:g}: a larger --to shows where it does")
    if not values:
        output.print_line(
            "Nothing is suggested, nothing is written: the loss does not fall within this range.", style="bold"
        )
        return
    end = "" if found.divergence is None else f", divergence at {found.divergence:.1e}"
    output.print_line(
        f"Suggested peak for {run.optimizer.name}: {found.suggested:.1e} "
        f"(steepest descent at {found.steepest:.1e}{end}).",
        style="bold",
    )
    for key, value in values.items():
        output.print_line(
            f"{key}: {value:g}" if written else f"Nothing is changed: --apply and --write set {key}={value:g}."
        )
    if written is not None:
        output.print_line(f"Written: {written}. The learning rate was {run.optimizer.learning_rate:g}.")


command = verb_group(
    "tune",
    about="""Tune this node, or a run on it. Nothing changes without --apply or --write.

Each command measures or checks first, prints what it would change, and changes it only on request.""",
    verbs={"What to tune": [system, dataloader, gemm, learning_rate]},
)
