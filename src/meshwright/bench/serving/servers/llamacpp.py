"""Process that serves a GGUF file with llama.cpp: `python -m meshwright.bench.serving.servers.llamacpp FILE.gguf ...`.

`xllamacpp` holds llama.cpp's own HTTP server. One thread is left for the client, because spinning threads of the
server would take its core.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from importlib import import_module
from typing import Any


def start(path: str, *, port: int, slots: int, context: int, threads: int, **others: Any) -> Any:
    """Start llama.cpp's server in this process; `context` is of one slot, `others` are further parameters of it."""
    xllamacpp: Any = import_module("xllamacpp")  # its names are made when it is imported
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.kv_unified = False
    params.fit_params = False
    for name, value in others.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def main() -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", default="model")
    parser.add_argument("--parallel", type=int, default=16, help="slots: requests that are answered at the same time")
    parser.add_argument("--context", type=int, required=True, help="tokens of one slot")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    asked = parser.parse_args()
    server = start(
        asked.gguf, port=asked.port, slots=asked.parallel, context=asked.context, threads=asked.threads,
        model_alias={asked.alias}, hostnames=["127.0.0.1"], n_threads_http=asked.parallel + 4,
    )  # fmt: skip
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
