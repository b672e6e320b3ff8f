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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.file_faults import FaultKind, cut_power
from tests.killing import LIMIT_S, is_there
from tests.record_folders import write_system, write_training
from tests.tiny_encoder import write_encoder
from tests.training.test_processes import is_running
from tests.unit.conftest import Machine
from tests.unit.doctor.test_tuning import NODE
from tests.unit.mlperf.conftest import SyntheticLog
from tests.warm import WarmProcess

from meshwright.records.ingest import read_ingest
from meshwright.training.checkpoints import files as checkpoint_files

FAKE_TRAIN = Path(__file__).parent / "unit" / "bench" / "fake_train.py"
PLANNED = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 8, micro: 1}
cluster: h100-8x1
"""
PRETRAIN = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 64 --train-iters 4 "
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-3\n"
)
QUICK = """
import meshwright.bench.ingest.comparison as comparison, meshwright.bench.ingest.bench as bench
comparison.LEAST_S = bench.BUDGET_S = 0.001
"""
LAUNCHED = """
import sys
from meshwright.cli import main
from tests.warm import measure_nothing
measure_nothing(setattr)
sys.exit(main.run(sys.argv[1:]))
"""
ACCEPTED = """
import meshwright.mlperf.package as package
package.ask = lambda request: {"passes": True, "messages": []}
"""
INGEST = (
    "bench ingest documents --encoder encoder --chunks all --chunk-tokens 20 --overlap 4 --batch 4 --queries 4 "
    "--query-tokens 4 --query-batch 1 --threads 1 --k 2 --mode sequential --index flat --out ingest"
)
SERVE = (
    "bench serve --server mock --concurrency 1,2 --requests 2 --warmup 0 --input-tokens 4 --output-tokens 2 "
    "--no-self-test --out served"
)
SWEEP = (
    f"bench train run.yaml --sweep batch.micro=1,2 --runs 1 --steps 2 --warmup 0 --out sweep "
    f"--launcher '{sys.executable} {FAKE_TRAIN}'"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line, and how it is given again; `leaves` are the paths that are compared."""

    line: str
    again: str | None = None  # what the hint of a refusal names
    hint: str = "--resume"
    leaves: tuple[str, ...]
    script: str = ""
    under: tuple[str, ...] = ()  # a launcher
    is_parallel: bool = False


