"""Variables that Slurm sets for a script from its `#SBATCH` lines: the section on output variables of `man sbatch`."""

from __future__ import annotations

import re

from meshwright.engines.megatron.shell_scripts.state import ShellValue, UnknownText

LINE = re.compile(r"#SBATCH\s+(--[\w-]+|-[A-Za-z])[=\s]*([^\s#]+)")
NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}  # fmt: skip
SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task"}
OF_ONE_RUN = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_SUBMIT_DIR", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID",
)  # fmt: skip


def slurm_values(text: str) -> dict[str, ShellValue]:
    """Return the variables of a script by name; those of the job are unknown. None without `#SBATCH` lines.

    Counts that are no positive whole numbers, such as ranges of nodes, are left out.
    """
    given: dict[str, str] = {}
    has_lines = False
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break  # sbatch reads no further
        has_lines |= line.startswith("#SBATCH")
        if found := LINE.match(line):
            given[SHORT.get(found[1], found[1].removeprefix("--"))] = found[2]
    counts = {name: int(given[name]) for name in NAMES if re.fullmatch(r"0*[1-9]\d*", given.get(name, ""))}
    if "ntasks" not in given and {"nodes", "ntasks-per-node"} <= counts.keys():
        counts["ntasks"] = counts["nodes"] * counts["ntasks-per-node"]
    if not has_lines:
        return {}
    unknown = {name: UnknownText(reason=f"${name} depends on the machine") for name in OF_ONE_RUN}
    return unknown | {variable: str(count) for name, count in counts.items() for variable in NAMES[name]}
