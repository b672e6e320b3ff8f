"""Process between Meshwright and a server: `python -m meshwright.bench.serving.servers.supervise COMMAND ...`.

The server runs in a process group of its own. When stdin ends, because Meshwright closed it, exited or was killed, the
group gets SIGTERM, and SIGKILL after ten seconds, so that the port is free again. The exit code is the server's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE_S = 10.0
CORES_VARIABLE = "MESHWRIGHT_CORES"
"""Cores that the server stays on, as in 0,2 (`bench.batch.pinning`)."""


def main() -> int:
    """Run the command until it ends or stdin does."""
    stay_on_cores()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # stdin decides
    try:
        server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_defaults)
    except OSError as error:
        print(f"{sys.argv[1]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    code = server.wait()
    _kill(server.pid, signal.SIGKILL)  # what it left behind
    return code if code >= 0 else 128 - code


def stay_on_cores() -> None:
    """Keep this process and its children on the cores that the environment names."""
    text = os.environ.get(CORES_VARIABLE)
    if text:
        os.sched_setaffinity(0, {int(core) for core in text.split(",")})


def _defaults() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _end_with_stdin(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill(server.pid, signal.SIGKILL)


def _kill(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
