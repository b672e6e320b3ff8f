"""`meshwright inference plan`: the best serving layout under bounds."""

from __future__ import annotations

from typing import Any

from meshwright.answers.serving_plan import ServingPlan
from meshwright.api.inference import inference_plan
from meshwright.api.question import ask
from meshwright.cli.inference_estimate import print_hardware
from meshwright.cli.output import emit_json, note, print_line, print_text_tables

SHOWN, EXPLAINED = 5, 20


def run(
    *,
    asked: dict[str, Any],
    ttft_ms: float | None,
    itl_ms: float | None,
    explain: bool,
    pareto: bool,
    as_json: bool,
    **prices: Any,
) -> None:
    """Search and print."""
    bounds = {"ttft_s": ttft_ms, "itl_s": itl_ms}
    asked |= {name: None if ms is None else ms / 1e3 for name, ms in bounds.items()}
    found = ask(inference_plan, asked, prices=prices)
    if as_json:
        emit_json(found.to_dict())
        return
    print_line(found.summary(), style="bold")
    print_hardware(found.question.cluster)
    print_line()
    tables = [found.layout_table(EXPLAINED if explain else SHOWN)]
    print_text_tables([*tables, found.front_table()] if pareto else tables)
    _print_price(found)


def _print_price(found: ServingPlan) -> None:
    price = found.token_price
    if price is None:
        note("no price is known for this accelerator; --price or --capital gives one")
        return
    print_line()
    print_line(
        f"{price.usd_per_million_output:.3g} USD per million output tokens, {price.usd_per_million_total:.3g} per "
        f"million of all; by device time {price.usd_per_million_input_share:.3g} per million prompt tokens and "
        f"{price.usd_per_million_output_share:.3g} per million answer tokens"
    )
    note(f"{price.hour.total_usd_per_device_hour:.4g} USD per device-hour: {price.hour.source}")
