"""Rendezvous of JAX's processes under torchrun, whose own store listens on the same port."""

from __future__ import annotations

import socket

import pytest

from meshwright.engines.maxtext.worker import rendezvous_variables


def test_processes_under_torchrun_meet_beside_its_store(monkeypatch):
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    places = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        places.append(rendezvous_variables())
    assert places[0] == places[1]
    assert places[0]["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(places[0]["MASTER_PORT"])))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rendezvous_variables() == {}


def test_other_launchers_leave_the_port_free(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rendezvous_variables() == {}
