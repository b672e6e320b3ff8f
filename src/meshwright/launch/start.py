"""Write the files of a dispatch, run its commands, and watch a Slurm job until it ends: its states and steps."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshwright.errors import InfeasibleError, InputError, MissingDependencyError
from meshwright.files import write_atomically
from meshwright.json_values import parse_json
from meshwright.training.parent_watch import signal_at_end_of_parent

INSTALL = {
    "sbatch": "install Slurm's client (Debian: apt-get install slurm-client), or run this where jobs are submitted",
    "kubectl": "install kubectl and point it at the cluster",
    "sky": "pip install 'skypilot[aws]', or another cloud, and `sky check`",
    "ray": "pip install 'ray[default]', the release of the cluster",
}


def write(files: Mapping[str, str]) -> None:
    """Write every file atomically. Raises InputError when one cannot be written."""
    for name, text in files.items():
        path = Path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror})", got=name) from None


def require(program: str) -> None:
    """Raise MissingDependencyError when `program` is not installed."""
    if shutil.which(program) is None:
        raise MissingDependencyError(f"{program} is not on this machine", hint=INSTALL[program])


def submit(command: Sequence[str]) -> str:
    """Run a command that submits a job, and return its output.

    Raises InfeasibleError with its error message when it fails.
    """
    require(command[0])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise InfeasibleError(f"{command[0]} refused: {message}")
    return done.stdout.strip()


def run_here(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code. Signals that request a stop are forwarded to it.

    Its output goes to stderr: stdout is for this command's own result. When this process is killed, the command
    receives SIGTERM, so that no orphan keeps training.
    """
    with subprocess.Popen(command, stdout=sys.stderr.fileno(), preexec_fn=signal_at_end_of_parent) as process:

        def pass_on(signum: int, frame: FrameType | None) -> None:
            # Ctrl-C reaches the whole process group
            if signum != signal.SIGINT:
                process.send_signal(signum)

        asking = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {signum: signal.signal(signum, pass_on) for signum in asking}
        try:
            code = process.wait()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


POLL_S = 2.0
STEPS = "steps.jsonl"  # log of the engine, one line per step
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
    "PREEMPTED", "REVOKED", "LAUNCH_FAILED",
}  # fmt: skip
MOST_FAILED_QUERIES = 30  # a controller that restarts does not answer for a while

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job as Slurm reports it."""

    state: str
    reason: str
    restarts: int
    exit_code: int

    def __str__(self) -> str:
        again = f", restart {self.restarts}" if self.restarts else ""
        why = f" ({self.reason})" if self.state == "PENDING" and self.reason != "None" else ""
        return f"{self.state.lower()}{why}{again}"


def follow(job_id: str, *, folder: Path, say: Say, poll_s: float = POLL_S) -> JobState:
    """Wait until the job ends and return its last state. `say` receives a message for each new state and step.

    Raises InfeasibleError when Slurm no longer knows the job.
    """
    shown: str | None = None
    step: int | None = None
    failed = 0
    while True:
        found = _query(job_id)
        failed = 0 if found else failed + 1
        if failed >= MOST_FAILED_QUERIES:
            raise InfeasibleError(f"Slurm does not answer for job {job_id}", hint=f"sacct -j {job_id}")
        if found is not None:
            if str(found) != shown:
                shown = str(found)
                say(f"Slurm {job_id}: {shown}")
            step = _say_step(folder, step, say)
            if found.state in ENDED:
                return found
        time.sleep(poll_s)


def _query(job_id: str) -> JobState | None:
    asked = ["scontrol", "--oneliner", "show", "job", job_id]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return None if done.returncode else job_state(done.stdout)


def job_state(text: str) -> JobState:
    """Parse the output of `scontrol --oneliner show job`.

    >>> job_state("JobId=7 JobState=FAILED Reason=None Restarts=1 ExitCode=0:9 ").exit_code
    137
    """
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    code, _, signum = values.get("ExitCode", "0:0").partition(":")
    return JobState(
        state=values.get("JobState", "UNKNOWN"),
        reason=values.get("Reason", "None"),
        restarts=int(values.get("Restarts", "0")),
        exit_code=128 + int(signum) if int(signum or 0) else int(code),
    )


def _say_step(folder: Path, before: int | None, say: Say) -> int | None:
    """Report the newest step if it has changed, and return it."""
    path = folder / STEPS
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 8192))
            lines = stream.read().decode("utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return before
    for line in reversed(lines):
        if not line.endswith("\n"):
            continue  # still being written
        try:
            entry = parse_json(line)
        except ValueError:
            return before
        if entry["step"] != before:
            say(f"step {entry['step']}, loss {entry['loss']:.4f}")
        return entry["step"]
    return before
