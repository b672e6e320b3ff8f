"""Headers of rates in any unit, and the tokens per second and device that they mean for a row.

    Tokens/s/GPU, k tokens per second per chip, tokens per GPU per day      of one device
    total tokens/s, cluster throughput (tokens/s), samples/s                of all devices
    steps/s, it/s                                                           of steps

"Tokens/s" of nothing is not read: some tables mean one device and others all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.accuracy.csvfile import CsvRow

_AMOUNTS: dict[str | float, str] = {
    "tokens": "tok toks token tokens",
    "sequences": "sample samples seq seqs sequence sequences example examples",
    "steps": "step steps it iter iters iteration iterations",
}
_OWNERS: dict[str | float, str] = {
    "device": "gpu gpus device chip chips accelerator card npu xpu rank",
    "node": "node host server",
    "all": "total overall cluster global aggregate aggregated system all",
}
DAY_S = 86400.0
_SECONDS: dict[str | float, str] = {
    1.0: "s sec secs second seconds",
    60.0: "min minute minutes",
    3600.0: "h hr hour hours",
    DAY_S: "d day days",
}
_PREFIXES: dict[str | float, str] = {1e3: "k kilo thousand", 1e6: "m million mega", 1e9: "b billion g"}
_TABLES = {"amount": _AMOUNTS, "time": _SECONDS, "prefix": _PREFIXES, "owner": _OWNERS}
_FILLERS = "per throughput rate speed training train avg average mean median measured best reported steady state in of"


@dataclass(frozen=True, kw_only=True)
class RateUnit:
    """Unit of a column: its numbers times `scale` are `amount` per second of `owner`."""

    amount: str  # tokens, sequences or steps
    owner: str  # device, node or all
    scale: float

    @property
    def column(self) -> str:
        """Name of the column that rows keep."""
        if (self.amount, self.owner) == ("sequences", "all"):
            return "samples_per_s"
        return f"{self.amount}_per_s_of_{self.owner}"


RATE_COLUMNS = tuple(
    RateUnit(amount=str(amount), owner=str(owner), scale=1.0).column
    for amount in _AMOUNTS
    for owner in _OWNERS
    if amount != "steps" or owner == "all"
)
"""Columns of rates in other units."""


def rate_unit(word: str) -> RateUnit | None:
    """The unit that a header names, in lower case with _ between words; None for anything else.

    >>> rate_unit("tokens_sec_chip"), rate_unit("k_tokens_per_gpu_per_day").scale * 86400
    (RateUnit(amount='tokens', owner='device', scale=1.0), 1000.0)
    >>> rate_unit("tokens_per_second") is None, rate_unit("samples_s").column
    (True, 'samples_per_s')
    """
    found: dict[str, str | float] = {}
    for part in word.split("_"):
        if part in _FILLERS.split():
            continue
        of_part = [(k, v) for k, table in _TABLES.items() for v, names in table.items() if part in names.split()]
        if not of_part or of_part[0][0] in found:
            return None
        found.update(of_part[:1])
    if not {"amount", "time"} <= set(found) or [*found].index("time") < [*found].index("amount"):
        return None  # seconds of a step are no rate
    amount, time = str(found["amount"]), float(found["time"])
    owner = found.get("owner", "" if amount == "tokens" and time < DAY_S else "all")
    if not owner or (amount == "steps" and owner != "all"):
        return None
    return RateUnit(amount=amount, owner=str(owner), scale=float(found.get("prefix", 1.0)) / time)


def with_rate(row: CsvRow) -> tuple[CsvRow, list[str]]:
    """`row` with its tokens per second and device, where it states another unit and what to convert it with."""
    if row.text("tok_s_gpu_best"):
        return row, []
    if not row.text("step_time_s") and (steps := row.number("steps_per_s_of_all")):
        return replace(row, cells=row.cells | {"step_time_s": repr(1 / steps)}), [f"{1 / steps:.4g} s a step"]
    for rate, _, unit in stated_rates(row):
        return replace(row, cells=row.cells | {"tok_s_gpu_best": repr(rate)}), [f"rate from {unit}"]
    return row, []


def stated_rates(row: CsvRow) -> Iterator[tuple[float, float, str]]:
    """(tokens/s per device, relative error of cut digits, how it is printed) of each rate in other units."""
    seq_len, per_node, num_devices = row.count("seq_len"), row.count("gpus_per_node"), row.count("num_gpus")
    for owner, devices in (("device", 1), ("node", per_node), ("all", num_devices)):
        of = "a device" if owner == "device" else f"{devices} devices"
        sequences = f"sequences_per_s_of_{owner}"
        sequences = "samples_per_s" if owner == "all" and not row.number(sequences) else sequences
        for column, unit, tokens in ((f"tokens_per_s_of_{owner}", "tokens/s", 1), (sequences, "samples/s", seq_len)):
            if (value := row.number(column)) and tokens and devices:
                digits = len(row.text(column).partition(".")[2])
                yield value * tokens / devices, 1 / 10**digits / value, f"{value:,g} {unit} of {of}"
