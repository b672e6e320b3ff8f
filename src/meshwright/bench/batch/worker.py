"""Process of one replica: `python -m meshwright.bench.batch.worker ENGINE`, with one JSON request a line on stdin.

    {"do": "load", "request": ...}      -> {"event": "loaded", "load_s", "software"}
    {"do": "prepare", "input_tokens", "output_tokens", "requests", "warmup", "seed"}   -> {"event": "ready"}
    {"do": "go"}                        -> {"event": "done", "wall_s", "input_tokens", "output_tokens", ...}

Each request has an "id", which its answer repeats. A request that cannot run answers {"event": "failed",
"reason"}. The engine's output goes to stderr. The process ends when stdin ends, also in the middle of a
batch, so that no process outlives a killed Meshwright.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.bench.batch.engines import BatchEngine, EngineRequest, load_engine, random_prompts
from meshwright.bench.serving.servers.supervise import stay_on_cores
from meshwright.errors import MeshwrightError


class _Replica:
    """A loaded model, and the batch that comes next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine: BatchEngine | None = None
        self.prompts: list[list[int]] = []
        self.output_tokens = 0

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["do"]:
            case "load":
                return self._load(asked["request"])
            case "prepare":
                return self._prepare(**{key: value for key, value in asked.items() if key != "do"})
            case _:
                assert self.engine is not None
                begin_s = time.perf_counter()
                tokens = self.engine.generate(self.prompts, self.output_tokens)
                return {"event": "done", "wall_s": time.perf_counter() - begin_s, **asdict(tokens)}

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        begin_s = time.perf_counter()
        self.engine = load_engine(self.name, EngineRequest(**{**request, "scratch": Path(request["scratch"])}))
        return {
            "event": "loaded", "load_s": time.perf_counter() - begin_s, "software": dict(self.engine.software),
        }  # fmt: skip

    def _prepare(
        self, *, input_tokens: int, output_tokens: int, requests: int, warmup: int, seed: str
    ) -> dict[str, Any]:
        assert self.engine is not None
        size, specials = self.engine.vocabulary, [0]
        if warmup:
            warm = random_prompts(warmup, input_tokens, vocabulary=size, excluded=specials, seed=f"{seed} warm-up")
            self.engine.generate(warm, output_tokens)
        self.prompts = random_prompts(requests, input_tokens, vocabulary=size, excluded=specials, seed=seed)
        self.output_tokens = output_tokens
        return {"event": "ready"}


def main() -> int:
    """Answer requests until stdin ends."""
    stay_on_cores()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    replica = _Replica(sys.argv[1])
    while True:
        request = json.loads(asked.get())
        number = request.pop("id")
        try:
            found = replica.answer(request)
        except MeshwrightError as error:
            found = {"event": "failed", "reason": error.message, "hint": error.hint}
        except Exception as error:  # of an engine: the log has where it came from
            traceback.print_exc()
            found = {
                "event": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            }  # fmt: skip
        answers.write(json.dumps(found | {"id": number}) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
