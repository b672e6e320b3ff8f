"""`meshwright bench offline --engine NAME`: replicas of an engine's batch interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.bench.batch.engines import EngineRequest, check_engine
from meshwright.bench.batch.replicas import BatchBenchRequest, measure_batches, started_replicas
from meshwright.bench.serving.offline import LengthPair
from meshwright.bench.serving.servers.table import parse_options
from meshwright.cli.bench_serve_server import model_to_serve
from meshwright.cli.output import progress
from meshwright.errors import InputError

TENSOR = "tensor-parallel-size"


def run(
    options: dict[str, Any],
    pairs: tuple[LengthPair, ...],
    environments: Sequence[dict[str, str]],
    measure: Callable[..., None],
) -> None:
    """Load the model in every replica, and measure."""
    name, given = options["engine"], parse_options(options["engine_options"])
    if options["server_options"] or options["tokenizer_path"]:
        raise InputError("--server-option and --tokenizer belong to servers", hint="--engine-option KEY=VALUE")
    if options["model"] is None:
        raise InputError(f"--engine {name} needs a model", hint="--model PATH")
    check_engine(name, given)
    _check_devices(options["devices"], given, environments)
    with TemporaryDirectory(prefix="meshwright-offline-") as scratch:
        model = model_to_serve(options["model"], Path(scratch))
        assert model is not None
        request = BatchBenchRequest(
            engine=name,
            load=EngineRequest(
                model=model.text, scratch=Path(scratch), options=given,
                longest=max(pair.input_tokens + pair.output_tokens for pair in pairs),
                most=-(-options["num_requests"] // len(environments)),
            ),
            pairs=pairs, num_requests=options["num_requests"], num_warmup=options["num_warmup"],
            environments=tuple(environments), folder=options["folder"],
            start_timeout_s=options["start_timeout_s"], timeout_s=options["timeout_s"],
            extrapolate_to=options["extrapolate_to"], seed=options["seed"],
        )  # fmt: skip
        if request.num_requests < len(environments):
            raise InputError(
                "a batch has fewer requests than there are replicas", got=request.num_requests,
                allowed=f">= {len(environments)}",
            )  # fmt: skip
        replicas = started_replicas(request)
        with progress(f"loading {name}"):
            started = replicas.__enter__()
        try:
            measure(
                partial(measure_batches, request, started),
                about={
                    "model": options["model"], "num_replicas": len(started), "num_pairs": len(pairs),
                    "software": dict(started[0].software), "load_s": [round(r.load_s, 3) for r in started],
                },
            )  # fmt: skip
        finally:
            replicas.__exit__(None, None, None)


def _check_devices(devices: str | None, given: dict[str, str], environments: Sequence[dict[str, str]]) -> None:
    """Refuse fewer devices a replica than its tensor parallelism needs."""
    tensor = given.get(TENSOR, "1")
    visible = environments[0].get("CUDA_VISIBLE_DEVICES", "") if devices else ""
    if visible and tensor.isdecimal() and int(tensor) > visible.count(",") + 1:
        raise InputError(
            f"{TENSOR} needs more devices than a replica has", got=tensor, allowed=f"1 to {visible.count(',') + 1}",
            hint="name more --devices, or fewer --replicas",
        )  # fmt: skip
