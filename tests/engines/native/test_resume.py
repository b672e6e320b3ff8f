"""Killed at any moment, resumed, and resumed under another plan: the steps equal an undisturbed run's."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.killing import kill_group
from tests.tiny_runs import SMALLEST

pytest.importorskip("torch")

from meshwright.files import write_atomically

OPTIMIZER = "{learning_rate: 1.0e-2, warmup_steps: 3}"
ALONE = {
    **SMALLEST,
    "optimizer": OPTIMIZER,
    "train": "{steps: 800, checkpoint: {folder: saved, every_steps: 7, keep: 3}}",  # room for eight kills
}
FSDP = {
    "parallel": "{data_shard: 2, sharding: parameters}",
    "optimizer": OPTIMIZER,
    "train": "{steps: 40, checkpoint: {folder: saved, every_steps: 5, keep: 3}}",
}
TORCHRUN = (
    "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "meshwright",
)  # fmt: skip
has_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")


@pytest.fixture(scope="module")
def undisturbed(tiny_run, tmp_path_factory):
    """`undisturbed(sections)`: the run that nothing kills, trained once for these sections."""
    trained = {}

    def train(sections):
        key = str(sections)
        if key not in trained:
            trained[key] = tiny_run(tmp_path_factory.mktemp("whole"), **sections)
            trained[key].train()
        return trained[key]

    return train


def test_a_run_that_lost_its_record_after_the_last_step_gets_it_again(tiny_run, tmp_path):
    training = tiny_run(tmp_path, **SMALLEST)
    first = training.train()["statistics"]
    (tmp_path / "out" / "record.json").unlink()
    again = training.train("--resume")["statistics"]
    for key in ("steps", "tokens", "last_loss"):
        assert again[key] == first[key], key


def kill_at_random(training, wait_for, *, kills: int, seed: int) -> None:
    """Start and kill, at random moments, the same in every test; each time some steps later than the last."""
    chance = random.Random(seed)
    for _ in range(kills):
        known, saved = len(training.steps()), training.checkpoints()
        process = training.start(*(("--resume",) if saved else ()))
        # Wherever that is: in a step, in the copy, in the writing, in the removal of an old checkpoint.
        wait_for(lambda known=known, saved=saved: training.checkpoints()[-1:] > saved[-1:], process)
        time.sleep(chance.uniform(0.0, 0.2))
        kill_group(process)
    training.train("--resume")


@pytest.mark.parametrize(
    ("sections", "kills"),
    [
        (ALONE | {"train": ALONE["train"].replace("800", "80")}, 1),
        pytest.param(
            ALONE | {"train": ALONE["train"].replace("800", "120")}, 2, marks=pytest.mark.when_touched
        ),  # one kill is above
        pytest.param(
            FSDP, 1, marks=[pytest.mark.distributed, pytest.mark.when_touched]
        ),  # one process is above; the test below kills eight times
    ],
    ids=["one kill", "two kills", "two processes"],
)
def test_kills_leave_no_trace(tiny_run, tmp_path, wait_for, sections, kills, undisturbed):
    disturbed = tiny_run(tmp_path / "cut", **sections)
    kill_at_random(disturbed, wait_for, kills=kills, seed=1)
    assert disturbed.losses() == undisturbed(sections).losses()
    assert disturbed.checkpoints() == undisturbed(sections).checkpoints()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sections", [ALONE, FSDP], ids=["one process", "two processes"])
def test_many_kills_leave_no_trace(tiny_run, tmp_path, wait_for, sections, seed, undisturbed):
    sections = sections | {"train": sections["train"].replace("steps: 40", "steps: 160")}  # room for eight
    disturbed = tiny_run(tmp_path / "cut", **sections)
    kill_at_random(disturbed, wait_for, kills=8, seed=seed)
    assert disturbed.losses() == undisturbed(sections).losses()


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "steps"), [(ALONE, 2000), (FSDP, 2000)], ids=["one process", "two processes"])
def test_a_dozen_of_interrupted_runs_are_one_run(
    tiny_run, tmp_path, monkeypatch, sections, steps, undisturbed, request
):
    """A soak: killed or asked to stop at any moment, while they start, too. Nothing of them is left.

    `--soak-hours` repeats it with other moments for so long. `--soak-folder` keeps the sums, and goes on from them.
    """
    until = time.monotonic() + 3600 * request.config.getoption("soak_hours")
    sums = SoakSums.read(request.config.getoption("soak_folder"), request.node.callspec.id)
    is_first = True
    while is_first or time.monotonic() < until:
        begun_s, seed = time.monotonic(), 7 + sums.rounds
        with monkeypatch.context() as patch:
            endings = soak(tiny_run, tmp_path / str(seed), patch, sections, steps, undisturbed, seed=seed)
        kills, stops = endings.count(-signal.SIGKILL), endings.count(128 + signal.SIGTERM)
        assert seed > 7 or min(kills, stops) > 1
        sums.add(seconds=time.monotonic() - begun_s, kills=kills, stops=stops)
        shutil.rmtree(tmp_path / str(seed))  # hours of them would fill the disk
        is_first = False


@dataclass(kw_only=True)
class SoakSums:
    """Sums of the rounds of a soak, kept in `path` if there is one."""

    path: Path | None
    rounds: int = 0
    seconds: float = 0.0
    kills: int = 0
    stops: int = 0

    @classmethod
    def read(cls, folder: str | None, name: str) -> SoakSums:
        path = None if folder is None else Path(folder) / f"{name.replace(' ', '-')}.json"
        return cls(path=path, **(json.loads(path.read_text()) if path is not None and path.exists() else {}))

    def add(self, *, seconds: float, kills: int, stops: int) -> None:
        """Count a round that passed."""
        self.rounds, self.seconds = self.rounds + 1, self.seconds + seconds
        self.kills, self.stops = self.kills + kills, self.stops + stops
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({k: v for k, v in vars(self).items() if k != "path"}) + "\n")


def test_the_sums_of_a_soak_go_on(tmp_path):
    SoakSums.read(str(tmp_path / "kept"), "one process").add(seconds=2.0, kills=3, stops=1)
    again = SoakSums.read(str(tmp_path / "kept"), "one process")
    again.add(seconds=1.5, kills=2, stops=4)
    assert json.loads((tmp_path / "kept" / "one-process.json").read_text()) == {
        "rounds": 2, "seconds": 3.5, "kills": 5, "stops": 5,
    }  # fmt: skip
    assert SoakSums.read(str(tmp_path / "kept"), "two processes").rounds == 0


def soak(tiny_run, tmp_path, patch, sections, steps, undisturbed, *, seed):
    tmp_path.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = tmp_path / "temporary.py"
    script.write_text("import tempfile\ntempfile.tempdir = None\n")
    sections = sections | {"train": f"{{steps: {steps}, checkpoint: {{folder: saved, every_steps: 25, keep: 2}}}}"}
    training = tiny_run(tmp_path / "cut", **sections)
    chance, endings = random.Random(seed), []
    whole = undisturbed(sections)  # before that folder is the temporary one of all that starts
    patch.setenv("TMPDIR", str(temporary))
    while len(endings) < 12:
        process = training.start("--resume-or-begin", script=script)
        time.sleep(chance.uniform(0.1, 1.1))
        if process.poll() is not None:
            break
        if chance.random() < 0.4:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
        else:
            kill_group(process)
        endings.append(process.returncode)
    training.train("--resume-or-begin", script=script, limit_s=2400)  # it may be most of the steps, on a busy machine
    assert training.losses() == whole.losses()
    assert last_files(training) == last_files(whole)
    assert [p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor_")] == []  # PyTorch's cache
    return endings


def last_files(training) -> dict[str, str]:
    """Checksums of the tensors of the last checkpoint."""
    manifest = training.folder / "saved" / f"step-{training.checkpoints()[-1]:08d}" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    return {name: known["sha256"] for name, known in files.items() if name.endswith(".distcp")}


def ranks_below(pid: int) -> list[int]:
    """Processes that train, below torchrun."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if "meshwright" in Path(f"/proc/{c}/cmdline").read_text()]


