"""Test the package with the versions of Python and of its dependencies that it declares to support.

    python scripts/test_versions.py [--list] [--only NAME ...] [--full] [--tests PATH ...] [--keep] [-n N]

    --list    print the cases, with their packages and tests, and run none
    --only    these cases; otherwise all
    --full    more tests of the same half
    --tests   these tests in place of a case's own
    --keep    leave the environments for the next time; otherwise each is removed after its tests
    -n        test processes; 0, the default, is one without workers
    --with-cuda-packages   install PyTorch's CUDA libraries, gigabytes, where its build needs them

A case is an interpreter, requirements of pip and a selection of tests. Versions come from pyproject.toml: the oldest of
a package is its lower bound, the newest is the newest that pip finds for that Python. Each case gets an environment
below Meshwright's cache. Before pip installs PyTorch it says which build: one for GPUs depends on CUDA libraries, and
does not import without them, so the case is skipped. pip takes a CPU build where one is offered: PIP_EXTRA_INDEX_URL
adds PyTorch's own index of them.

Exit code 0: what ran passed; 1: a case failed; 2: bad input; 3: no case could run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.files import default_cache
from meshwright.interpreters import PythonVersion, search_python

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a program has only its own folder there
from scripts.check import count_tests, end_with_signals, process_group  # noqa: E402

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?P<bounds>[^;]*)")
CUDA_PACKAGE = re.compile(r"^(?:nvidia|cuda)-")
NOT_TO_BE_HAD = re.compile(
    r"No matching distribution found for .*|.*Connection.*(?:refused|timed out).*"
    r"|.*Temporary failure in name resolution.*"
)
"""Messages of pip when an index has no such package, or is not reached."""


class CannotRunError(Exception):
    """The interpreter or the packages of a case cannot be had here."""


class InstallationError(Exception):
    """pip refuses or fails to install packages that are there: the declared versions do not go together."""


class Outcome(StrEnum):
    """Verdict on a case."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Half:
    """A part of the package that is tested by itself."""

    extras: tuple[str, ...]  # of the package
    tools: tuple[str, ...]  # packages of the extra `test`
    tests: tuple[str, ...]
    full: tuple[str, ...]  # more tests


RUNNER = ("hypothesis", "pytest", "pytest-xdist", "sybil")
PLANNING = Half(
    extras=("data", "mlperf"),
    tools=RUNNER,
    tests=("tests/unit", "tests/laws"),  # tests of the doing half are skipped where PyTorch is absent
    full=("tests/published", "src"),
)
DOING = Half(
    extras=("data", "torch"),
    tools=(*RUNNER, "transformers", "triton"),
    tests=("tests/parity", "tests/training/models", "tests/unit/kernels"),
    full=("tests/training", "tests/engines/native"),
)


@dataclass(frozen=True, kw_only=True)
class VersionCase:
    """A combination of versions."""

    name: str
    python: PythonVersion
    half: Half
    pins: tuple[str, ...] = ()  # requirements beside those of the half
    without: tuple[str, ...] = ()  # tests that belong to another version

    def tests(self, *, full: bool) -> tuple[str, ...]:
        """Tests to run, as arguments of pytest."""
        left_out = tuple(f"--ignore={path}" for path in self.without)
        return self.half.tests + (self.half.full if full else ()) + left_out

    def requirements(self) -> tuple[str, ...]:
        """Everything that pip installs, the package included."""
        pinned = {name_of(pin) for pin in self.pins}
        tools = (requirement(name) for name in self.half.tools if name not in pinned)
        return *self.pins, *tools, "-e", f"{ROOT}[{','.join(self.half.extras)}]"


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Result of a case."""

    case: VersionCase
    outcome: Outcome
    about: str  # counts of tests, or the reason
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:8s}{self.case.name:24s}{self.seconds:6.0f} s  {self.about}"


@cache
def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(*, extras: Iterable[str] = ()) -> dict[str, str]:
    """Bounds of the package's dependencies, and of those of `extras`, by name: `{"numpy": ">=1.26"}`."""
    lines = list(project()["dependencies"])
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    found = (REQUIREMENT.match(line) for line in lines)
    return {m["name"]: m["bounds"].strip() for m in found if m and m["name"] != project()["name"]}


def name_of(line: str) -> str:
    """Name of the package that a requirement asks for."""
    found = REQUIREMENT.match(line)
    return found["name"] if found else ""


def requirement(name: str) -> str:
    """A package with the bounds that pyproject.toml declares."""
    return name + declared(extras=("test", "torch", "kernels"))[name]


def oldest(name: str) -> str:
    """A package at its lower bound: `numpy==1.26`."""
    bounds = re.search(r"(?:>=|==)\s*([\w.]+)", requirement(name))
    if bounds is None:
        raise ValueError(f"pyproject.toml declares no lower bound of {name}")
    return f"{name}=={bounds[1]}"


def pythons() -> list[PythonVersion]:
    """Versions of Python that the classifiers name, the oldest first."""
    named = (re.search(r"Python :: 3\.(\d+)$", line) for line in project()["classifiers"])
    return sorted((3, int(found[1])) for found in named if found)


