"""`meshwright` for shells that tests start: a client of a few milliseconds, whose command runs warm (`tests/warm.py`).

The client sends its arguments, folder, environment and open files to the test process, which starts the command with
them, and ends with its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.warm import start_command

PROGRAM = """#!/bin/sh
exec '{python}' -SEI '{client}' "$@"
"""
CLIENT = """
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    with server.makefile("rw") as stream:
        stream.write(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]) + "\\n")
        stream.flush()
        code = int(stream.readline())
sys.exit(code if code >= 0 else 128 - code)
"""
PYTHON = """#!/bin/sh
shift 2
exec '{program}' "$@"
"""
SCRIPT = """
from meshwright.api import bench

command = bench._launched
bench._launched = lambda launcher: ({python!r},) if launcher is None else command(launcher)
"""
"""The trainings of a sweep are started with `PYTHON -m meshwright`."""


class WarmShell:
    """A folder for the front of PATH, in which `meshwright` is the client."""

    def __init__(self) -> None:
        # A short path: the address of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.folder / "socket"))
        self._server.listen()
        self._write("client.py", CLIENT, address=str(self.folder / "socket"))
        program = self._write("meshwright", PROGRAM, python=sys.executable, client=self.folder / "client.py")
        python = self._write("meshwright-python", PYTHON, program=program)
        self._script = self._write("script.py", SCRIPT, python=str(python))
        threading.Thread(target=self._accept, daemon=True).start()

    def _write(self, name: str, template: str, **values: object) -> Path:
        path = self.folder / name
        path.write_text(template.format(**values))
        path.chmod(0o755)
        return path

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r") as stream:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            arguments, folder, environment = json.loads(stream.readline())
            process = start_command(
                arguments,
                folder=Path(folder),
                environment=environment,
                descriptors=descriptors,
                measures=True,
                script=self._script,
            )
            for descriptor in descriptors:
                os.close(descriptor)
            process.join()
            with suppress(OSError):  # a client that was killed waits for no answer
                connection.sendall(f"{process.exitcode}\n".encode())
