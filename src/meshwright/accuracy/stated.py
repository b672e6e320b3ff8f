"""Numbers of a row: cells that its note fills, and everything in which cells and note contradict each other."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from meshwright.accuracy.csvfile import MAX_COUNT, MAX_TOKENS, CsvRow
from meshwright.accuracy.rates import stated_rates
from meshwright.accuracy.spelling import chips_of_slice, spelled
from meshwright.accuracy.statements import Polarity, Statements, plain, read_statements
from meshwright.accuracy.wording import number_format, yes_or_no

_NUMBERS = ("tp", "pp", "cp", "ep", "etp", "vpp", "mbs", "gbs", "grad_accum", "gpus_per_node", "num_nodes")
"""Columns whose numbers notes state in words of the vocabulary."""
RATES_DIFFER = 0.05
"""Relative difference between a printed rate and the rate of a printed step time that gets a note: tables
round by less."""


def with_stated_numbers(row: CsvRow) -> tuple[CsvRow, list[str]]:
    """`row` with the empty cells whose number its note states once, and a note on each and on each contradiction."""
    said, cells, notes = read_statements(row.text("notes")), dict(row.cells), list[str]()
    of_sharding = read_statements(f"{row.text('dp_type')}; {row.text('schedule')}")
    row = CsvRow(row.file, row.line, cells)
    for column in _NUMBERS:
        found = {
            str(int(m.value)) for m in (*said.mentions(column), *of_sharding.mentions(column)) if m.value is not None
        }
        found = {number for number in found if 0 < int(number) <= MAX_COUNT}
        if not found:
            continue
        named = " and ".join(sorted(found, key=int))
        if row.count(column) is None and len(found) == 1 and row.text(column) != "0":
            cells[column] = named
            notes.append(f"{column} {named}, as the note says")
        elif row.count(column) is None:
            notes.append(f"notes say {named} of {column}: not used")
        elif found != {str(row.count(column))}:
            notes.append(f"notes say {named} of {column}: its column used, {row.count(column)}")
    _fill_token_batch(row, said, notes)
    _fill_local_batch(row, said, notes)
    _fill_data_axes(row, said, notes)
    return row, [*notes, *said.contradictions()]


_CORES = re.compile(r"1 chip = (\d+)[^;]*JAX devices")


def stated_cores(row: CsvRow) -> int:
    """Devices of JAX for each chip of a row, as its note counts them."""
    counted = _CORES.search(row.text("notes"))
    return int(counted[1]) if counted else 1


def _cores_of_options(row: CsvRow) -> int:
    """Cores of a device for the options in a note, which MaxText counts in cores: two on TPU7x, stated or not."""
    is_tpu7x = spelled(row.text("gpu")) == "tpu7x" and "maxtext" in row.text("framework").lower()
    return max(stated_cores(row), 2 if is_tpu7x else 1)


def _only(said: Statements, switch: str) -> int | None:
    """The number that a note states for a switch, where it states one."""
    found = {int(m.number) for m in said.mentions(switch) if m.polarity is Polarity.ON and m.number}
    return found.pop() if len(found) == 1 and 0 < min(found) <= MAX_COUNT else None


_TOKENS = {"": (1, 1), "k": (1000, 2**10), "m": (10**6, 2**20), "b": (10**9, 2**30)}
"""Unit of a number of tokens -> decimal and binary size."""


def _fill_token_batch(row: CsvRow, said: Statements, notes: list[str]) -> None:
    """The global batch in tokens. "4M" is the size, decimal or binary, that is a whole number of sequences."""
    found = {m.number for m in said.mentions("gbs_tokens") if m.value}
    if len(found) != 1 or row.count("gbs_tokens", limit=MAX_TOKENS):
        notes.extend(f"notes say a batch of {number} tokens: not used" for number in sorted(found))
        return
    text, seq_len = found.pop(), row.count("seq_len") or 1
    unit = text[-1] if text[-1] in "kmb" else ""
    number = float(text.removesuffix(unit).rstrip(" ."))
    sizes = [round(number * size) for size in _TOKENS[unit]]
    tokens = next((size for size in sizes if size % seq_len == 0), sizes[0])
    if 0 < tokens <= MAX_TOKENS:
        row.cells["gbs_tokens"] = str(tokens)
        notes.extend([] if row.count("gbs") else [f"a batch of {tokens:,} tokens, as the note says"])


def _fill_local_batch(row: CsvRow, said: Statements, notes: list[str]) -> None:
    """The batch of a data-parallel rank, which is its micro-batch where there is no pipeline."""
    batch, micro, cores = _only(said, "local_batch"), row.count("mbs"), _cores_of_options(row)
    if batch is None or (cores > 1 and (row.count("gbs") or micro)):
        return
    if micro is None and (row.count("pp") or 1) == 1:
        row.cells["mbs"] = str(batch * cores)
        notes.append(f"mbs {batch * cores}, as the note says")
    elif micro != batch:
        notes.append(f"notes say {batch} sequences of a rank: not used")


MESH = re.compile(r"hsdp[=: (\[]*(\d{1,6}) ?(?:x|,) ?(\d{1,6})(?!\d)")
"""A mesh as PyTorch's hybrid sharding takes it: replicas, then the ranks that share the parameters of one."""


