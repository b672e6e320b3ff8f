"""`meshwright inference estimate`: latencies, rates, memory and price of a server."""

from __future__ import annotations

from typing import Any

from meshwright.answers.cluster import hardware_line
from meshwright.api.inference import inference_estimate
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.specs.hardware import Cluster


def print_hardware(cluster: Cluster) -> None:
    """Print what the options state of the cluster's hardware, if anything."""
    if line := hardware_line(cluster):
        print_line(line)


def run(
    *, asked: dict[str, Any], drafted: int, draft: str | None, accepted: float | None, as_json: bool, **prices: Any
) -> None:
    """Estimate and print."""
    found = ask(inference_estimate, asked, prices=prices, drafted=drafted, draft=draft, accepted=accepted or 0.0)
    if as_json:
        emit_json(found.to_dict())
        return
    of = found.server.of
    print_line(
        f"{of.model.name} in {of.weights.name}, {of.cache.name} cache, on {of.cluster.name}: {of.layout.describe()}, "
        f"{found.server.engine.name}, {asked['input_tokens']:,} prompt tokens, "
        f"{asked['output_tokens']:,} answer tokens"
    )
    print_hardware(of.cluster)
    print_text_tables(found.tables())
    if found.price is not None:
        note(f"{found.price.total_usd_per_device_hour:.4g} USD per device-hour: {found.price.source}")
    for line in found.notes:
        note(line)
