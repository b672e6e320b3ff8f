"""A process that was asked to stop and has saved says so by its exit code: it is neither done nor lost."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from meshwright.engines import local
from meshwright.engines.base import Launch
from meshwright.records.training import Ending
from meshwright.training.signals import STOPPED_EXIT_CODE


def processes(code: str) -> Launch:
    return Launch(argv=("python", "-c", code), files={}, num_processes=2)


def test_processes_that_stop_together_are_not_lost(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    local.run(processes(f"raise SystemExit({STOPPED_EXIT_CODE})"), folder=tmp_path)


def test_one_that_fails_is_lost(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(local.ProcessLostError, match="exit code 1"):
        local.run(processes("raise SystemExit(1)"), folder=tmp_path)


@pytest.mark.parametrize(
    ("ending", "code"), [(Ending.DONE, 0), (Ending.DIVERGED, 0), (Ending.STOPPED, STOPPED_EXIT_CODE)]
)
def test_a_scheduler_does_not_take_a_megatron_run_that_stopped_for_done(ending, code, tmp_path, monkeypatch, tiny_text):
    torch = pytest.importorskip("torch")
    from meshwright.engines.megatron import probe, worker

    loop = "meshwright.engines.megatron.in_megatron_process.train_loop"
    monkeypatch.setitem(sys.modules, loop, SimpleNamespace(train=lambda path: ending))
    monkeypatch.setattr(probe, "detect", lambda: None)
    monkeypatch.setattr(probe, "require_device", lambda machine: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for name in worker.ONE_PROCESS:
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshwright_run.yaml").write_text(tiny_text + "engine: megatron\nparallel: {data_shard: 1}\n")
    assert worker.main(tmp_path / "meshwright_run.yaml") == code
