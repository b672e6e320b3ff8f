"""Run what `.ci/run` runs before its slow lane, on the slowest processor that this machine can play.

    python scripts/check.py [--profile NAME|own|all] [--busy N] [--nice N] [--repeat N] [--default-lane] [--here]

    --profile   the processor that PyTorch and oneDNN see; default: the slowest. `own` is this machine's, `all` is each
    --busy      beside N programs that compute without end
    --nice      with less of the processors than other programs get: 0 to 19
    --repeat    as often on each profile; all must pass
    --default-lane   only README's test command, without what it leaves out where nothing was changed; without types
    --here      in this folder, with what is not committed yet, in place of a clone of HEAD

The steps are those of `.ci/run --until-slow`: README's test command in a fresh clone and a fresh environment, then all
types. One line for each run: profile, seconds on the clock, seconds of processors, tests that passed, failed and were
skipped. Exit code 0: all runs passed; 1: one failed; 2: bad input.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.profiles import PROFILES, playable_with  # noqa: E402 - the path comes first

OWN = "own"
SLOWEST = "avx2"
"""The default: the slowest kind that is sold. `portable` has its place in the tests of kernels."""

SUMMARY = re.compile(r"^(?:=+ )?(?=.*\b(?:passed|failed|skipped|errors?|no tests ran)\b).* in [\d.]+s\b")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # it ends with the check, however that ends
    for _ in range(10_000_000):
        pass
"""
GRACE_S = 60.0
"""Seconds in which `.ci/run` ends its processes, which it kills after 10, and removes its clone of gigabytes."""


@dataclass(frozen=True, kw_only=True)
class CheckRun:
    """Result of one run of `.ci/run`."""

    profile: str
    exit_code: int
    wall_s: float
    processor_s: float  # of the run and of all its processes, without the busy programs
    tests: Counter[str]

    def __str__(self) -> str:
        counts = ", ".join(f"{self.tests[kind]:,} {kind}" for kind in ("passed", "failed", "skipped"))
        state = "green" if self.exit_code == 0 else f"RED (exit code {self.exit_code})"
        return f"{self.profile:8s} {self.wall_s:6.0f} s {self.processor_s:7.0f} processor s   {counts}   {state}"


def processor_flags() -> frozenset[str]:
    """Instruction sets of this processor; empty where Linux does not tell them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, flags=re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def playable(flags: frozenset[str]) -> list[str]:
    """Profiles that a processor of these flags can play, the slowest first, and the processor itself."""
    names = playable_with(flags) if flags else []
    return [*names[names.index(SLOWEST) if SLOWEST in names else len(names) :], OWN]


def chosen(asked: str | None, names: Sequence[str]) -> list[str]:
    """Profiles to run on. Raises ValueError if the machine cannot play what was asked for."""
    if asked is None:
        return [names[0]]
    if asked == "all":
        return list(names)
    if asked not in names:
        raise ValueError(f"profile {asked}: this machine can play {', '.join(names)}; allowed are also: own, all")
    return [asked]


def count_tests(lines: Sequence[str]) -> Counter[str]:
    """Sum of the counts in the summaries of all runs of pytest; an error counts as a failure."""
    counts = Counter[str]()
    for line in lines:
        if SUMMARY.match(line):
            for number, kind in COUNT.findall(line):
                counts["failed" if kind == "error" else kind] += int(number)
    return counts


@contextmanager
def busy_programs(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` programs computing while the context is open."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    programs: list[subprocess.Popen[bytes]] = []
    try:
        programs.extend(subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(count))
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a command at the head of a process group; all of the group ends with the context."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_hear_interrupts,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            _end(process)
        if process.stdout is not None:
            process.stdout.close()


def _hear_interrupts() -> None:
    """A script ignores SIGINT in what it starts in the background, and a program hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt as Ctrl-C does, so that pytest ends its workers and bash removes the clone; then kill what is left."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_once(profile: str, *, root: Path, busy: int, nice: int, lane: str, here: bool) -> CheckRun:
    """Run `.ci/run` of the repository at `root` with the option `lane`; its output goes to stderr."""
    command = ["nice", "-n", str(nice), str(root / ".ci" / "run"), lane, *(["--here"] if here else [])]
    lines, start_s = [], time.monotonic()
    environment = os.environ | ({} if profile == OWN else PROFILES[profile].environment)
    with busy_programs(busy), process_group(command, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
        _, status, usage = os.wait4(process.pid, 0)  # with the time of all its processes that have ended
        process.returncode = os.waitstatus_to_exitcode(status)
    return CheckRun(
        profile=profile,
        exit_code=process.returncode,
        wall_s=time.monotonic() - start_s,
        processor_s=usage.ru_utime + usage.ru_stime,
        tests=count_tests(lines),
    )


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Type of an option: a whole number within bounds."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"{value}: allowed are {least} {'and more' if most is None else f'to {most}'}"
            )
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--profile", metavar="NAME", help=f"{', '.join(PROFILES)}, own or all; default: the slowest")
    parser.add_argument("--busy", type=number(0), default=0, metavar="N")
    parser.add_argument("--nice", type=number(0, 19), default=0, metavar="N")
    parser.add_argument("--repeat", type=number(1), default=1, metavar="N")
    parser.add_argument(
        "--default-lane", dest="lane", action="store_const", const="--default-lane", default="--until-slow"
    )
    parser.add_argument("--here", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the check on each profile, as often as asked for."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        profiles = chosen(given.profile, playable(processor_flags()))
    except ValueError as error:
        parser.error(str(error))
    runs = []
    for profile in profiles:
        for _ in range(given.repeat):
            runs.append(
                run_once(profile, root=root, busy=given.busy, nice=given.nice, lane=given.lane, here=given.here)
            )
            print(runs[-1], flush=True)
    return int(any(run.exit_code for run in runs))


def end_with_signals() -> None:
    """End all that was started on SIGTERM, and where the terminal closes, as well as on Ctrl-C."""
    for number_of in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_of, lambda got, _: sys.exit(128 + got))


if __name__ == "__main__":
    end_with_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
