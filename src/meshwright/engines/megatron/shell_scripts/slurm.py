"""Variables that Slurm sets for a script from its `#SBATCH` lines: the section on output variables of `man sbatch`."""

from __future__ import annotations

import re
from itertools import takewhile

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
    head = [*takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())]  # sbatch reads it
    if not any(line.startswith("#SBATCH") for line in head):
        return {}
    found = [one for line in head if (one := LINE.match(line))]
    given = {SHORT.get(one[1], one[1].removeprefix("--")): one[2] for one in found}
    counts = {name: int(given[name]) for name in NAMES if re.fullmatch(r"0*[1-9]\d*", given.get(name, ""))}
    if "ntasks" not in given and {"nodes", "ntasks-per-node"} <= counts.keys():
        counts["ntasks"] = counts["nodes"] * counts["ntasks-per-node"]
    values: dict[str, ShellValue] = {name: UnknownText(reason=f"${name} depends on the machine") for name in OF_ONE_RUN}
    return values | {variable: str(count) for name, count in counts.items() for variable in NAMES[name]}
