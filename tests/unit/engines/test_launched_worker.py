"""Workers that a launcher starts directly lock their folders and compare their run with its checkpoints."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.external_record import OutputLayout
from meshwright.engines.launched_worker import worker_folders
from meshwright.errors import InputError
from meshwright.training.machine import OWN_WORKER
from meshwright.training.run_identity import identity_file, read_identity

LAYOUT = OutputLayout(output="measured", run_file="run.yaml", checkpoints=lambda folder: sorted(folder.glob("step-*")))


@pytest.fixture
def run(tiny_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "MESHWRIGHT_RESTARTS", "TORCHELASTIC_RESTART_COUNT", OWN_WORKER):
        monkeypatch.delenv(name, raising=False)

    def make(*overrides: str):
        return runfile.loads(tiny_text, overrides=["parallel={data_shard: 1}", "train.steps=20", *overrides])

    return make


def test_a_second_one_is_refused(run, tmp_path):
    with (
        worker_folders(tmp_path / "one", run(), layout=LAYOUT),
        pytest.raises(InputError, match="saves its checkpoints there now"),
        worker_folders(tmp_path / "two", run(), layout=LAYOUT),
    ):
        pass


def test_other_processes_and_own_workers_take_no_lock(run, tmp_path, monkeypatch):
    with worker_folders(tmp_path / "one", run(), layout=LAYOUT):
        for name, value in (("RANK", "1"), (OWN_WORKER, "1")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with worker_folders(tmp_path / "one", run(), layout=LAYOUT):
                    pass


def test_checkpoints_of_another_run_are_not_continued(run, tmp_path, monkeypatch):
    with worker_folders(tmp_path / "one", run(), layout=LAYOUT):
        (tmp_path / "saved" / "step-10").mkdir(parents=True)
    with (
        pytest.raises(InputError, match="already holds checkpoints"),
        worker_folders(tmp_path / "two", run(), layout=LAYOUT),
    ):
        pass
    monkeypatch.setenv("MESHWRIGHT_RESTARTS", "1")
    with (
        pytest.raises(InputError, match=r"of another run: train.seed: 0 -> 1"),
        worker_folders(tmp_path / "one", run("train.seed=1"), layout=LAYOUT),
    ):
        pass


def test_a_restart_continues_and_counts_tokens_truly(run, tmp_path, monkeypatch, capsys):
    with worker_folders(tmp_path / "one", run(), layout=LAYOUT):
        (tmp_path / "saved" / "step-10").mkdir(parents=True)
    first = read_identity(tmp_path / "one" / "identity.json")
    assert first == read_identity(identity_file(tmp_path / "saved"))
    with worker_folders(tmp_path / "one", run(), layout=LAYOUT):  # a host that came back, and counts no restart
        pass
    monkeypatch.setenv("MESHWRIGHT_RESTARTS", "1")
    with worker_folders(tmp_path / "one", run("batch.global_sequences=8"), layout=LAYOUT):
        pass
    second = read_identity(identity_file(tmp_path / "saved"))
    assert first is not None
    assert second is not None
    assert (second.run_id, second.batches) == (first.run_id, ((0, 64), (10, 128)))
    assert "batch.global_sequences: 4 -> 8" in capsys.readouterr().err
