"""`meshwright` for shells that tests start: a client of a few milliseconds, whose command runs warm (`tests/warm.py`).

The client sends its arguments, folder, environment and open files to the test process, which starts the command with
them, and ends with its exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

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


class WarmShell:
    """A folder for the front of PATH, in which `meshwright` is the client."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(
            prefix="warm-"
        )  # short: addresses have at most 107 characters
        self.folder = Path(self._temporary.name)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.folder / "socket"))
        self._server.listen()
        client, program = self.folder / "client.py", self.folder / "meshwright"
        client.write_text(CLIENT.format(address=str(self.folder / "socket")))
        program.write_text(PROGRAM.format(python=sys.executable, client=client))
        program.chmod(0o755)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rw") as stream:
            arguments, folder, environment = json.loads(stream.readline())
            process: Any = start_command(
                arguments,
                folder=Path(folder),
                environment=environment,
                descriptors=descriptors,
                measures=True,
            )
            for descriptor in descriptors:
                os.close(descriptor)
            process.join()
            stream.write(f"{process.exitcode}\n")
