"""A run as files for Megatron's processes. Pure: Megatron need not be installed.

meshwright_run.yaml   the run with its plan: data, rates, checkpoints, evaluation
megatron.json         the arguments of Megatron's constructors (`megatron_core`)
megatron_lm.args      the same for Megatron-LM's pretrain_gpt.py (`megatron_lm`); Meshwright's processes do not read it
megatron_bridge.yaml  the same for Megatron-Bridge (`megatron_bridge`), with its training script megatron_bridge.py
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from meshwright.engines.base import Launch, pinned_plan, refuse
from meshwright.engines.external_record import OutputLayout, step_folders
from meshwright.engines.megatron.check import check, check_export
from meshwright.engines.megatron.megatron_bridge.configuration import SCRIPT, configuration_text
from meshwright.engines.megatron.megatron_core.constructors import settings_of
from meshwright.engines.megatron.megatron_lm.arguments import arguments_text
from meshwright.engines.megatron.switches import FUSED_EXPERTS_ENV, fuses_experts
from meshwright.specs.run import Run

RUN_FILE, SETTINGS, ARGUMENTS = "meshwright_run.yaml", "megatron.json", "megatron_lm.args"
BRIDGE, BRIDGE_SCRIPT = "megatron_bridge.yaml", "megatron_bridge.py"
OUTPUT = "megatron"  # folder of the measurements, in the folder of the results
LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=partial(step_folders, with_file="manifest.json"))


def lower(run: Run, *, folder: Path) -> Launch:
    """Return the files and the command of every process."""
    from meshwright.runfile import pinned_text

    refuse("megatron", check(run))
    plan = pinned_plan(run)
    settings = json.dumps(settings_of(run, plan), indent=2)
    return Launch(
        argv=("python", "-m", "meshwright.engines.megatron.worker", str(folder / RUN_FILE)),
        files={RUN_FILE: pinned_text(run, plan), SETTINGS: settings + "\n", **_external_files(run)},
        num_processes=plan.num_devices,
    )


def lower_export(run: Run, *, folder: Path) -> Launch:
    """Return only the files for Megatron-LM and Megatron-Bridge, and the command of the latter."""
    refuse("megatron", check_export(run))
    return Launch(
        argv=("python", str(folder / BRIDGE_SCRIPT)),
        files=_external_files(run),
        env={FUSED_EXPERTS_ENV: "1"} if fuses_experts(run) else {},
        num_processes=pinned_plan(run).num_devices,
    )


def _external_files(run: Run) -> dict[str, str]:
    plan = pinned_plan(run)
    return {ARGUMENTS: arguments_text(run, plan), BRIDGE: configuration_text(run, plan), BRIDGE_SCRIPT: SCRIPT}
