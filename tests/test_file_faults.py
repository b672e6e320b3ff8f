"""Every command at every file operation: killed, a full disk, an error of the disk, a torn write, a power cut.

The same command again continues or starts clean, and leaves the files of a run without a fault. Of each
command a few faults are tried here, drawn by its name, and more of them in the slow lane.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.fault_cases import CASES, FAULTY_CHILDREN, LAUNCHED, PLANNED, PREPARED, TUNINGS, Case, write_inputs
from tests.file_faults import FaultKind, cut_power
from tests.killing import LIMIT_S, is_there
from tests.training.test_processes import is_running
from tests.warm import WarmProcess

from meshwright.records.ingest import read_ingest
from meshwright.records.offline import read_offline
from meshwright.training.checkpoints import files as checkpoint_files

# --- one command in a folder that is always at the same place ---


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit code and output of a command."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """`folder/work` is a copy of `inputs` for each command line."""

    folder: Path
    inputs: Path
    processes: set[int] = field(default_factory=set)  # that a command had, of those that are known by number

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def begin(self) -> None:
        for folder in (self.work, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        self.temporary.mkdir()
        self.processes.clear()
        shutil.copytree(self.inputs, self.work, symlinks=True)

    def run(
        self,
        line: str,
        *,
        script: str = "",
        kind: str = "none",
        number: int = 0,
        under: Sequence[str] = (),
        has_children: bool = False,
    ) -> Ended:
        """Run `meshwright LINE`, with one fault. `under`: the arguments of Python that start a launcher of it."""
        record = self.folder / "operations.jsonl"
        for path in (record, record.with_suffix(".count")):
            path.unlink(missing_ok=True)
        shutil.rmtree(record.with_suffix(".kept"), ignore_errors=True)
        start = self.folder / "start.py"
        start.write_text(
            f"{script}\nimport os\nfrom pathlib import Path\nfrom tests.file_faults import install\n"
            f"install(Path({str(self.work)!r}), kind={str(kind)!r}, number={number}, record=Path({str(record)!r}), "
            f"passed_over='node', "  # a kernel takes a value whole or not at all
            f"launcher={'os.getppid()' if under else None})\n"
            "import tempfile\ntempfile.tempdir = None\n" + (LAUNCHED if under else "")
        )
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HOME": str(self.work / "home"), "MESHWRIGHT_CACHE": str(self.work / "cache"),
            "XDG_CONFIG_HOME": str(self.work / "home"),
            "PYTHONPATH": os.pathsep.join([str(self.folder / "children"), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300", "TMPDIR": str(self.temporary),
        }  # fmt: skip
        (self.folder / "children").mkdir(exist_ok=True)
        (self.folder / "children" / "sitecustomize.py").write_text(FAULTY_CHILDREN)
        if has_children:
            environment["FAULTS_OF_CHILDREN"] = str(start)
        process: Any
        if under:
            process = subprocess.Popen(
                [sys.executable, *under, str(start), *shlex.split(line)], cwd=self.work, env=environment, text=True,
                start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        else:
            process = WarmProcess(shlex.split(line), folder=self.work, environment=environment, script=start)
        try:
            stdout, stderr = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode is not None
        self.processes.update({process.pid}, (o["process"] for o in self.operations()))
        if kind in (FaultKind.CUT, FaultKind.LOST):
            cut_power(self.work, kind=FaultKind(kind), record=record, passed_over="node")
        return Ended(exit_code=process.returncode, stdout=stdout, stderr=stderr)

    def take(self, case: Case, *, kind: str = "none", number: int = 0) -> Ended:
        """Run the command of the case, with one fault."""
        return self.run(
            case.line, script=case.script, kind=kind, number=number, under=case.under, has_children=case.has_children
        )

    def operations(self) -> list[dict[str, Any]]:
        record = self.folder / "operations.jsonl"
        lines = record.read_text().splitlines() if record.exists() else []
        return [entry for entry in map(json.loads, lines) if "number" in entry]

    def left_behind(self) -> list[str]:
        """Processes, temporary files and segments of shared memory that the commands since `begin` left."""
        deadline_s = time.monotonic() + LIMIT_S
        while (left := [p for p in self.processes if is_there(p) or is_running(p)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        shared = Path("/dev/shm")
        segments = [p.name for p in shared.glob("*") if self.processes & set(map(int, re.findall(r"\d+", p.name)))]
        files = [p.name for p in self.temporary.iterdir() if not p.name.startswith(KEPT_BY_PYTORCH)]
        return [*map(str, left), *segments, *files]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    """The inputs of all commands."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, tiny_text)
    return folder


