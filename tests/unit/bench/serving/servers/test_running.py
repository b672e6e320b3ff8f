"""Servers by name: started, checked, ended with their processes, and refused where they are not installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from meshwright.bench.serving.servers import table
from meshwright.bench.serving.servers.running import ServerCommand, ServerStartError, running
from meshwright.bench.serving.servers.table import ServedModel, parse_options, server_command
from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.rendezvous import free_port

MODEL = ServedModel(text="org/name", scratch=Path("unused"))


def listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def test_a_mock_server_starts_answers_and_frees_its_port(tmp_path):
    command = server_command("mock", None, port=free_port(), options={"ttft": "0"}, in_flight=1)
    with running(command, folder=tmp_path, timeout_s=60) as server:
        assert listens(command.port)
        assert server.start_s > 0
    assert not listens(command.port)
    assert command.url in (tmp_path / "server.log").read_text()


def test_a_server_that_ends_says_why(tmp_path):
    code = "import sys; print('no GPU is here'); sys.exit(7)"
    command = ServerCommand(name="x", argv=(sys.executable, "-c", code), model="m", port=free_port())
    with (
        pytest.raises(ServerStartError, match="exit code 7: no GPU is here"),
        running(command, folder=tmp_path, timeout_s=60),
    ):
        pass


@pytest.mark.slow
def test_a_server_that_never_answers_is_ended_with_its_children(tmp_path):
    port = free_port()
    code = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"subprocess.Popen([sys.executable, '-m', 'http.server', '{port}']); time.sleep(600)"
    )
    command = ServerCommand(name="x", argv=(sys.executable, "-c", code), model="m", port=port, health="/no-such-page")
    with (
        pytest.raises(ServerStartError, match="did not answer within 2 s"),
        running(command, folder=tmp_path, timeout_s=2),
    ):
        pass
    assert not listens(port)


@pytest.mark.slow
def test_the_port_is_free_when_meshwright_is_killed(tmp_path):
    process = subprocess.Popen(
        [
            sys.executable, "-m", "meshwright", "bench", "serve", "--server", "mock", "--concurrency", "1",
            "--requests", "100000", "--no-self-test", "--out", str(tmp_path / "out"),
        ],
        stderr=subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    log, deadline = tmp_path / "out" / "server.log", time.monotonic() + 60
    while not (log.exists() and "http" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    port = int(log.read_text().split()[0].rpartition(":")[2])
    assert listens(port)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_command_lines_of_vllm_and_sglang(monkeypatch):
    """As documented: `vllm serve MODEL --host --port --served-model-name`, `sglang.launch_server --model-path`."""
    monkeypatch.setattr(table, "find_program", lambda name: f"/opt/{name}")
    monkeypatch.setattr(table, "find_spec", lambda name: object())
    options = parse_options(["tensor-parallel-size=8", "--enable_prefix_caching"])
    vllm = server_command("vllm", MODEL, port=1234, options=options, in_flight=4)
    assert vllm.argv == (
        "/opt/vllm", "serve", "org/name", "--host", "127.0.0.1", "--port", "1234", "--served-model-name", "model",
        "--tensor-parallel-size", "8", "--enable-prefix-caching",
    )  # fmt: skip
    sglang = server_command("sglang", MODEL, port=1234, options={"tp": "2"}, in_flight=4)
    assert sglang.argv[1:] == (
        "-m", "sglang.launch_server", "--model-path", "org/name", "--host", "127.0.0.1", "--port", "1234",
        "--served-model-name", "model", "--tp", "2",
    )  # fmt: skip
    assert (vllm.health, sglang.health) == ("/health", "/health")


@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp"])
def test_an_absent_server_names_its_installation(monkeypatch, name):
    monkeypatch.setattr(table, "find_program", lambda name: None)
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        server_command(name, MODEL, port=1, options={}, in_flight=1)
    assert "pip install" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    [
        ("vllm", None, {}, "needs a model"),
        ("mock", None, {"speed": "1"}, "no such option"),
        ("llamacpp", MODEL, {"tensor-parallel": "2"}, "no such option"),
        ("llamacpp", MODEL, {}, "cannot load"),
        ("llamacpp", MODEL, {"dtype": "q4"}, "dtype"),
    ],
)
def test_wrong_requests_are_refused(name, model, options, message):
    if name == "llamacpp":
        pytest.importorskip("xllamacpp")
    with pytest.raises(InputError, match=message):
        server_command(name, model, port=1, options=options, in_flight=1)


@pytest.mark.parametrize("pairs", [["=1"], ["a=1", "a=2"], [""]], ids=str)
def test_wrong_options_are_refused(pairs):
    with pytest.raises(InputError, match="--server-option"):
        parse_options(pairs)
