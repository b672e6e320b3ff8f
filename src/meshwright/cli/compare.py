"""`meshwright compare`: records, estimates and published figures side by side."""

from __future__ import annotations

from typing import Any

from meshwright.api.compare import compare
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, print_line, print_text_tables, write_forms
from meshwright.report.comparison.tables import tables_of


def run(*, asked: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Compare, and write the forms asked for."""
    found = ask(compare, asked)
    home = "meshwright.report.comparison"
    write_forms(
        found, page=f"{home}.page:comparison_page", markdown=f"{home}.tables:markdown",
        figures=f"{home}.page:figures_of", options=options,
    )  # fmt: skip
    if as_json:
        emit_json(found.to_dict())
        return
    print_text_tables(tables_of(found))
    print_line()
    for text in found.cautions:
        print_line(f"caution: {text}")
