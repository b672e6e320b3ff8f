"""Access to a node: files under a root folder, and commands with a time limit.

All reading and writing goes through `Host`, so that the same code looks at this machine, at a node whose file
system is mounted in a container (`--root /host`), and at a folder of recorded files in a test. A file or
command that cannot be read raises `Unseen` with the reason, and never returns an empty value.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError

COMMAND_TIMEOUT_S = 30.0
_WRITE_BITS = 0o222


class Unseen(Exception):  # noqa: N818 - a finding, not an error: the check is skipped with this reason
    """Something that this process cannot read, with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """Output of a command. `seconds` is its duration."""

    code: int
    stdout: str
    stderr: str = ""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """The last line of stderr, or of stdout: usually the line that names the error."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


Runner = Callable[[Sequence[str], float], CommandOutput]
"""Runs a command with a limit in seconds. Raises Unseen when it cannot be run or does not end."""


def run_command(arguments: Sequence[str], timeout_s: float) -> CommandOutput:
    """Run a command of this machine, in the C locale, so that its output can be parsed."""
    start_s = time.perf_counter()
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        started = subprocess.Popen(
            list(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environment, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise Unseen(f"{arguments[0]} is not installed") from None
    except OSError as error:
        raise Unseen(f"{arguments[0]} cannot be run: {error.strerror}") from None
    with started:
        try:
            stdout, stderr = started.communicate(timeout=timeout_s)
        except BaseException as error:  # kills the process group, and so its children
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                line = " ".join(arguments)[:80]
                raise Unseen(f"{line} did not end within {timeout_s:g} s") from None
            raise
    seconds = time.perf_counter() - start_s
    return CommandOutput(code=started.returncode, stdout=stdout, stderr=stderr, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node: the root folder of its file system, and the runner of its commands."""

    root: Path = Path("/")
    runner: Runner = run_command
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, name: str) -> Path:
        """Return this process's path of the node's file `name`."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Return the stripped text of a file. Raises Unseen."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise Unseen(f"{name}: {error.strerror}") from None

    def read_int(self, name: str) -> int:
        """Return the whole number that a file holds. Raises Unseen, also when it holds something else."""
        text = self.read(name)
        try:
            return int(text, 0)
        except ValueError:
            raise Unseen(f"{name} holds {text[:40]!r}, not a number") from None

    def begins(self, name: str, beginning: bytes) -> bool:
        """Return True if a binary file starts with `beginning`; False if it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(len(beginning)) == beginning
        except OSError:
            return False

    def glob(self, pattern: str) -> list[str]:
        """Return the names of the node's files that match, in natural order (cpu2 before cpu10)."""
        found = self.root.glob(pattern.lstrip("/"))
        return sorted((f"/{p.relative_to(self.root)}" for p in found), key=_natural)

    def exists(self, name: str) -> bool:
        """Return True if the node has this file and this process may see it."""
        return os.path.lexists(self.path(name))

    def why_not_writable(self, name: str) -> str | None:
        """Return None when the file can be written, else the reason.

        The mode is checked too: root may open any file, but the kernel rejects writes to a read-only setting.
        """
        path = self.path(name)
        try:
            if not path.stat().st_mode & _WRITE_BITS:
                return "read-only"
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                return "read-only file system"
        except OSError as error:
            return str(error.strerror)
        return None if os.access(path, os.W_OK) else "needs root"

    def write(self, name: str, value: str) -> None:
        """Write a setting with one system call, as the kernel requires. Raises OSError; never creates a file."""
        handle = os.open(self.path(name), os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(handle, value.encode())
        finally:
            os.close(handle)

    def run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandOutput:
        """Run a command and return its output, whatever its exit code. Raises Unseen."""
        return self.runner(arguments, timeout_s)

    def ask(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Return the output of a command. Raises Unseen with its last line when it fails."""
        output = self.run(*arguments, timeout_s=timeout_s)
        if output.code:
            raise Unseen(f"{arguments[0]}: {output.problem}")
        return output.stdout

    @property
    def name(self) -> str:
        """Name of the node: Slurm's when it runs this process, else the kernel's."""
        if name := self.environment.get("SLURMD_NODENAME"):
            return name
        try:
            return self.read("/proc/sys/kernel/hostname")
        except Unseen:
            return "unknown"

    @property
    def boot_id(self) -> str | None:
        """Identifier that the kernel draws at every boot."""
        try:
            return self.read("/proc/sys/kernel/random/boot_id")
        except Unseen:
            return None


def host_at(root: Path) -> Host:
    """Return the node whose file system begins at `root`. Raises InputError when that is not a folder."""
    if not root.is_dir():
        raise InputError("there is no such folder for a node's file system", got=str(root))
    return Host(root=root)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.findall(r"\d+|\D+", name)]
