"""`meshwright.report_records` and `meshwright.report_sources`: reports on records and on the source documents."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshwright.api import arguments

if TYPE_CHECKING:
    from meshwright.answers.overview.collect import RecordReport
    from meshwright.answers.sources.study import SourceReport


def report_records(
    *items: str | os.PathLike[str],
    usd_per_device_hour: float | None = None,
    region: str | None = None,
    capital_usd: float | None = None,
    life_years: float | None = None,
    usd_per_kwh: float | None = None,
    licence_usd_per_device_year: float | None = None,
    utilization: float | None = None,
) -> RecordReport:
    """Collect records, estimates and published figures into one report. Imports no tensor framework.

    Args:
        items: folders of records (all below them count), run files, `claim:ID`, `mlperf:NAME` or `points:KEY=TEXT`.
        usd_per_device_hour: price of a rented device. Default: all prices of the catalogue.
        region: region of the catalogue's prices.
        capital_usd: own instead of rent: price of a device with its share of node and network.
        life_years: years that a bought device is used. Default: 4.
        usd_per_kwh: price of electricity for a bought device. Default: 0.08.
        licence_usd_per_device_year: software licence.
        utilization: share of paid hours in which tokens are made. Default: 1.

    Returns:
        One entry for each record, with its values, conditions and endnote; `to_html(path)` writes the page.

    Raises:
        InputError: a record is damaged (file and field are named), or there is none.

    Example:
        >>> import meshwright as mw
        >>> mw.report_records("claim:s65_01", "claim:s65_02").summary()
        'claims: 2'
    """
    from meshwright.answers.overview.collect import collect
    from meshwright.answers.serving_question import PriceTerms
    from meshwright.api.runs import load_run, planned_run
    from meshwright.inference.price import Ownership

    own = {"capital_usd": capital_usd, "life_years": life_years, "usd_per_kwh": usd_per_kwh}
    own = {name: arguments.number(name, value) for name, value in own.items() if value is not None}
    given = {
        "usd_per_device_hour": usd_per_device_hour, "licence_usd_per_device_year": licence_usd_per_device_year,
        "utilization": utilization,
    }  # fmt: skip
    given = {name: arguments.number(name, value) for name, value in given.items() if value is not None}
    terms = PriceTerms(region=region, ownership=Ownership(**own) if own else None, **given)
    named = [item if isinstance(item, str) else str(arguments.path("item", item)) for item in items]
    return collect(named, read_run=lambda path: planned_run(load_run(path)), terms=terms)


def report_sources() -> SourceReport:
    """Predict every claim of the source documents, beside published logs and measurements. Imports no tensor framework.

    Returns:
        One row for each claim: printed, predicted, published, measured, class and reason; and the documents' slips.
        `to_html(path)` writes the page. It takes about ten seconds.

    Example:
        >>> import meshwright as mw
        >>> report = mw.report_sources()  # doctest: +SKIP
    """
    from meshwright.answers.sources.study import source_report

    return source_report()
