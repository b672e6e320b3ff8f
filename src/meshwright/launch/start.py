"""Write the files of a dispatch, and run its commands."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from meshwright.errors import InfeasibleError, InputError, MissingDependencyError
from meshwright.files import write_atomically
from meshwright.training.parent_watch import signal_at_end_of_parent

INSTALL = {
    "sbatch": "install Slurm's client (Debian: apt-get install slurm-client), or run this where jobs are submitted",
    "kubectl": "install kubectl and point it at the cluster",
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
        raise MissingDependencyError(
            f"{program} is not on this machine", hint=INSTALL.get(program, f"install {program}")
        )


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