@pytest.fixture(scope="session")
def place(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The place of commands that need no training."""
    return Place(folder=tmp_path_factory.mktemp("place"), inputs=inputs)


@pytest.fixture(scope="session")
def trained(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The place of commands that need finished trainings, and an export of the weights of one."""
    place.begin()
    for line in PREPARED:
        ended = place.run(line)
        assert ended.exit_code == 0, ended.stderr
    folder = tmp_path_factory.mktemp("trained") / "work"
    place.work.rename(folder)
    return Place(folder=place.folder, inputs=folder)


@pytest.fixture(scope="session")
def place_of(request: pytest.FixtureRequest) -> Callable[[str], Place]:
    """The place of a command."""
    of_trained = ("train --resume", "checkpoint", "evaluate", "mlperf run")
    complete = ("--dequantised", "of a sum")  # their adapters are among the inputs

    def find(name: str) -> Place:
        needs = name.startswith(of_trained) and not name.endswith(complete)
        return request.getfixturevalue("trained" if needs else "place")

    return find


# --- what is left ---

KEPT_BY_PYTORCH = ("torchelastic_", "torchinductor_")
"""Temporary folders that torchrun keeps for its logs, and PyTorch for kernels."""
TIMES = re.compile(
    r"(_s|_ms|_s_\w+|per_s\w*|^s|seconds|started|ended|made|date|written|saved_at|mfu\w*|hfu\w*|throughput|time_s|"
    r"straggler\w*|memory_bytes|memory|\w*_bytes_per_s|load\w*|sha256|manifest_sha256|id|command|pid|boot_id|url|num_calls|folder|peak_\w+|outliers|\w+_ratio|by_replica|tracked_stats|mean_in_flight|busy)$"
)
"""Keys of times, of what follows from them, and of what names one process."""
MEASURED = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?")  # a cell of a table, unless its column has counts
PASSING = re.compile(
    r"\.Org\..{8}|\..+\.[0-9a-f]{8}\.partial|\..*lock|stdout|stderr|rank-\d+\.txt|"
    r"server\.log|\.metadata"
)
"""Names of files that differ from run to run: locks, logs, indices of checkpoints, which their manifests check, and
partial files, which are removed after an hour."""


def left(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Content of the files of a command by path, without times."""
    files = [
        p for name in names for p in ([folder / name] if (folder / name).is_file() else (folder / name).rglob("*"))
    ]
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(files)
        if path.is_file() and not any(map(PASSING.fullmatch, path.relative_to(folder).parts))
    }


def _content(path: Path) -> Any:
    if path.suffix == ".html":
        return path.read_text().rstrip().endswith("</html>")
    if path.name == "manifest.json" and (fault := checkpoint_files.verify(path.parent)):
        return fault
    if path.name == "record.json" and "identity" in (record := json.loads(path.read_text())):
        whole_run = {key: record["statistics"][key] for key in ("steps", "tokens", "last_loss")}
        return _timeless(whole_run | {key: record[key] for key in ("run", "ending", "identity", "events", "format")})
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [_timeless(row) for row in csv.DictReader(file)]
        return [  # a torn row lacks its last cells
            {key: text for key, text in row.items() if key.startswith("num_") or not MEASURED.fullmatch(text or "")}
            for row in rows
        ]
    if path.name.startswith("result_"):  # of a benchmark
        rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
        return [_timeless({row["key"]: row["value"]}) for row in rows]
    return path.read_bytes()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key != "resumed"}  # the times of resumptions
        return {key: _timeless(item) if not TIMES.search(key) else "..." for key, item in kept.items()}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


# --- faults ---


def whole(place: Place, case: Case) -> dict[str, Any]:
    """Content of the files that the command writes without a fault."""
    place.begin()
    ended = place.take(case)
    assert ended.exit_code == 0, ended.stderr
    if case.is_parallel:
        assert place.left_behind() == []
    return left(place.work, case.leaves)


def problem(place: Place, case: Case, expected: dict[str, Any], *, kind: FaultKind, number: int) -> str | None:
    """Return the error of the command with one fault, or of the same command after it; None: there is none."""
    place.begin()
    faulty = place.take(case, kind=kind, number=number)
    where = next((entry for entry in place.operations() if entry["number"] == number), None)
    at = f"{kind} at {number}: {where and where['name']} {where and where['path']}: "
    if kind in (FaultKind.ENOSPC, FaultKind.EIO):
        if case.under and faulty.exit_code == 1 and "exitcode  : 2" in faulty.stderr:  # with a traceback of torchrun
            faulty = replace(faulty, exit_code=2, stderr=faulty.stderr[: faulty.stderr.rfind("Traceback")])
        said = faulty.stdout + faulty.stderr
        if faulty.exit_code not in (0, 2) or "Traceback" in said or (faulty.exit_code == 2 and "error:" not in said):
            return at + f"exit code {faulty.exit_code}: {said[-1500:]}"
        if faulty.exit_code == 0 and (different := difference(expected, left(place.work, case.leaves))):
            return at + f"exit code 0 with another result: {different}"
    elif kind is FaultKind.ALONE and faulty.exit_code == 1 and (case.under or " was lost: " in faulty.stderr):
        pass  # the launcher has ended the other one
    elif faulty.exit_code not in (0, -signal.SIGKILL):
        return at + f"exit code {faulty.exit_code}: {faulty.stderr[-1500:]}"
    try:
        if case.leaves and not difference(expected, left(place.work, case.leaves)):
            return None  # the fault came after the last change
    except (ValueError, OSError):  # half a file
        pass
    again = place.take(case)
    if again.exit_code == 2 and case.again and case.hint in again.stderr:
        if case.again == case.line:  # what was measured before the fault is whole
            folder = place.work / case.leaves[0]
            read_ingest(folder) if folder.name == "ingest" else read_offline(folder / "offline.json")
            shutil.rmtree(folder)
        again = place.run(case.again, script=case.script)
    if again.exit_code != 0:
        return at + f"again: exit code {again.exit_code}: {again.stderr[-1500:]}"
    different = difference(expected, left(place.work, case.leaves))
    if not different and case.is_parallel and (behind := place.left_behind()):
        return at + f"again: it leaves {behind}"
    return None if not different else at + f"again: {different}"


def difference(expected: Any, found: Any, *, at: str = "") -> str | None:
    """The first difference of two documents."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            if key not in expected or key not in found:
                return f"{at}/{key} is {'missing' if key in expected else 'new'}"
            if different := difference(expected[key], found[key], at=f"{at}/{key}"):
                return different
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return next((d for i, (e, f) in pairs if (d := difference(e, f, at=f"{at}[{i}]"))), None)
    return None if expected == found else f"{at}: {str(expected)[:200]} became {str(found)[:200]}"


def kinds_of(case: Case) -> list[FaultKind]:
    """Faults of the command; a process is killed alone where there are others."""
    return [k for k in FaultKind if k is not FaultKind.NONE and (case.is_parallel or k is not FaultKind.ALONE)]


def drawn(name: str, operations: Sequence[dict[str, Any]], *, each: int) -> list[tuple[FaultKind, int]]:
    """`each` faults of each kind, spread over the operations, drawn by the name of the command."""
    draw = random.Random(zlib.crc32(name.encode()))
    faults: list[tuple[FaultKind, int]] = []
    different = {(o["name"], o["path"], i % 3): o for i, o in enumerate(operations)}.values()  # few of many writes
    for kind in kinds_of(CASES[name]):
        written = [o["number"] for o in different if kind is not FaultKind.TORN or o["name"] == "write"]
        parts = [written[i * len(written) // each : (i + 1) * len(written) // each] for i in range(each)]
        faults += [(kind, draw.choice(part)) for part in parts if part]
        if kind is FaultKind.LOST:
            faults.append((kind, len(operations) + 1))  # after the end
    return faults


QUICK_COMMANDS = {
    "train": 1, "train on two processes": 1, "train --resume": 1,
    "checkpoint to-hf": 1, "checkpoint from-hf": 1, "checkpoint to-hf --merge": 1, "checkpoint to-hf of a sum": 1,
    "export": 2, "import": 2, "launch": 1, "report": 1, "estimate": 1, "plan": 1, "evaluate": 1,
    "bench train": 2, "bench ingest": 2, "bench serve": 1, "bench device": 1, "bench kernels": 1,
    "mlperf package": 2, "mlperf rcp": 1, "tune system": 2, "tune gemm": 1, "calibrate": 1,
}  # fmt: skip
"""Faults of each command in the default lane."""


@pytest.mark.parametrize("name", QUICK_COMMANDS)
def test_a_command_with_a_fault_is_given_again(name: str, place_of: Callable[[str], Place]) -> None:
    place, case = place_of(name), CASES[name]
    expected = whole(place, case)
    faults = drawn(name, place.operations(), each=1)
    random.Random(zlib.crc32(name.encode())).shuffle(faults)
    found = [problem(place, case, expected, kind=k, number=n) for k, n in faults[: QUICK_COMMANDS[name]]]
    assert [f for f in found if f] == []


FAULTS_OF_EACH_KIND = {
    "train under torchrun": 1, "mlperf run": 1,
    **dict.fromkeys((
        *(f"train: {name}" for name in TUNINGS),
        "train", "train on two processes", "train --resume", "train with a page", "report", "compare", "bench serve",
        "bench offline", "evaluate", "estimate", "estimate --trace",
    ), 2),
}  # fmt: skip
"""In the slow lane, where it is not 4: commands that take a second or more."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_command_with_any_fault_is_given_again(name: str, place_of: Callable[[str], Place]) -> None:
    place, case = place_of(name), CASES[name]
    expected = whole(place, case)
    faults = drawn(name, place.operations(), each=FAULTS_OF_EACH_KIND.get(name, 4))
    found = [problem(place, case, expected, kind=k, number=n) for k, n in faults]
    assert [f for f in found if f] == []


def test_a_fault_is_at_its_operation_and_a_rename_that_was_not_synced_is_undone(place: Place) -> None:
    """The injector itself: what `plan --write` does, cut before the folder of the file is synced."""
    line = "plan planned.yaml --write pinned.yaml"
    place.begin()
    assert place.run(line).exit_code == 0
    names = [entry["name"] for entry in place.operations()]
    assert names == ["open", "write", "fsync", "rename", "fsync"]
    for kind, number, exists in ((FaultKind.KILL, 4, False), (FaultKind.KILL, 5, True), (FaultKind.CUT, 5, False)):
        place.begin()
        assert place.run(line, kind=kind, number=number).exit_code == -signal.SIGKILL
        assert (place.work / "pinned.yaml").exists() == exists, (kind, number)
    place.begin()
    (place.work / "pinned.yaml").write_text("before")
    assert place.run(line, kind=FaultKind.EIO, number=2).exit_code == 2
    assert (place.work / "pinned.yaml").read_text() == "before"


@pytest.mark.parametrize("is_synced", [True, False])
def test_what_was_written_and_not_synced_is_lost_behind_the_name_that_a_rename_made_visible(place: Place, is_synced):
    """The injector itself, with a writer that forgets to sync."""
    forgets = """
import os, types, meshwright.files as files
files.os = types.SimpleNamespace(**vars(os) | {"fsync": lambda handle: None})
"""
    place.begin()
    assert place.run("plan planned.yaml --write pinned.yaml", script="" if is_synced else forgets).exit_code == 0
    whole = (place.work / "pinned.yaml").read_bytes()
    cut_power(place.work, kind=FaultKind.LOST, record=place.folder / "operations.jsonl", passed_over="node")
    assert ((place.work / "pinned.yaml").read_bytes() == whole) == is_synced
    assert (place.work / "planned.yaml").read_text() == PLANNED
