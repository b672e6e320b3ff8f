"""Command line, model and health check of each server that `bench serve --server NAME` starts.

llamacpp  github:ggml-org/llama.cpp through the package xllamacpp; runs on a CPU
vllm      `vllm serve MODEL` (docs.vllm.ai, "vllm serve"), from PATH
sglang    `python -m sglang.launch_server` (docs.sglang.io, "Server Arguments"), of this Python
mock      the mock server of the tests, with known latencies
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.bench.serving.mock import MODEL as MOCK_MODEL
from meshwright.bench.serving.servers.gguf_file import gguf_of
from meshwright.bench.serving.servers.running import ServerCommand
from meshwright.bench.serving.servers.served import (
    LLAMACPP_CACHE,
    PRECISIONS,
    folder_config,
    gguf_config,
    served_document,
    stored_precision,
)
from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import find_program, install_command

SERVED_NAME = "model"
MOST_SLOTS = 64
LLAMACPP_OPTIONS = ("threads", "parallel", "context", "dtype")
MOCK_OPTIONS = ("ttft", "itl", "slots")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Model that a server is to load: a GGUF file, a Hugging Face folder, or a name that the server resolves."""

    text: str
    scratch: Path  # folder for converted files

    @property
    def path(self) -> Path:
        return Path(self.text)


def parse_options(pairs: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE options of a server; KEY alone is a flag. Raises InputError."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = key.strip().lstrip("-").replace("_", "-")
        if not key or key in found:
            raise InputError("--server-option must read KEY=VALUE, each key once", got=pair)
        found[key] = value
    return found


def server_command(
    name: str, model: ServedModel | None, *, port: int, options: Mapping[str, str], in_flight: int
) -> ServerCommand:
    """Command line of the server `name`. `in_flight` is the most requests that are measured at once.

    Raises InputError for a model that the server cannot load, MissingDependencyError where it is not installed.
    """
    build = SERVERS[name]
    if model is None and build is not _mock:
        raise InputError(f"--server {name} needs a model", hint="--model PATH")
    return build(model, port, dict(options), in_flight)


def _flags(options: Mapping[str, str]) -> list[str]:
    return [part for key, value in options.items() for part in ([f"--{key}", value] if value else [f"--{key}"])]


def _require_known(name: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise InputError(f"--server {name} has no such option", got=key, allowed=", ".join(known))


def _llamacpp(model: ServedModel | None, port: int, options: dict[str, str], in_flight: int) -> ServerCommand:
    assert model is not None
    _require_known("llamacpp", options, LLAMACPP_OPTIONS)
    if find_spec("xllamacpp") is None:
        raise MissingDependencyError(
            "--server llamacpp needs xllamacpp, which is not installed", hint=install_command("llamacpp")
        )
    dtype, context = options.pop("dtype", None), options.pop("context", None)
    path, made = gguf_of(model.text, model.scratch, dtype=dtype, option="--server-option dtype")
    if made is None:
        config, stored = gguf_config(path)
        length = config["max_position_embeddings"]
    else:
        config, length = folder_config(model.path), made.context_length
        stored = stored_precision(config)
    parallel = options.pop("parallel", str(min(MOST_SLOTS, in_flight)))
    argv = [
        sys.executable, "-m", "meshwright.bench.serving.servers.llamacpp", str(path), "--port", str(port),
        "--alias", SERVED_NAME, "--parallel", parallel, "--context", context or str(length), *_flags(options),
    ]  # fmt: skip
    served = served_document(
        config, precision=PRECISIONS[dtype] if dtype else stored, kv_precision=LLAMACPP_CACHE,
        slots=_whole(parallel),
    )  # fmt: skip
    notes = made.notes if made else ()
    return ServerCommand(name="llamacpp", argv=tuple(argv), model=SERVED_NAME, port=port, notes=notes, served=served)


def _whole(text: str | None) -> int | None:
    """A count that an option of a server gives; None where it gives none."""
    return int(text) if text and text.isdecimal() else None


def _served_by_engine(model: ServedModel, options: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    """Shapes and formats that vLLM or SGLang serve, from the model's folder and options named `names`."""
    config = folder_config(model.path)
    dtype, cache = options.get("dtype", "auto"), options.get(names["cache"], "auto")
    precision = stored_precision(config) if dtype == "auto" else PRECISIONS.get(dtype)
    if "quantization" in options:
        precision = options["quantization"] if options["quantization"] == "fp8" else None
    kv_precision = "fp8" if cache.startswith("fp8") else precision if cache == "auto" else PRECISIONS.get(cache)
    return served_document(
        config, precision=precision, kv_precision=kv_precision, slots=_whole(options.get(names["slots"])),
        tensor=_whole(options.get(names["tensor"])) or 1,
    )  # fmt: skip


def _vllm(model: ServedModel | None, port: int, options: dict[str, str], in_flight: int) -> ServerCommand:
    assert model is not None
    program = find_program("vllm")
    if program is None:
        raise MissingDependencyError(
            "--server vllm needs the program vllm, which is neither on PATH nor installed with this Python",
            hint="pip install vllm",
        )
    argv = [
        program, "serve", model.text, "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", SERVED_NAME, *_flags(options),
    ]  # fmt: skip
    names = {"tensor": "tensor-parallel-size", "slots": "max-num-seqs", "cache": "kv-cache-dtype"}
    served = _served_by_engine(model, options, names)
    return ServerCommand(name="vllm", argv=tuple(argv), model=SERVED_NAME, port=port, served=served)


def _sglang(model: ServedModel | None, port: int, options: dict[str, str], in_flight: int) -> ServerCommand:
    assert model is not None
    if find_spec("sglang") is None:
        raise MissingDependencyError(
            "--server sglang needs SGLang, which is not installed", hint="pip install 'sglang[all]'"
        )
    argv = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model.text, "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", SERVED_NAME, *_flags(options),
    ]  # fmt: skip
    tensor = next((name for name in ("tp", "tp-size") if name in options), "tensor-parallel-size")
    names = {"tensor": tensor, "slots": "max-running-requests", "cache": "kv-cache-dtype"}
    served = _served_by_engine(model, options, names)
    return ServerCommand(name="sglang", argv=tuple(argv), model=SERVED_NAME, port=port, served=served)


def _mock(model: ServedModel | None, port: int, options: dict[str, str], in_flight: int) -> ServerCommand:
    _require_known("mock", options, MOCK_OPTIONS)
    argv = [sys.executable, "-m", "meshwright.bench.serving.mock", "--port", str(port), *_flags(options)]
    return ServerCommand(name="mock", argv=tuple(argv), model=MOCK_MODEL, port=port)


SERVERS: dict[str, Callable[[ServedModel | None, int, dict[str, str], int], ServerCommand]] = {
    "llamacpp": _llamacpp,
    "vllm": _vllm,
    "sglang": _sglang,
    "mock": _mock,
}
