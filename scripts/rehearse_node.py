"""Rehearse the way to a GPU node without a network, on this machine: bundle, install, measure, page, apply.

    python scripts/rehearse_node.py PYTHON [--folder FOLDER] [--only NAME,NAME] [--extras NAMES] [--glibc 2.28]

    PYTHON      the node's interpreter: one that has PyTorch, in an environment like the node's
    --folder    where everything goes; new or empty  [default: a temporary folder, which is removed]
    --only      measurements to take  [default: all of `benchmarks/gpu.py`, about ten minutes]
    --extras    extras of Meshwright to take along  [default: kernels]
    --glibc     the C library of the wheels  [default: 2.28]

Steps, as in docs/guides/gpu-node.md:

    list        packages of the node
    bundle      wheels that it lacks; needs an index of packages
    install     without one, and every module is imported
    measure     `benchmarks/gpu.py --dry-run`, twice: the second call goes on from the first one's archive, on a machine
                that has forgotten all else
    page        one page of the archive
    apply       defaults and documents, in a copy of this checkout

Nothing of this checkout changes. The first step that fails ends it.

Exit code 0: all steps passed; 1: one failed; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import gpu, gpu_results  # noqa: E402 - the path comes first

OFFLINE = {"PIP_INDEX_URL": "http://localhost:9", "PIP_EXTRA_INDEX_URL": "", "HF_HUB_OFFLINE": "1"}
"""Variables under which pip finds no index."""
LEFT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.pyc", ".*_cache")
ANYWHERE = ("tests", "kernels-8b", "step-moe", "device", "gemm", "ingest", "saving")
"""Measurements of a dry run that fail on a CPU by lack of time alone."""
WITHOUT_PACKAGE = 3
"""Exit code of a command that needs an extra: `--extras` names those that the node gets."""
FIRST = "doctor"
"""Measurement of the first call: the quickest."""


class StepError(Exception):
    """A step failed; its output was printed."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Node, folder, and what to take along."""

    python: Path
    folder: Path
    only: str | None
    extras: str
    glibc: str

    @property
    def checkout(self) -> Path:
        """The copy that the node has."""
        return self.folder / "checkout"

    @property
    def archive(self) -> Path:
        return self.folder / "gpu.tar.gz"

    def list_packages(self) -> None:
        """Write `have.json` as the guide does."""
        listed = self._output([self.python, "-m", "pip", "list", "--format=json"])
        (self.folder / "have.json").write_text(listed, encoding="utf-8")

    def bundle(self) -> None:
        """Collect the wheels for this node."""
        version = self._output([self.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
        collect = [sys.executable, ROOT / "scripts" / "bundle.py", self.folder / "bundle"]
        target = ["--have", self.folder / "have.json", "--python", version, "--glibc", self.glibc]
        self._run([*collect, *target, "--extras", self.extras, "--also", "sybil", "pytest", "hypothesis"])

    def install(self) -> None:
        """Install it without an index, and import everything."""
        self._run(
            ["sh", self.folder / "bundle" / "install.sh", self.folder / "site"], PYTHON=str(self.python), **OFFLINE
        )
        self._run([self.python, self.folder / "bundle" / "check.py"], **self._node())

    def measure(self) -> None:
        """Take the measurements in two calls, of which the second knows the archive alone."""
        shutil.copytree(ROOT, self.checkout, ignore=LEFT)
        script = [self.python, self.checkout / "benchmarks" / "gpu.py", "--dry-run", "--archive", self.archive]
        self._run([*script, "--out", self.folder / "first", "--only", FIRST], **self._node())
        only = [] if self.only is None else ["--only", self.only]
        second = [*script, "--out", self.folder / "second", "--from", self.archive, *only]
        self._run(second, **self._node(), allowed=(0,) if only else (0, 1))  # a node without a GPU cannot take all
        rows = json.loads((self.folder / "second" / gpu_results.RECORD).read_text(encoding="utf-8"))["measurements"]
        if FIRST not in {row["name"] for row in rows}:
            raise StepError(f"the second call lost {FIRST}, which the archive has")
        for row in rows:
            if row["exit_code"] != 0:
                print(f"{'':8s} not measured here: {row['name']}: {row['exit_code']}, {' '.join(row['stderr'][-2:])}")
                is_ended = isinstance(row["exit_code"], int) and row["exit_code"] != WITHOUT_PACKAGE
                if row["name"] in ANYWHERE and is_ended:
                    raise StepError(f"{row['name']} needs no GPU in a dry run")

    def page(self) -> None:
        """Make the page."""
        self._run([*self._results(), "--page", self.archive, "--out", self.folder / "gpu.html"], **self._node())

    def apply(self) -> None:
        """Renew defaults and documents of the copy."""
        copy = self.folder / "applied"
        shutil.copytree(self.checkout, copy)
        self._run([*self._results(), "--apply", self.archive, "--root", copy], **self._node())

    def _results(self) -> list[str | Path]:
        return [self.python, self.checkout / "benchmarks" / "gpu.py"]

    def _node(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder / "site"), **OFFLINE}

    def _run(self, command: Sequence[str | Path], *, allowed: Collection[int] = (0,), **variables: str) -> None:
        """Run a command of the guide in the folder; its output is seen."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
        print("+", *(str(part) for part in command), file=sys.stderr, flush=True)
        code = subprocess.run(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL).returncode
        if code not in allowed:
            raise StepError(f"exit code {code}")

    def _output(self, command: Sequence[str | Path]) -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise StepError(f"exit code {done.returncode}")
        return done.stdout


STEPS = {
    "list": Rehearsal.list_packages,
    "bundle": Rehearsal.bundle,
    "install": Rehearsal.install,
    "measure": Rehearsal.measure,
    "page": Rehearsal.page,
    "apply": Rehearsal.apply,
}


def rehearse(rehearsal: Rehearsal) -> int:
    """Take all steps; return 0, or 1 after the first that fails."""
    for name, step in STEPS.items():
        try:
            step(rehearsal)
        except StepError as error:
            print(f"{name:8s} failed: {error}")
            return 1
        print(f"{name:8s} done", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the input, and rehearse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", type=Path)
    parser.add_argument("--folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", metavar="NAMES")
    parser.add_argument("--extras", default="kernels", metavar="NAMES")
    parser.add_argument("--glibc", default="2.28", metavar="VERSION")
    given = parser.parse_args(arguments)
    python = Path(shutil.which(given.python) or given.python).absolute()
    try:
        asked = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True)
    except OSError as error:
        parser.error(f"PYTHON: {given.python} cannot be started: {error.strerror}")
    if asked.returncode or not asked.stdout.strip():
        parser.error(f"PYTHON: {given.python} has no PyTorch; a node has it in its image")
    names = [step.name for step in gpu.steps(budget_s=1.0, scale=gpu.DRY)]
    if given.only is not None and (unknown := set(given.only.split(",")) - {*names}):
        parser.error(f"--only: no measurement is called {', '.join(sorted(unknown))}; allowed are {', '.join(names)}")
    try:
        if given.folder is not None:
            given.folder.mkdir(parents=True, exist_ok=True)
            if any(given.folder.iterdir()):
                parser.error(f"--folder: {given.folder} is not empty")
    except OSError as error:
        parser.error(f"--folder: {given.folder}: {error.strerror}")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = Path(temporary) if given.folder is None else given.folder.absolute()
        return rehearse(
            Rehearsal(python=python, folder=folder, only=given.only, extras=given.extras, glibc=given.glibc)
        )


if __name__ == "__main__":
    sys.exit(main())
