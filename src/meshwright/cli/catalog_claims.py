"""Tables of `meshwright catalog claims`: published claims and their predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from meshwright.cli.output import print_line, print_table
from meshwright.specs.estimate import Estimate


def print_claims(rows: list[dict[str, Any]]) -> None:
    """Print a table of claims, or of their predictions if the rows have any."""
    if any("prediction" in row for row in rows):
        _print_predictions(rows)
        return
    print_table(
        {
            "claim": "left", "model": "left", "accelerator": "left", "devices": "right", "metric": "left",
            "value": "right", "unit": "left", "here": "left",
        },
        (
            (
                r["claim_id"], r["model"], r["accelerator"], r["num_accelerators"], r["metric"],
                f"{r['value']:g}", r["unit"], r["answer"]["kind"].value,
            )
            for r in rows
        ),
    )  # fmt: skip
    print_line()
    print_line("--predict computes the predicted and reproduced claims; NAME shows the commands")


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    computed = [row for row in rows if row["prediction"] is not None]
    print_table(
        {
            "claim": "left", "model": "left", "accelerator": "left", "metric": "left", "printed": "right",
            "computed": "right", "80 % interval": "right", "off": "right",
        },
        (
            (r["claim_id"], r["model"], r["accelerator"], r["metric"], f"{r['value']:g}", *_cells(r["prediction"]))
            for r in computed
        ),
    )  # fmt: skip
    for row in computed:
        if "why_not" in row["prediction"]:
            print_line(f"{row['claim_id']}: {row['prediction']['why_not']}")
    rated = [r["prediction"] for r in computed if "value" in r["prediction"]]
    inside = sum(p["is_inside"] for p in rated)
    print_line()
    print_line(f"{inside} of {len(rated)} lie in the interval or round into it; * marks those that do not")
    others = Counter(r["answer"]["kind"].value for r in rows if r["prediction"] is None)
    print_line(f"not computed: {', '.join(f'{count} {kind}' for kind, count in others.items())}")


def _cells(prediction: dict[str, Any]) -> tuple[str, str, str]:
    """Value, interval and relative error."""
    if "why_not" in prediction:
        return ("does not fit", "", "")
    value: Estimate = prediction["value"]
    mark = "" if prediction["is_inside"] else " *"
    exact = value.low == value.high
    interval = "" if exact else f"{_number(value.low)} to {_number(value.high)}"
    return _number(value.value), interval, f"{100 * (prediction['over_printed'] - 1):+.1f} %{mark}"


def _number(value: float) -> str:
    """Four significant digits, or a whole number above 1000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def print_claim(document: dict[str, Any]) -> None:
    """Print one claim, its prediction, and the commands that reproduce it."""
    print_line(f"{document['claim_id']}: {document['document']}", style="bold")
    hidden = ("claim_id", "document", "answer", "prediction")
    rows = [(k, v) for k, v in document.items() if k not in hidden and v not in ("", None)]
    rows = [(k, f"{v:,g}" if isinstance(v, float) else v) for k, v in rows]
    print_table(("field", "value"), [*rows, *_answer_rows(document)])
    print_line()
    for command in document["answer"]["commands"]:
        print_line(command)


def _answer_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    answer = document["answer"]
    yield "here", answer["kind"].value
    if answer["assumed"]:
        yield "assumed", answer["assumed"]
    prediction = document.get("prediction")
    if not prediction:
        return
    value, interval, off = _cells(prediction)
    text = f"{value} ({interval}), {off}" if interval else f"{value}, {off}"
    yield "computed", prediction.get("why_not", text)
    for plan in prediction.get("plans", ()):
        yield "with plan", plan