def readme_torch() -> str:
    """The build of PyTorch that README's commands install, the one that other tests run with."""
    found = re.search(r"torch==[\w.]+", (ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("README.md installs no torch")
    return found[0]


def cases() -> list[VersionCase]:
    """All cases, the cheapest first."""
    first, *later = pythons()
    torch = readme_torch()
    planning = [VersionCase(name="oldest-planning", python=first, half=PLANNING, pins=oldest_dependencies())]
    planning += [
        VersionCase(name=f"python3.{minor}-planning", python=(major, minor), half=PLANNING) for major, minor in later
    ]
    doing = [VersionCase(name="newest-doing", python=first, half=DOING, pins=(torch,))]
    doing += [
        VersionCase(name=f"{package}-oldest", python=first, half=DOING, pins=(torch, oldest(package)))
        for package in ("numpy", "transformers")
    ]
    doing.append(_oldest_triton(first, torch))
    doing += [
        VersionCase(name=f"python3.{minor}-doing", python=(major, minor), half=DOING, pins=(torch,))
        for major, minor in later
    ]
    doing.append(VersionCase(name="torch-oldest", python=later[0], half=DOING, pins=(oldest("torch"),)))
    return planning + doing


def _oldest_triton(python: PythonVersion, torch: str) -> VersionCase:
    """Newer NumPy does not suit the interpreter; scripts/check_triton.py judges what the compiler makes."""
    return VersionCase(
        name="triton-oldest",
        python=python,
        half=DOING,
        pins=(torch, oldest("triton"), oldest("numpy")),
        without=("tests/unit/kernels/test_inspection.py",),
    )


def oldest_dependencies() -> tuple[str, ...]:
    """Every dependency of the planning half at its lower bound."""
    return tuple(oldest(name) for name in declared())


def run_case(case: VersionCase, *, tests: Sequence[str], processes: int, keep: bool, cuda: bool) -> CaseResult:
    """Make the environment, run the tests, remove the environment."""
    start_s = time.monotonic()
    folder = default_cache() / "versions" / case.name
    try:
        python = make_environment(case, folder, cuda=cuda)
        print(f"+ {case.name}: {versions_in(python, case)}", file=sys.stderr)
        outcome, about = run_tests(python, tests, processes=processes)
    except CannotRunError as error:
        outcome, about = Outcome.SKIPPED, str(error)
    except InstallationError as error:
        outcome, about = Outcome.FAILED, str(error)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return CaseResult(case=case, outcome=outcome, about=about, seconds=time.monotonic() - start_s)


def make_environment(case: VersionCase, folder: Path, *, cuda: bool) -> Path:
    """Make or complete the environment in `folder`; return its interpreter. Raises CannotRunError."""
    python = folder / "bin" / "python"
    if not python.exists():
        looked = search_python(oldest=case.python, newest=case.python)
        if looked[-1].python is None:
            searched = "; ".join(f"{one.location}: {one.found}" for one in looked)
            raise CannotRunError(f"no Python 3.{case.python[1]}: {searched}")
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([looked[-1].python, "-m", "venv", folder], check=True)
    if case.half is DOING and not cuda:
        _refuse_cuda_packages(python, case)
    pip(python, "--quiet", *case.requirements())
    return python


def _refuse_cuda_packages(python: Path, case: VersionCase) -> None:
    """Ask pip which PyTorch it would install. Raises CannotRunError if that depends on CUDA libraries."""
    (torch,) = (pin for pin in case.pins if name_of(pin) == "torch")
    printed = pip(python, "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", torch)
    (found,) = json.loads(printed)["install"]
    names = (name_of(line) for line in found["metadata"].get("requires_dist", ()))
    needed = [name for name in names if CUDA_PACKAGE.match(name)]
    if needed and sys.platform == "linux":  # the packages are for Linux alone
        raise CannotRunError(
            f"PyTorch's build for Python 3.{case.python[1]} depends on {len(needed)} CUDA packages "
            f"({needed[0]}, ...): offer pip a CPU build, or use --with-cuda-packages"
        )


def pip(python: Path, *arguments: str) -> str:
    """Run `pip install` and return its output. Raises CannotRunError or InstallationError."""
    # Without a wheel for its Python a package would be compiled, if a compiler is there.
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        absent = NOT_TO_BE_HAD.search(done.stderr)
        if absent:
            raise CannotRunError(absent[0].strip())
        raise InstallationError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def versions_in(python: Path, case: VersionCase) -> str:
    """Versions of Python and of the packages that the case is about."""
    names = [*declared(), *(["torch", "transformers", "triton"] if case.half is DOING else [])]
    code = """
import importlib.metadata as m, platform, sys
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in sys.argv[1:]))
"""
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_tests(python: Path, tests: Sequence[str], *, processes: int) -> tuple[Outcome, str]:
    """Run the tests; return the outcome and the counts."""
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [str(python), "-m", "pytest", "-q", "-n", str(processes), *options, *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = []
    with process_group(command, environment, folder=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
        process.wait()
    counts = count_tests(lines)
    about = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("passed", "failed", "skipped"))
    has_passed = process.returncode == 0 and counts["passed"]  # a run in which all were skipped shows nothing
    return (Outcome.PASSED if has_passed else Outcome.FAILED), about


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in cases()]
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--tests", nargs="+", metavar="PATH")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--with-cuda-packages", action="store_true")
    parser.add_argument("-n", dest="processes", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases one after the other, and print their results."""
    given = _parser().parse_args(arguments)
    wanted = [case for case in cases() if case.name in given.only]
    if given.list:
        for case in wanted:
            print(f"{case.name:24s}Python 3.{case.python[1]}  {' '.join(case.pins)}")
            print(f"{'':24s}{' '.join(given.tests or case.tests(full=given.full))}")
        return 0
    results = []
    for case in wanted:
        tests = given.tests or case.tests(full=given.full)
        result = run_case(case, tests=tests, processes=given.processes, keep=given.keep, cuda=given.with_cuda_packages)
        results.append(result)
        print(result, flush=True)
    return exit_code(results)


def exit_code(results: Iterable[CaseResult]) -> int:
    """0: what ran passed; 1: a case failed; 3: none ran."""
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return 1
    return 0 if Outcome.PASSED in outcomes else 3


if __name__ == "__main__":
    end_with_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
