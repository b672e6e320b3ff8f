"""The contract of the megatron engine (`engines.base`). Imports torch only to detect devices and to export weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from meshwright.engines import external_record, external_workers
from meshwright.engines.base import Imported, StatedCluster, TrainOptions, refuse
from meshwright.engines.external_workers import WorkersStart, expected
from meshwright.engines.megatron import probe
from meshwright.engines.megatron.check import check, check_export, check_plan, notes_on_data
from meshwright.engines.megatron.exporting import export_saved_weights
from meshwright.engines.megatron.lower import LAYOUT, lower, lower_export
from meshwright.engines.observer import TrainingObserver
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = [
    "check", "check_export", "expected", "export_saved_weights", "import_run", "launch", "launch_observed", "lower",
    "lower_export", "prepare", "read", "takes_warm_up",
]  # fmt: skip


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; write nothing and start no process of the training."""
    refuse("megatron", check(run))
    machine = probe.machine()
    probe.require_device(machine)
    return external_workers.start(
        run, options=options, engine="megatron", machine=machine, check_plan=check_plan, layout=LAYOUT
    )


def launch(start: WorkersStart) -> None:
    """Train with one process per device, or as the process of a launcher; then write the record."""
    lowered = lower(start.run, folder=start.options.folder)
    external_workers.launch(start, lowered, notes_on_data=notes_on_data)


takes_warm_up = False


def launch_observed(start: WorkersStart, *, observer: TrainingObserver, warm_up_steps: int) -> None:
    """See `base.ObservedEngine`."""
    launch(external_workers.observed(start, observer, warm_up_steps=warm_up_steps))


def read(folder: Path) -> Record:
    """Return the record of a training that has ended; compose it from its files if there is none yet."""
    return external_record.read(folder, LAYOUT)


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that options or a configuration describe, without the keys of `ignore`.

    Scripts, files of arguments and model_config.yaml are read by `megatron_lm`, run_config.yaml by `megatron_bridge`,
    configurations of Primus by `primus`.
    Raises InputError for what cannot be read or has no place in a run file.
    """
    # Readers of scripts: only an import needs them.
    from meshwright.engines.megatron.megatron_bridge.files import is_bridge_yaml, refuse_recipe
    from meshwright.engines.megatron.megatron_bridge.run_content import import_configuration
    from meshwright.engines.megatron.megatron_lm.options import split_source
    from meshwright.engines.megatron.megatron_lm.run_content import import_arguments
    from meshwright.engines.megatron.megatron_lm.switch_options import UNTOLD_ATTENTION
    from meshwright.engines.megatron.primus.files import is_primus_yaml
    from meshwright.engines.megatron.primus.run_content import import_primus
    from meshwright.engines.megatron.switches import FLASH_ATTENTIONS
    from meshwright.engines.software_line import with_stated_software

    refuse_recipe(source)
    read = import_configuration if is_bridge_yaml(source) else import_arguments
    read = import_primus if is_primus_yaml(source) else read
    found, path = read(source, cluster=cluster, ignore=ignore), Path(split_source(source)[0])
    alike = {"attention": FLASH_ATTENTIONS} if read is import_arguments else {}
    stated = with_stated_software(found, path.read_text(encoding="utf-8"), file=str(path), alike=alike)
    if stated.content["stack"].get("attention") == found.content["stack"].get("attention"):
        return stated
    return replace(stated, notes=tuple(note for note in stated.notes if not note.startswith(UNTOLD_ATTENTION)))