def _fill_data_axes(row: CsvRow, said: Statements, notes: list[str]) -> None:
    """Data-parallel ranks, and those that shard parameters, where they agree with the other degrees."""
    if _cores_of_options(row) > 1:  # `layout` counts these in chips
        return
    ranks = (row.count("num_gpus") or 0) / math.prod(row.count(c) or 1 for c in ("tp", "pp", "cp"))
    data, shard, replicas = (_only(said, c) for c in ("dp", "dp_shard", "dp_replicate"))
    if shard and data and shard * data == ranks and not replicas:
        data, replicas = None, data  # "FSDP 8 x DP 4": the replicas by themselves
    if mesh := MESH.search(plain(f"{row.text('notes')}; {row.text('dp_type')}")):
        replicas, shard = int(mesh[1]), int(mesh[2])
    if data and row.count("dp") is None:
        if data == ranks:
            row.cells["dp"] = str(data)
        notes.append(f"dp {data}, as the note says" if data == ranks else f"notes say {data} of dp: not used")
    elif data and data != row.count("dp"):
        notes.append(f"notes say {data} of dp: its column used, {row.count('dp')}")
    shard = shard or (int(ranks // replicas) if replicas and ranks % replicas == 0 else None)
    if shard and shard * (replicas or 1) == ranks and not re.search(r"\d", row.text("dp_type")):
        row.cells["dp_type"] = f"fsdp {shard}"
    elif shard and f"{shard}" not in row.text("dp_type"):
        notes.append(f"notes say {shard} ranks share the parameters: not used")


def with_products(row: CsvRow) -> CsvRow:
    """`row` with devices from nodes, and data parallelism from the columns that its framework splits it into."""
    cells = dict(row.cells)
    nodes, per_node = row.count("num_nodes"), row.count("gpus_per_node")
    if not row.text("num_gpus") and nodes and per_node:
        cells["num_gpus"] = str(nodes * per_node)
    shard, replicas = row.count("dp_shard"), row.count("dp_replicate")
    if (shard or 0) > 1:
        cells["dp"] = row.text("dp") or str((shard or 1) * (replicas or 1))
        cells["dp_type"] = row.text("dp_type") or f"fsdp {shard}"
    if not cells.get("dp_type") and row.text("fsdp") and yes_or_no(row.text("fsdp")) is not False:
        cells["dp_type"] = "fsdp" if yes_or_no(row.text("fsdp")) else f"fsdp {row.text('fsdp')}"
    return replace(row, cells=cells)


def contradictions(row: CsvRow) -> list[str]:
    """Numbers that `row` states twice and differently, with the one that is used; all of them."""
    devices, per_node, nodes = row.count("num_gpus"), row.count("gpus_per_node"), row.count("num_nodes")
    chips = chips_of_slice(row.text("gpu"))
    batch, seq_len = row.count("gbs"), row.count("seq_len")
    tokens = row.count("gbs_tokens", limit=MAX_TOKENS)
    found = []
    if devices and per_node and nodes and -(-devices // per_node) != nodes:
        found.append(f"{nodes} nodes of {per_node} are not {devices} devices: {devices} used")
    if chips and devices and devices != chips:
        found.append(f"a slice {row.text('gpu')} has {chips} chips: {devices} used, as of several")
    if batch and seq_len and tokens and abs(tokens / (batch * seq_len) - 1) > RATES_DIFFER:
        found.append(f"{batch} sequences of {seq_len} are not {tokens:,} tokens: the sequences used")
    rate, step = row.number("tok_s_gpu_best"), row.number("step_time_s")
    if rate and step and devices and seq_len and (batch or tokens):
        of_step = (batch * seq_len if batch else tokens or 0) / (step * devices)
        if abs(of_step / rate - 1) > RATES_DIFFER:
            found.append(
                f"{step:g} s a step are {of_step:,.0f} tokens/s per device, printed {rate:,.0f}: the latter used"
            )
    for of_unit, rounding, unit in stated_rates(row):
        if rate and abs(of_unit / rate - 1) > RATES_DIFFER + rounding:
            found.append(f"{unit} are {of_unit:,.0f} tokens/s per device, printed {rate:,.0f}: the latter used")
    return found + _formats(row)


def _formats(row: CsvRow) -> list[str]:
    """Number formats of the column and of the note, where they are of different widths."""
    column, note = _column_format(row), read_statements(row.text("notes")).value("precision")
    if not column or not note or _bits(column) == _bits(note):
        return []
    return [f"notes say {note} of the precision: its column used, {column}"]


def _bits(name: str) -> str:
    return next((bits for bits in ("32", "16", "8", "4") if name.partition("_")[0].endswith(bits)), name)


def scaling_of(row: CsvRow) -> str:
    """The recipe of 8 bits that the column or the note names; empty where neither names one."""
    return (
        read_statements(row.text("precision")).value("scaling")
        or read_statements(row.text("notes")).value("scaling")
        or ""
    )


def format_of(row: CsvRow) -> str:
    """The number format of the column, else of the note; empty where neither names one."""
    return _column_format(row) or read_statements(row.text("notes")).value("precision") or ""


def _column_format(row: CsvRow) -> str:
    """The number format of the GEMMs that the column names; empty where it names none."""
    column = row.text("precision")
    name, said = number_format(column), read_statements(column)
    if name == column.strip().lower() or said.mentions("fp8_attention") or "+" in column:
        return said.value("precision") or ("bf16" if said.value("masters") == "none" else name)
    return name
