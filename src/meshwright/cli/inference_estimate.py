"""`meshwright inference estimate`: latencies, rates, memory and price of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.answers.cluster import hardware_line
from meshwright.answers.serving_estimate import serving_estimate
from meshwright.answers.serving_question import PriceTerms
from meshwright.cli.inference_options import given_cluster, given_degrees, given_terms
from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.inference.price import Ownership
from meshwright.specs.hardware import Cluster


def print_hardware(cluster: Cluster) -> None:
    """Print what the options state of the cluster's hardware, if anything."""
    if line := hardware_line(cluster):
        print_line(line)


def server_question(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `serving_estimate` and `serving_plan` that the options of both commands give."""
    given = given_terms(options)
    own = Ownership(**given["ownership"]) if given["ownership"] else None
    names = (
        "model", "precision", "kv_precision", "engine", "input_tokens", "output_tokens", "requests_per_s",
        "memory_ratio",
    )  # fmt: skip
    asked = {name: options[name] for name in names}
    return asked | {
        "cluster": given_cluster(options),
        "terms": PriceTerms(**given["terms"], ownership=own), "calibration": options["calibration_path"],
    }  # fmt: skip


def run(
    *,
    concurrency: tuple[int, ...] | None,
    prefill_replicas: int,
    drafted: int,
    accepted: float | None,
    draft: str | None,
    lockstep: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate and print."""
    found = serving_estimate(
        **server_question(options), concurrency=concurrency or (), degrees=given_degrees(options),
        prefill_replicas=prefill_replicas, drafted=drafted, accepted=accepted or 0.0, draft=draft, lockstep=lockstep,
    )  # fmt: skip
    if as_json:
        emit_json(found.to_dict())
        return
    of = found.server.of
    print_line(
        f"{of.model.name} in {of.weights.name}, {of.cache.name} cache, on {of.cluster.name}: {of.layout.describe()}, "
        f"{found.server.engine.name}, {options['input_tokens']:,} prompt tokens, "
        f"{options['output_tokens']:,} answer tokens"
    )
    print_hardware(of.cluster)
    print_text_tables(found.tables())
    if found.price is not None:
        note(f"{found.price.total_usd_per_device_hour:.4g} USD per device-hour: {found.price.source}")
    for line in found.notes:
        note(line)
