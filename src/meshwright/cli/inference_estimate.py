"""`meshwright inference estimate`: latencies, rates, memory and price of a server."""

from __future__ import annotations

from typing import Any

from meshwright.cli.inference_options import given_degrees, given_terms
from meshwright.cli.output import emit_json, note, print_line, print_text_tables
from meshwright.inference.price import Ownership
from meshwright.report.serving_estimate import serving_estimate
from meshwright.report.serving_question import PriceTerms


def terms_of(options: dict[str, Any]) -> PriceTerms:
    """Terms of the price that the options give."""
    given = given_terms(options)
    own = Ownership(**given["ownership"]) if given["ownership"] else None
    return PriceTerms(**given["terms"], ownership=own)


def run(
    *,
    model: str,
    cluster: str,
    precision: str,
    kv_precision: str | None,
    input_tokens: int,
    output_tokens: int,
    engine: str,
    concurrency: tuple[int, ...] | None,
    requests_per_s: float | None,
    prefill_replicas: int,
    drafted: int,
    accepted: float | None,
    memory_ratio: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate and print."""
    found = serving_estimate(
        model=model, cluster=cluster, precision=precision, kv_precision=kv_precision, engine=engine,
        input_tokens=input_tokens, output_tokens=output_tokens, concurrency=concurrency or (),
        requests_per_s=requests_per_s, degrees=given_degrees(options), prefill_replicas=prefill_replicas,
        drafted=drafted, accepted=accepted or 0.0, memory_ratio=memory_ratio, terms=terms_of(options),
    )  # fmt: skip
    if as_json:
        emit_json(found.to_dict())
        return
    of = found.server.of
    print_line(
        f"{of.model.name} in {of.weights.name}, {of.cache.name} cache, on {of.cluster.name}: {of.layout.describe()}, "
        f"{engine}, {input_tokens:,} prompt tokens, {output_tokens:,} answer tokens"
    )
    print_text_tables(found.tables())
    if found.price is not None:
        note(f"{found.price.total_usd_per_device_hour:.4g} USD per device-hour: {found.price.source}")
    for line in found.notes:
        note(line)
