"""`meshwright.report_records`, `report_sources` and `compare`: reports on records and on the source documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import Amount, Flag, PathOrText, PlainText, answered_by_body, question

if TYPE_CHECKING:
    from meshwright.answers.comparison.study import SideComparison
    from meshwright.answers.overview.collect import RecordReport
    from meshwright.answers.sources.study import SourceReport

MAX_USD = 1e9

RENT = Amount(
    "USD per device-hour.", unset="the catalogue's, if it has any", flag="--price", metavar="USD", high=MAX_USD
)


@question("meshwright.api.report:record_report")
def report_records(
    *items: Annotated[
        str | os.PathLike[str],
        PathOrText(
            "Folders of records (all below them count), run files, `claim:ID`, `mlperf:NAME` or `points:KEY=TEXT`.",
            least=1,
            metavar="RECORDS",
        ),
    ],
    usd_per_device_hour: Annotated[float | None, RENT] = None,
    region: Annotated[
        str | None, PlainText("Region of the catalogue's price, as in 'East US 2'.", metavar="REGION")
    ] = None,
    capital_usd: Annotated[
        float | None,
        Amount(
            "Own instead of rent: USD per device with its share of node and network.",
            flag="--capital",
            metavar="USD",
            high=MAX_USD,
        ),
    ] = None,
    life_years: Annotated[
        float | None, Amount("Years a bought device is used.", unset="4", flag="--life", metavar="YEARS", high=100)
    ] = None,
    usd_per_kwh: Annotated[
        float | None, Amount("Price of electricity for a bought device.", unset="0.08", metavar="USD", high=1000)
    ] = None,
    licence_usd_per_device_year: Annotated[
        float | None,
        Amount(
            "Software licence, USD per device and year (NVIDIA AI Enterprise: 4000 or 4500).",
            flag="--licence",
            metavar="USD",
            high=MAX_USD,
        ),
    ] = None,
    utilization: Annotated[
        float | None, Amount("Share of paid hours in which tokens are made.", unset="1", metavar="SHARE", high=1)
    ] = None,
) -> RecordReport:
    """Collect records, estimates and published figures into one report. Imports no tensor framework.

    Returns:
        One entry for each record, with its values, conditions and endnote; `to_html(path)` writes the page.

    Raises:
        InputError: a record is damaged (file and field are named), or there is none.

    Example:
        >>> import meshwright as mw
        >>> mw.report_records("claim:s65_01", "claim:s65_02").summary()
        'claims: 2'
    """
    return answered_by_body()


def record_report(*, items: Sequence[str], **prices: float | str | None) -> RecordReport:
    """The answer to `report_records`."""
    from meshwright.answers.overview.collect import collect
    from meshwright.answers.serving_question import price_terms
    from meshwright.api.runs import load_run, planned_run

    return collect(items, read_run=lambda path: planned_run(load_run(path)), terms=price_terms(**prices))


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


@question("meshwright.api.report:comparison")
def compare(
    baseline: Annotated[str | os.PathLike[str], PathOrText("The side that all ratios refer to.")],
    *sides: Annotated[str | os.PathLike[str], PathOrText("The others, at least one.", least=1, metavar="SIDE")],
    like_for_like: Annotated[
        bool, Flag("Require the same model, tokens, batch and FLOP rule, and split the gap by cause.")
    ] = False,
) -> SideComparison:
    """Compare records, estimates and published figures with a baseline. Imports no tensor framework.

    A side is a folder of records, a run file, `claim:ID,...`, `mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK` with `*` for
    any text, or `points:KEY=TEXT,...`; `NAME=SIDE` gives it a name.

    Returns:
        Ratios by workload with intervals, geometric means with leave-one-out, what differs, warnings, and
        the time per token by cause where the records have a profile.

    Raises:
        InputError: a side cannot be read, or the sides have nothing in common.
        InfeasibleError: `like_for_like`, and their work differs.

    Example:
        >>> import meshwright as mw
        >>> found = mw.compare("claim:s65_02", "claim:s65_01")
        >>> round(found.means[0].value, 3)
        1.026
    """
    return answered_by_body()


def comparison(*, baseline: str, sides: Sequence[str], like_for_like: bool) -> SideComparison:
    """The answer to `compare`."""
    from meshwright.answers.comparison.study import compare_items
    from meshwright.api.runs import load_run, planned_run

    return compare_items(
        (baseline, *sides), is_like_for_like=like_for_like, read_run=lambda path: planned_run(load_run(path))
    )