@pytest.mark.slow  # as launch/test_local.py, where `launch` starts the torchrun
@has_proc
@pytest.mark.distributed
def test_torchrun_replaces_a_killed_process(tiny_run, tmp_path, wait_for, undisturbed):
    training = tiny_run(tmp_path / "cut", **FSDP)
    process = training.start(under=TORCHRUN)
    wait_for(training.checkpoints, process)
    os.kill(ranks_below(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "exitcode: -9" in stderr  # the one that was lost, and not those that lost it
    record = json.loads((training.folder / "out" / "record.json").read_text())
    assert (record["ending"], record["statistics"]["steps"]) == ("done", 40)
    assert training.losses() == undisturbed(FSDP).losses()


ALL = (
    "auto",
    "{data_shard: 2, sharding: parameters}",
    "{data_shard: 1, tensor: 2}",
    "{data_shard: 1, pipeline: 2}",
    "auto",
)


@pytest.mark.distributed
@pytest.mark.parametrize("plans", [ALL[1:3], pytest.param(ALL, marks=pytest.mark.slow)], ids=["short", "all"])
def test_a_run_goes_from_plan_to_plan(tiny_run, tmp_path, plans):
    """One process, shards, tensor parallel, pipeline, and back, in the middle of an epoch: losses and batches agree."""
    sections = {
        "precision": "fp32",
        "optimizer": "{learning_rate: 1.0e-2, schedule: constant}",
        "train": "{steps: 10, checkpoint: {folder: saved, every_steps: 10}}",
    }
    changing, steady = tiny_run(tmp_path / "changing", **sections), tiny_run(tmp_path / "steady", **sections)
    steps = 0
    for plan in plans:
        steps += 4
        resume = ("--resume",) if changing.checkpoints() else ()
        changing.train(*resume, "--set", f"parallel={plan}", "--set", f"train.steps={steps}")
    steady.train("--set", f"train.steps={steps}")
    assert [e["batch"] for e in changing.steps()] == [e["batch"] for e in steady.steps()]
    assert changing.losses() == pytest.approx(steady.losses(), rel=1e-5)


@pytest.mark.slow  # as launch/test_local.py, where `launch` is killed
@has_proc
@pytest.mark.distributed
def test_workers_end_when_torchrun_is_killed(tiny_run, tmp_path, wait_for):
    """They are asked to stop, so the steps since the last checkpoint are not lost."""
    train = "{steps: 100000, checkpoint: {folder: saved, every_steps: 100000}}"
    training = tiny_run(tmp_path, **FSDP | {"train": train})
    process = training.start(under=TORCHRUN)
    wait_for(lambda: len(training.steps()) > 2, process)
    workers = ranks_below(process.pid)
    assert len(workers) == 2
    training.kill(process)
    deadline_s = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline_s, "they train on"
        time.sleep(0.05)
    assert len(training.checkpoints()) == 1


@pytest.mark.when_touched  # a kill and a resumption are in test_kills_leave_no_trace
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["one kill", "four kills"])
def test_two_runs_that_share_folders(tiny_run, tmp_path, wait_for, undisturbed, kills):
    """Their checkpoints and results lie beside each other, and each is killed at random moments while the other one
    trains. A third run that would save to the same checkpoints is refused. Both end as if nothing had happened."""
    longer = ALONE | {"train": ALONE["train"].replace("800", str(240 * kills))}
    sections = {"a": longer, "b": longer | {"data": "{source: synthetic, sequence_length: 8}"}}
    chance = random.Random(kills)
    runs = {
        name: tiny_run(tmp_path / name, **given | {"train": given["train"].replace("saved", f"../checkpoints/{name}")})
        for name, given in sections.items()
    }

    def saved(name: str) -> list[str]:
        return sorted(p.parent.name for p in (tmp_path / "checkpoints" / name).glob("step-*/manifest.json"))

    def start(name: str, out: str):
        return runs[name].start("--out", f"../results/{out}", *(("--resume",) if saved(name) else ()))

    running = {name: start(name, name) for name in runs}
    for _ in range(kills):
        for name in runs:
            before = saved(name)
            wait_for(lambda name=name, before=before: saved(name)[-1:] > before[-1:], running[name])
            third = start(name, "third")
            _, refused = third.communicate(timeout=200)
            assert third.returncode == 2, refused
            time.sleep(chance.uniform(0.0, 0.2))
            kill_group(running[name])
            running[name] = start(name, name)
    for name, process in running.items():
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        lines = (tmp_path / "results" / name / "steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in lines] == undisturbed(sections[name]).losses()
    assert not list((tmp_path / "results" / "third").glob("*.json*"))