TRAIN = "train run.yaml --out out --json --resume-or-begin --only-steps"
CASES = {
    "train": Case(line=TRAIN, leaves=("saved", "out")),
    "train on two processes": Case(line=TRAIN.replace("run", "two"), leaves=("saved", "out"), is_parallel=True),
    "train under torchrun": Case(
        line=TRAIN.replace("run", "two"), leaves=("saved", "out"),
        under=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), is_parallel=True,
    ),
    "train --resume": Case(line="train longer.yaml --json --resume --only-steps", leaves=("saved", "out")),
    "checkpoint to-hf": Case(line="checkpoint to-hf run.yaml hf", leaves=("hf",)),
    "checkpoint from-hf": Case(line="checkpoint from-hf again.yaml exported", leaves=("again",)),
    "export": Case(
        line="export planned.yaml --engine megatron --set train.steps=9 --out exported-run",
        leaves=("exported-run",),
    ),
    "import": Case(line="import pretrain.sh --cluster h100-8x1 --out imported.yaml", leaves=("imported.yaml",)),
    "report": Case(line="report records --html report.html", leaves=("report.html",)),
    "bench train": Case(
        line=SWEEP, again=f"{SWEEP} --resume", leaves=("sweep/trainings.csv", "sweep/trainings.json"),
    ),
    "bench serve": Case(line=SERVE, again=f"{SERVE} --resume", leaves=("served",)),
    "bench ingest": Case(
        line=INGEST, again=INGEST, hint="name another --out", leaves=("ingest",), script=QUICK
    ),
    "mlperf package": Case(
        line="mlperf package llama2_70b_lora --org Org --system sys8.json --code code --out submission --round 5.1",
        leaves=("submission",), script=ACCEPTED,
    ),
    "tune system": Case(line="tune system --root node --state state.json --apply", leaves=("state.json",)),
    "evaluate": Case(line="evaluate bytes.yaml text.txt --json --sequence-length 16", leaves=()),
    "plan": Case(line="plan planned.yaml --write pinned.yaml", leaves=("pinned.yaml",)),
    "estimate": Case(line="estimate planned.yaml --html estimate.html", leaves=("estimate.html",)),
    "calibrate": Case(line="calibrate device --out device.json", leaves=("device.json",)),
}  # fmt: skip


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
        self, line: str, *, script: str = "", kind: str = "none", number: int = 0, under: Sequence[str] = ()
    ) -> Ended:
        """Run `meshwright LINE`, with one fault. `under`: the arguments of Python that start a launcher of it."""
        record = self.folder / "operations.jsonl"
        for path in (record, record.with_suffix(".count")):
            path.unlink(missing_ok=True)
        shutil.rmtree(record.with_suffix(".kept"), ignore_errors=True)
        start = self.folder / "start.py"
        start.write_text(
            f"{script}\nfrom pathlib import Path\nfrom tests.file_faults import install\n"
            f"install(Path({str(self.work)!r}), kind={str(kind)!r}, number={number}, record=Path({str(record)!r}), "
            f"passed_over='node')\n"  # a kernel takes a value whole or not at all
            "import tempfile\ntempfile.tempdir = None\n" + (LAUNCHED if under else "")
        )
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HOME": str(self.work / "home"), "MESHWRIGHT_CACHE": str(self.work / "cache"),
            "XDG_CONFIG_HOME": str(self.work / "home"), "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300", "TMPDIR": str(self.temporary),
        }  # fmt: skip
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
    """The inputs of all commands, a finished training of four steps among them."""
    folder = tmp_path_factory.mktemp("inputs")
    text = tiny_text.replace("precision: bf16", "precision: fp32")
    (folder / "run.yaml").write_text(text)
    (folder / "longer.yaml").write_text(text.replace("steps: 4", "steps: 6"))
    (folder / "two.yaml").write_text(text + "parallel: {data_shard: 2, sharding: parameters}\n")
    (folder / "again.yaml").write_text(text.replace("folder: saved", "folder: again"))
    (folder / "planned.yaml").write_text(PLANNED)
    wide = text.replace("vocab: 64", "vocab: 257").replace("synthetic", "text.txt, tokenizer: bytes")
    (folder / "bytes.yaml").write_text(wide.replace("folder: saved", "folder: saved-bytes"))
    (folder / "pretrain.sh").write_text(PRETRAIN)
    (folder / "text.txt").write_text("An evaluation reads this text, which has a few words.\n" * 20)
    write_training(folder / "records")
    write_encoder(folder / "encoder")
    for number in range(4):
        (folder / "documents").mkdir(exist_ok=True)
        (folder / "documents" / f"{number}.py").write_text(f"def f{number}(a, b):\n    return a + b\n" * 4)
    for seed in range(10):
        SyntheticLog(seed=seed, evaluations=5 + seed % 2).write(folder / "llama2_70b_lora" / f"result_{seed}.txt")
    write_system(folder)
    for name, value in NODE.items():
        path = folder / "node" / name.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    Machine().record(folder / "device", count=12)
    return folder


