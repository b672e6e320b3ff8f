"""`meshwright calibrate`: measurements of a device become what the planner uses for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import json_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.calibration.device import DeviceCalibration
    from meshwright.fitting.advice import Advice

SHOWN = 5


@verb(
    "calibrate",
    examples=[
        "meshwright calibrate bench",
        "meshwright calibrate bench --install",
        "meshwright calibrate monday/records.csv friday/records.csv --out h100.json",
        "meshwright calibrate bench --for examples/runs/tiny-llama-cpu.yaml",
        "meshwright calibrate --from-tables aiconfigurator --device h100 --out h100.json",
    ],
)
@click.argument("paths", metavar="[RECORDS...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--out", "out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where the calibration goes.  [default: calibration.json beside the records; DEVICE.json]",
)  # fmt: skip
@click.option(
    "--from-tables", "tables", type=click.Choice(["aiconfigurator"]),
    help="Instead of records: kernel tables that others measured and published.",
)  # fmt: skip
@click.option("--device", metavar="NAME", help="With --from-tables: an accelerator of the catalogue.")
@click.option(
    "--framework", metavar="NAME", default="trtllm", show_default=True,
    help="With --from-tables: the software that was measured: trtllm, vllm or sglang.",
)  # fmt: skip
@click.option(
    "--install",
    is_flag=True,
    help="Use it from now on for `cluster: here` of this user, without --calibration.",
)
@click.option(
    "--for", "run_path", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml",
    help="Also say which measurement would make this run's estimate surer.",
)  # fmt: skip
@json_option
def command(
    paths: tuple[Path, ...],
    out: Path | None,
    tables: str | None,
    device: str | None,
    framework: str,
    install: bool,
    run_path: Path | None,
    as_json: bool,
) -> None:
    """Make a calibration of the records that `meshwright bench device` left.

    RECORDS are records.csv files or their folders, all of one device. How far the result is off is shown for each
    family: every measurement is left out in turn and predicted by the others.

    With --from-tables it is made of kernels that somebody else measured on an accelerator of the catalogue. They say
    how a kernel's rate depends on its shape; how fast the large ones are in training stays as shipped.
    """
    from meshwright.calibration.device import installed_path, to_document
    from meshwright.cli.output import emit_json, note
    from meshwright.report.documents.json_values import jsonable
    from meshwright.specs.hardware import HERE

    if tables is None:
        found, target = _of_records(paths)
    else:
        found, target = _of_tables(paths, device, framework)
    targets = [out or target]
    if install:
        if found.details["device"]["accelerator"] is not None:
            raise InputError(
                "--install is for a device that no catalogue knows", got=found.accelerator.name,
                hint="name the file: meshwright plan RUN.yaml --calibration FILE",
            )  # fmt: skip
        targets.append(installed_path())
    for target in targets:
        _write(jsonable(to_document(found)), target)
    advice = None if run_path is None else _advice(run_path, targets[0])
    if as_json:
        emit_json(_document(found, targets, advice))
        return
    _show(found, advice)
    for target in targets:
        note(f"wrote {target}")
    if not install and found.details["device"]["accelerator"] is None:
        note(
            f"a run of cluster {HERE!r} uses it with --calibration {targets[0]}; --install makes it the default"
        )


def _of_records(paths: tuple[Path, ...]) -> tuple[DeviceCalibration, Path]:
    """The calibration, and where it goes unless that is said."""
    from meshwright.fitting.device import calibrate
    from meshwright.records.device import read

    if not paths:
        raise InputError(
            "there is nothing to calibrate from",
            hint="name the records of `meshwright bench device`, or --from-tables aiconfigurator --device NAME",
        )
    files = [read(path) for path in paths]
    return calibrate(files), files[0].path.with_name("calibration.json")


def _of_tables(paths: tuple[Path, ...], device: str | None, framework: str) -> tuple[DeviceCalibration, Path]:
    from meshwright.fitting.published_tables import calibrate_from_tables

    if paths:
        raise InputError("--from-tables takes no records", got=str(paths[0]), hint="calibrate them apart")
    if device is None:
        raise InputError("--from-tables needs --device", hint="for example --device h100")
    found = calibrate_from_tables(device, framework=framework)
    return found, Path(f"{found.accelerator.name}.json")


def _write(document: Any, target: Path) -> None:
    import json

    from meshwright.files import write_atomically

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r} ({error.strerror})") from None


def _advice(run_path: Path, calibration: Path) -> Advice:
    from meshwright.cli.run_input import run_from
    from meshwright.fitting.advice import advise

    return advise(run_from(run_path, calibration=str(calibration)))


def _collectives(found: DeviceCalibration) -> dict[str, Any]:
    """Those that the planner uses, or those of tables, which are only to be read."""
    from meshwright.calibration import communication

    return communication.to_document(found.collectives) or found.details.get("collectives", {})


def _document(found: DeviceCalibration, targets: list[Path], advice: Advice | None) -> dict[str, Any]:
    return {
        "calibration": targets,
        "made": found.made,
        "device": found.details["device"],
        "peak_flops_per_s": found.accelerator.peak_flops_per_s,
        "memory_bytes_per_s": found.accelerator.memory_bytes_per_s,
        "parameters": found.parameters,
        "errors": found.details["errors"],
        "collectives": _collectives(found),
        "contention": found.contention,
        "unexplained_sd": found.unexplained_sd,
        "tables": found.details.get("tables"),
        "corrections": {name: len(s.y) for name, s in found.corrections.items()},
        "advice": advice,
    }


def _show(found: DeviceCalibration, advice: Advice | None) -> None:
    import math

    from meshwright.cli.output import print_line, print_table
    from meshwright.cost.uncertainty import Z80
    from meshwright.report.quantities import percent
    from meshwright.units import format_seconds

    print_line(found.made, style="bold")
    peaks = ", ".join(
        f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in found.accelerator.peak_flops_per_s.items()
    )
    print_line(f"{peaks}; memory {found.accelerator.memory_bytes_per_s / 1e9:.3g} GB/s.")
    print_line()
    headings = {
        "each left out": "left", "points": "right", "off by, median": "right", "one in ten": "right",
        "formula alone": "right",
    }  # fmt: skip
    print_table(
        headings,  # pyright: ignore[reportArgumentType]
        [
            (family, e["num_points"], percent(e["median"]), percent(e["p90"]), percent(e["formula_median"]))
            for family, e in found.details["errors"].items()
        ],
    )  # fmt: skip
    _show_tables(found)
    rows = [
        (kernel, count, format_seconds(curve[0][1]), f"{curve[-1][0] / curve[-1][1] / 1e9:.3g}")
        for kernel, by_count in _collectives(found).items() for count, curve in by_count.items()
    ]  # fmt: skip
    if rows:
        print_line()
        columns = {
            "collective": "left",
            "processes": "right",
            "smallest takes": "right",
            "largest, GB/s": "right",
        }
        print_table(columns, rows)  # pyright: ignore[reportArgumentType]
    if found.unexplained_sd is not None:
        print_line()
        print_line(
            f"Whole steps: 80 % of those left out were within {percent(math.exp(Z80 * found.unexplained_sd) - 1)} "
            "of what was predicted."
        )
    if advice is not None:
        _show_advice(advice)


def _show_tables(found: DeviceCalibration) -> None:
    """Whose measurements these are, and what was odd about them."""
    from meshwright.cli.output import print_line

    tables = found.details.get("tables")
    if tables is None:
        return
    print_line()
    print_line(
        f"Measured and published by others: {tables['package']} {tables['version']}, {tables['licence']}."
    )
    for name, correction in tables["corrections"].items():
        print_line(f"  {name}: {correction['file']}, {correction['framework']}")
        for note in correction["notes"]:
            print_line(f"    {note}")


def _show_advice(advice: Advice) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.report.quantities import interval_of, percent, value_of

    print_line()
    print_line(
        f"{advice.run}: a step takes {value_of(advice.step)} ({interval_of(advice.step)})", style="bold"
    )
    rows = [
        (c.kernel, ", ".join(f"{axis} {size:g}" for axis, size in c.shape.items()), percent(c.step_share),
         percent(c.sd), percent(c.gain / advice.sd**2))
        for c in advice.candidates[:SHOWN]
    ]  # fmt: skip
    columns = {
        "measure next": "left", "shape": "left", "of the step": "right", "known to": "right",
        "gain": "right",
    }  # fmt: skip
    print_table(columns, rows)  # pyright: ignore[reportArgumentType]
    name, share = max(advice.others.items(), key=lambda item: item[1])
    print_line(
        f"Gain: of the variance of the estimate. {percent(share)} of it is {name}, which no kernel's measurement "
        "changes; a training's own quick measurement does."
    )
