"""torchrun with the exit code of the run that it starts.

    python -m meshwright.engines.torchrun --standalone --nproc-per-node 8 -m meshwright train run.yaml --out runs/first

It accepts torchrun's arguments. Differences:

- The exit code is that of the process that failed; torchrun's is always 1.
- On one host (`--standalone`) bad input, a missing package and a request to stop end the run without restarts. Several
  hosts use torchrun's own restarts, because they must agree on them.
- Every restart has a new rendezvous store. torchrun by default keeps one store with the entries of the processes that
  ended, and its hosts have no common restart number: each counts its own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from meshwright.errors import InputError, MissingDependencyError, printable
from meshwright.training.rendezvous import LAUNCH_RESTARTS

NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun reads it at every start
ASKED_TO_STOP = (128 + signal.SIGTERM, 128 + signal.SIGINT)
REFUSED = (InputError.exit_code, MissingDependencyError.exit_code)


def main(arguments: list[str]) -> int:
    """Run torchrun with `arguments` and return the run's exit code."""
    args = torchrun.parse_args(arguments)
    os.environ.setdefault(NEW_STORE, "1")
    return _run_with_restarts(args) if args.standalone else _start(args)


def _run_with_restarts(args: Any) -> int:
    """Restart until success, a final error or the last allowed restart."""
    before = int(os.environ.get(LAUNCH_RESTARTS, "0"))
    restarts, args.max_restarts = args.max_restarts, 0
    for count in range(restarts + 1):
        os.environ[LAUNCH_RESTARTS] = str(before + count)
        code = _start(args)
        if code == 0 or code in REFUSED or code in ASKED_TO_STOP or count == restarts:
            return code
        print(f"starting again, {count + 1} of {restarts} times that are allowed", file=sys.stderr, flush=True)
    raise AssertionError("the last start returns")


def _start(args: Any) -> int:
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        # A process that refused the run comes before the one that failed first.
        rank, failure = error.get_first_failure()
        codes = [failure.exitcode, *(other.exitcode for other in error.failures.values())]
        code = next((code for code in codes if code in REFUSED), codes[0])
        reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        print(f"process {rank} ended with {reason}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:
        print(printable(f"error: the other hosts are gone: {error}"), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