@pytest.fixture(scope="session")
def place(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The place of commands that need no training."""
    return Place(folder=tmp_path_factory.mktemp("place"), inputs=inputs)


@pytest.fixture(scope="session")
def trained(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The place of commands that need finished trainings, and an export of the weights of one."""
    place.begin()
    for line in (TRAIN, "train bytes.yaml --out bytes-out", "checkpoint to-hf run.yaml exported --dtype fp32"):
        ended = place.run(line)
        assert ended.exit_code == 0, ended.stderr
    folder = tmp_path_factory.mktemp("trained") / "work"
    place.work.rename(folder)
    return Place(folder=place.folder, inputs=folder)


@pytest.fixture(scope="session")
def place_of(request: pytest.FixtureRequest) -> Callable[[str], Place]:
    """The place of a command."""
    of_trained = ("train --resume", "checkpoint", "evaluate")
    return lambda name: request.getfixturevalue("trained" if name.startswith(of_trained) else "place")


# --- what is left ---

KEPT_BY_PYTORCH = ("torchelastic_", "torchinductor_")
"""Temporary folders that torchrun keeps for its logs, and PyTorch for kernels."""
TIMES = re.compile(
    r"(_s|_ms|_s_\w+|per_s\w*|^s|seconds|started|ended|made|date|written|saved_at|mfu\w*|hfu\w*|throughput|time_s|"
    r"straggler\w*|memory_bytes|memory|\w*_bytes_per_s|load\w*|sha256|manifest_sha256|id|command|pid|boot_id|url|num_calls|folder|peak_\w+)$"
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
    ended = place.run(case.line, script=case.script, under=case.under)
    assert ended.exit_code == 0, ended.stderr
    if case.is_parallel:
        assert place.left_behind() == []
    return left(place.work, case.leaves)


def problem(place: Place, case: Case, expected: dict[str, Any], *, kind: FaultKind, number: int) -> str | None:
    """Return the error of the command with one fault, or of the same command after it; None: there is none."""
    place.begin()
    faulty = place.run(case.line, script=case.script, kind=kind, number=number, under=case.under)
    where = next((entry for entry in place.operations() if entry["number"] == number), None)
    at = f"{kind} at {number}: {where and where['name']} {where and where['path']}: "
    if kind in (FaultKind.ENOSPC, FaultKind.EIO):
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
    again = place.run(case.line, script=case.script, under=case.under)
    if again.exit_code == 2 and case.again and case.hint in again.stderr:
        if case.again.endswith("ingest"):
            read_ingest(place.work / "ingest")  # what was measured before the fault is whole
            shutil.rmtree(place.work / "ingest")
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
    """Faults of the command: under a launcher a process dies alone, as its group is its own."""
    alone = [FaultKind.ALONE] if case.is_parallel else []
    return alone if case.under else [*alone, *(k for k in FaultKind if k not in (FaultKind.NONE, FaultKind.ALONE))]


def drawn(name: str, operations: Sequence[dict[str, Any]], *, each: int) -> list[tuple[FaultKind, int]]:
    """`each` faults of each kind, spread over the operations, drawn by the name of the command."""
    draw = random.Random(zlib.crc32(name.encode()))
    faults: list[tuple[FaultKind, int]] = []
    for kind in kinds_of(CASES[name]):
        written = [o["number"] for o in operations if kind is not FaultKind.TORN or o["name"] == "write"]
        parts = [written[i * len(written) // each : (i + 1) * len(written) // each] for i in range(each)]
        faults += [(kind, draw.choice(part)) for part in parts if part]
        if kind is FaultKind.LOST:
            faults.append((kind, len(operations) + 1))  # after the end
    return faults


QUICK_COMMANDS = {
    "train": 1, "train on two processes": 1,
    "export": 2, "import": 2, "bench train": 2, "bench ingest": 2, "mlperf package": 2, "tune system": 2,
    "plan": 1, "calibrate": 1,
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


LONG_COMMANDS = (
    "train",
    "train on two processes",
    "train under torchrun",
    "train --resume",
    "report",
    "bench serve",
    "evaluate",
    "estimate",
)
"""Commands that take a second: half as many faults of each kind in the slow lane."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_command_with_any_fault_is_given_again(name: str, place_of: Callable[[str], Place]) -> None:
    place, case = place_of(name), CASES[name]
    expected = whole(place, case)
    faults = drawn(name, place.operations(), each=2 if name in LONG_COMMANDS else 4)
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
