"""Published runs: conditions and measurements of each CSV row, or the reason why it cannot be predicted.

The shipped `measured_runs.csv` has the same schema. Every value that a rule fills in is named in `assumed`. A
row with too many missing values has a reason instead of conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from meshwright.accuracy.adapters import read_lora, with_compute_precision
from meshwright.accuracy.columns import MEASURES, our_columns, with_switches_as_notes
from meshwright.accuracy.conditions import ADAMW, TF32, RunConditions
from meshwright.accuracy.csvfile import MAX_COUNT, MAX_TOKENS, CsvRow, read_table
from meshwright.accuracy.duplicates import DUPLICATE_NOTE, with_duplicates_layout
from meshwright.accuracy.feasible import with_what_fits
from meshwright.accuracy.features import note_of_defaults
from meshwright.accuracy.flop_rates import least_flops_per_token, rate_of_flops
from meshwright.accuracy.layout import NO_ACCUMULATION, PublishedLayout, read_layout
from meshwright.accuracy.networks import StatedNetwork, links_of, read_network_of
from meshwright.accuracy.rates import RATE_COLUMNS, with_rate
from meshwright.accuracy.reasons import CannotPredictError, Reason
from meshwright.accuracy.shapes import read_model, total_parameters
from meshwright.accuracy.shipped import frameworks, published_systems
from meshwright.accuracy.software import Software, read_software
from meshwright.accuracy.spelling import catalogued, watts_of
from meshwright.accuracy.stated import contradictions, format_of, scaling_of, with_products, with_stated_numbers
from meshwright.accuracy.statements import Polarity, Statements, read_statements
from meshwright.accuracy.tables import cluster_of, fabric_name
from meshwright.catalog import lookup as catalog
from meshwright.catalog.clusters import placed_fabric
from meshwright.catalog.interconnects import says_no_bridge
from meshwright.catalog.precisions import multiplies
from meshwright.catalog.prices import power_assumptions
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import AttentionKind, Model
from meshwright.specs.model_parts import uncalibrated
from meshwright.specs.precision import PRECISIONS

GPU_VENDORS = ("nvidia", "amd")
PARAMETERS_DIFFER = 0.1
"""Relative difference of printed and counted parameters that is noted: names round by up to a tenth."""

_OTHER_TASKS = re.compile(r"\b(?:inference|serving|generation|rlhf|rl|grpo|ppo|dpo|reward|distill\w*)\b", re.IGNORECASE)
"""Tasks whose steps do more or less than train one model on given sequences."""

MAX_PER_NODE = 72
"""Devices of the largest node that a row may mean by its number of nodes: an NVLink domain of 72."""

BF16_BYTES = 2
"""Bytes of a number in 16 bits."""

DEPTH_DIFFERS = 0.25
"""Relative error of the parameter count of a model of another depth, above which either model may have been trained."""

MEASURED_COLUMNS = ("model", "gpu", "num_gpus", "seq_len")
"""Columns that a file of measured runs must have, beside one of `columns.MEASURES`."""
FAILED_COLUMNS = (
    "source_key", "task", "model", "gpu", "num_gpus", "seq_len", "mbs", "gbs", "tp", "pp", "dp",
    "layers", "hidden", "heads", "precision", "framework", "date", "metric_kind",
)  # fmt: skip
"""Columns that a file of failed configurations must have."""
_NUMBERS = (
    "tok_s_gpu_best", "step_time_s", "mem_gb_per_gpu", "params_b", "tflops_per_gpu", "mfu_pct", "hfu_pct",
    "mfu_peak_tflops", "gemm_tflops", *RATE_COLUMNS,
)  # fmt: skip
_COUNTS = dict.fromkeys(
    (
        "num_gpus", "gpus_per_node", "num_nodes", "seq_len", "mbs", "gbs", "grad_accum", "tp", "pp", "cp", "dp", "ep",
        "etp", "vpp", "dp_shard", "dp_replicate", "layers", "hidden", "ffn", "moe_ffn", "heads", "kv_heads",
        "vocab", "experts", "topk", "shared_experts",
    ),
    MAX_COUNT,
) | {"gbs_tokens": MAX_TOKENS}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row: its conditions, or the reason why they are unknown, and its measurements.

    A row may have conditions and a reason: without a rate its memory can still be compared.
    """

    line: int
    id: str
    source_key: str
    source: str
    task: str
    model_name: str
    arch: str
    accelerator_name: str
    framework_name: str
    metric_kind: str
    quality: str  # as printed: letter and kind
    date: str
    notes: str
    conditions: RunConditions | None
    reason: Reason | None
    reason_detail: str = ""
    assumed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # clauses of the note that are not understood, or only in part
    tokens_per_s_per_device: float | None = None
    step_time_s: float | None = None
    memory_bytes: float | None = None
    memory_definition: str = "unknown"  # allocated, reserved, unknown

    @property
    def quality_letter(self) -> str:
        """A: printed table, raw log or file; B: transcribed, figure or rounded; C: approximate."""
        return self.quality[:1]

    @property
    def is_sweep(self) -> bool:
        """True if the row is one of a grid of mostly poor plans."""
        kinds = f"{self.quality} {self.metric_kind}"
        return "sweep" in kinds or self.source_key in frameworks()["sweeps"]["sources"]

    @property
    def is_gpu(self) -> bool:
        """True if the accelerator is a catalogued GPU."""
        found = catalogued(self.accelerator_name)
        return found is not None and found.vendor.lower() in GPU_VENDORS

    @property
    def groups(self) -> dict[str, str]:
        """The groups of the report that this row belongs to: kind of group -> group."""
        c, accelerator = self.conditions, catalogued(self.accelerator_name)
        groups = {
            "source": self.source_key,
            "accelerator": accelerator.name if accelerator else self.accelerator_name or "not stated",
            "architecture": "moe" if "moe" in self.arch else "dense",
            "task": self.task,
            "quality": self.quality_letter,
        }
        if c is not None:
            groups |= {
                "architecture": "dense" if c.model.experts is None else "moe",
                "framework": c.stack.framework,
                "size": size_class(c.model),
                "precision": c.precision,
            }
        return groups


def size_class(model: Model) -> str:
    """The size class of a model by its active parameters."""
    active = float(count_parameters(model_row(model)).active)
    for limit, name in ((3e9, "under 3B active"), (20e9, "3B to 20B active"), (100e9, "20B to 100B active")):
        if active < limit:
            return name
    return "over 100B active"


def read_runs(path: str | Path) -> list[PublishedRun]:
    """Every row of a CSV of measured runs, which a process reads again only if its content has changed.

    Raises InputError for a file that cannot be read or lacks columns, and for a cell that is not a number.
    """
    content = None
    with suppress(OSError):
        if Path(path).is_file():
            content = Path(path).read_bytes()
    if content is None:  # a pipe, which can be read but once, or nothing that can be read
        return _read_runs(path)
    return list(_known_runs(str(path), content))


@lru_cache(maxsize=2)
def _known_runs(path: str, content: bytes) -> tuple[PublishedRun, ...]:
    """The rows of `path` while `content` is in it."""
    return tuple(_read_runs(path))


def _read_runs(path: str | Path) -> list[PublishedRun]:
    rows = [read_row(row) for row in with_duplicates_layout(table_of_runs(path))]
    fitting = with_what_fits([(run.conditions, run.assumed) for run in rows])
    return [replace(run, conditions=c, assumed=notes) for run, (c, notes) in zip(rows, fitting, strict=True)]


def read_failed(path: str | Path) -> list[PublishedRun]:
    """Every row of a CSV of configurations that did not run.

    Only those that ran out of memory have no reason. Raises InputError as `read_runs` does.
    """
    runs = []
    for row in _table(path, FAILED_COLUMNS):
        run = read_row(row, failed=True)
        if run.reason is None and "oom" not in run.metric_kind:
            run = replace(run, reason=Reason.NOT_MEMORY, reason_detail=run.metric_kind)
        runs.append(run)
    return runs


def table_of_runs(path: str | Path) -> list[CsvRow]:
    """The rows of a CSV of measured runs as they are written. Raises InputError as `read_runs` does."""
    rows = _table(path, tuple(f"{c}|num_nodes+gpus_per_node" if c == "num_gpus" else c for c in MEASURED_COLUMNS))
    if rows and not any(measure in rows[0].cells for measure in MEASURES):
        raise InputError(f"{path}: missing a measured column", allowed=f"one or more of {', '.join(MEASURES)}")
    return rows


def _table(path: str | Path, required: tuple[str, ...]) -> list[CsvRow]:
    rows = read_table(path, required=required, numbers=_NUMBERS, counts=_COUNTS, columns=our_columns)
    return [with_switches_as_notes(row) for row in rows]


def read_row(
    row: CsvRow, *, failed: bool = False, layout: Callable[..., PublishedLayout] = read_layout
) -> PublishedRun:
    """One row, without a look at the rest of its file. Raises InputError for a cell that is not a number.

    layout: reads its plan and batch; another reader where a caller supplies the plan that the row does not state.
    """
    row, converted = with_rate(with_products(row))
    rate, memory = row.number("tok_s_gpu_best") or None, row.number("mem_gb_per_gpu") or None
    device = catalogued(row.text("gpu"))
    if memory and device and memory * 1e9 > device.memory_bytes:
        converted.append(f"{memory:g} GB of memory, more than {device.name} has: not used")
        memory = None
    run = PublishedRun(
        line=row.line,
        id=row.text("id") or f"line-{row.line}",
        source_key=row.text("source_key"),
        source=row.text("source"),
        task=row.text("task"),
        model_name=row.text("model"),
        arch=row.text("arch"),
        accelerator_name=row.text("gpu"),
        framework_name=row.text("framework"),
        metric_kind=row.text("metric_kind"),
        quality=row.text("quality"),
        date=row.text("date"),
        notes=row.text("notes"),
        unread=read_statements(row.text("notes")).unread,
        conditions=None,
        reason=None,
        tokens_per_s_per_device=rate,
        step_time_s=row.number("step_time_s") or None,
        memory_bytes=memory * 1e9 if memory else None,
    )
    try:
        _check_figure(row, rate=rate, memory=memory, failed=failed)
        run = _with_conditions(row, run, layout)
    except CannotPredictError as stop:
        return replace(run, reason=stop.reason, reason_detail=stop.detail)
    run = replace(run, assumed=(*run.assumed, *converted))
    if rate is None and not failed:
        run = _with_step_time(run) if run.step_time_s else _with_printed_flops(row, run)
    return _below_peak(_with_doubted_rate(row, run), may_be_tf32=_says_tf32(row) is not False)


FLOPS_DIFFER = 3.0
"""Times the model's FLOPs a token from which a printed rate is doubted. Sources count scores once or twice or not at
all, and recomputation or not, so counts of one run differ by up to 8/3."""


def _with_doubted_rate(row: CsvRow, run: PublishedRun) -> PublishedRun:
    """`run` with a note where the FLOP/s that it prints are not of the tokens/s that it prints."""
    c, rate, tflops = run.conditions, run.tokens_per_s_per_device, row.number("tflops_per_gpu")
    if c is None or not rate or not tflops:
        return run
    share = tflops * 1e12 / rate / least_flops_per_token(c.model, c.plan, seq_len=c.seq_len, lora=c.lora)
    if 1 / FLOPS_DIFFER <= share <= FLOPS_DIFFER:
        return run
    note = f"{tflops:g} TFLOP/s are {share:.2g} times what {rate:,.0f} tokens/s mean: the tokens used"
    return replace(run, assumed=(*run.assumed, note))


def _check_figure(row: CsvRow, *, rate: float | None, memory: float | None, failed: bool) -> None:
    """Raise CannotPredictError for a row without a comparable measurement."""
    if row.text("metric_kind") in ("end_to_end_gpu_hours", "time_to_train"):
        raise CannotPredictError(Reason.END_TO_END, row.text("metric_kind").replace("_", " "))
    if _OTHER_TASKS.search(row.text("task")):
        raise CannotPredictError(Reason.OTHER_TASK, row.text("task"))
    if re.search(r"\bunpacked\b|variable[- ]length", row.text("notes").lower()):
        raise CannotPredictError(Reason.VARIED_LENGTHS)
    timed = row.number("step_time_s")
    if not (rate or memory or timed or failed) and _no_rate(row) is Reason.NO_RATE:
        raise CannotPredictError(Reason.NO_RATE)


def _below_peak(run: PublishedRun, *, may_be_tf32: bool) -> PublishedRun:
    """`run`, or the reason that nothing computes its rate: it needs more FLOP/s than the datasheet's dense peak."""
    c, rate = run.conditions, run.tokens_per_s_per_device
    if c is None or rate is None:
        return run
    flops = least_flops_per_token(c.model, c.plan, seq_len=c.seq_len, lora=c.lora)
    share = flops * rate / c.matmul_flops_per_s
    if share <= 1:
        return run
    if may_be_tf32 and c.precision == "fp32" and not c.tf32 and TF32 in c.accelerator.peak_flops_per_s:
        note = f"fp32 multiplied as TF32: {share:.2f} times the peak of fp32 itself"
        as_tf32 = replace(run, conditions=replace(c, tf32=True), assumed=(*run.assumed, note))
        return _below_peak(as_tf32, may_be_tf32=False)
    return replace(run, reason=Reason.ABOVE_PEAK, reason_detail=f"{share:.2f} times the peak")


def _with_step_time(run: PublishedRun) -> PublishedRun:
    """`run` with the token rate that the seconds of its steps mean, where its batch is stated."""
    c = run.conditions
    if c is None or not run.step_time_s:
        return run
    if NO_ACCUMULATION in run.assumed:
        return replace(run, reason=Reason.NO_BATCH)
    rate = c.tokens_per_step / (run.step_time_s * c.num_devices)
    note = f"rate from {run.step_time_s:,g} s a step"
    return replace(run, tokens_per_s_per_device=rate, assumed=(*run.assumed, note))


def _with_printed_flops(row: CsvRow, run: PublishedRun) -> PublishedRun:
    """`run` with the token rate that its FLOP/s mean, or the reason why it has none."""
    c = run.conditions
    if c is None:
        return run
    model = model_row(c.model, lora=c.lora)
    peak = c.accelerator.peak_flops_per_s[c.precision] / 1e12 if c.precision == "bf16" else None  # of 8 bits: either
    found = rate_of_flops(row, model, seq_len=c.seq_len, stack=c.stack, usual_peak_tflops=peak)
    if found is None:
        return replace(run, reason=_no_rate(row))
    rate, note = found
    return replace(run, tokens_per_s_per_device=rate, assumed=(*run.assumed, note))


def _no_rate(row: CsvRow) -> Reason:
    stated = any(row.number(column) for column in ("tflops_per_gpu", "mfu_pct", "hfu_pct"))
    return Reason.FLOPS_ONLY if stated else Reason.NO_RATE


def _with_conditions(row: CsvRow, run: PublishedRun, read_plan: Callable[..., PublishedLayout]) -> PublishedRun:
    """`run` with its conditions. Raises CannotPredictError when too much of it is not stated."""
    accelerator = _accelerator(run.accelerator_name)
    row, stated = with_stated_numbers(row)
    num_devices = row.count("num_gpus")
    if num_devices is None:
        raise CannotPredictError(Reason.NO_DEVICES)
    reading = read_model(row)
    model, notes = reading.model, [*reading.assumed, *stated, *contradictions(row)]
    _check_depth(row, model)
    software = read_software(row, accelerator, model.name)
    if model.num_mtp_layers and not software.mtp:
        model = replace(model, num_mtp_layers=0)
        notes.append("no multi-token prediction, as the row or the default of its framework has it")
    if model.attention.indexer and model.attention.kind is AttentionKind.MLA and not software.indexers:
        model = replace(model, attention=replace(model.attention, indexer=None))
        notes.append(f"attention to all keys: {software.stack.framework} has no indexer of latent attention")
    row = _with_sizes(row, notes)
    seq_len = row.count("seq_len")
    if seq_len is None:
        raise CannotPredictError(Reason.NO_SEQUENCE_LENGTH)
    devices_per_node, num_nodes = _nodes(row, accelerator, num_devices, notes)
    row = replace(row, cells=row.cells | {"gpus_per_node": str(devices_per_node)})
    layout = read_plan(row, model, num_devices=num_devices, seq_len=seq_len, software=software)
    precision = _precision(with_compute_precision(row), accelerator, software, notes)
    said = read_statements(row.text("notes"))
    network = _network(row, accelerator, devices_per_node, num_nodes)
    conditions = RunConditions(
        model=model,
        lora=read_lora(row, software.lora, notes),
        accelerator=accelerator,
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        fabric_hint=links_of(row),
        network=network.text,
        seq_len=seq_len,
        global_batch=layout.global_batch,
        plan=layout.plan,
        precision=precision,
        stack=software.stack,
        fused_norm=software.fused_norm,
        tf32=precision == "fp32" and TF32 in accelerator.peak_flops_per_s and bool(_says_tf32(row)),
        narrow_gemms=_narrow_gemms(row, model, precision, notes),
        loops_experts=model.experts is not None and bool(said.value("loops_experts")),
        optimizer=_optimizer(row, said, notes),
        all_in_16_bits=precision == "bf16" and (software.recipe.in_16_bits or _has_no_masters(row, said)),
        overlaps_data=said.value("overlaps_data"),
        gemm_flops_per_s=(gemms := _measured_gemm_rate(row, accelerator, precision, notes)),
        power_w=_power_limit(row, said, accelerator, notes, is_measured=gemms is not None),
    )
    notes.extend((*uncalibrated(model), *_doubts(row, model), *_not_modelled(said, accelerator)))
    notes.extend(filter(None, (row.text(DUPLICATE_NOTE), note_of_defaults(conditions, software.release))))
    assumed = (*notes, *network.assumed, *layout.assumed)
    read = {*network.read, *(clause for clause in run.unread if _says_its_links(clause, conditions))}
    unread = (*(clause for clause in run.unread if clause not in read), *network.unread)
    return replace(run, conditions=conditions, assumed=assumed, unread=unread, memory_definition=software.memory)


def _with_sizes(row: CsvRow, notes: list[str]) -> CsvRow:
    """`row` with the sequence and the batch of the script that its page was measured with."""
    for entry in frameworks()["sizes"]:
        if re.search(entry["pages"], row.text("source")):
            missing = {c: str(entry[c]) for c in ("seq_len", "gbs") if not row.text(c)}
            notes.extend(f"{column} {value}, the default of its script" for column, value in missing.items())
            return replace(row, cells=row.cells | missing)
    return row


def _check_depth(row: CsvRow, model: Model) -> None:
    """Refuse a model with fewer or more layers than its own whose row prints the parameters of the whole one."""
    printed, counted = row.number("params_b"), total_parameters(model) / 1e9
    if printed and "layers" in model.name and abs(counted / printed - 1) > DEPTH_DIFFERS:
        raise CannotPredictError(
            Reason.INCONSISTENT,
            f"{printed:g} billion parameters printed, {counted:.3g} billion with {model.num_layers} layers",
        )


def _doubts(row: CsvRow, model: Model) -> list[str]:
    """Notes on the row's failed checks, and on dimensions that contradict its printed parameter count."""
    doubts = [f"flagged: {row.text('qa_flags')}"] if row.text("qa_flags") else []
    printed, counted = row.number("params_b"), total_parameters(model) / 1e9
    if printed and "layers" not in model.name and abs(counted / printed - 1) > PARAMETERS_DIFFER:
        doubts.append(f"{printed:g} billion parameters printed, {counted:.3g} billion by its dimensions")
    return doubts


def _not_modelled(said: Statements, accelerator: Accelerator) -> list[str]:
    """Notes on what the row states and no prediction takes; watts of a limit, or that there is none, are not such."""
    usual = re.compile(rf"\b{accelerator.tdp_w:.0f} ?w" if accelerator.tdp_w else "(?!)")
    is_read = any(m.number or m.polarity is Polarity.OFF for m in said.mentions("power_w"))
    return [n for n in said.not_modelled if not n.startswith("a power limit") or not (is_read or usual.search(n))]


def _power_limit(
    row: CsvRow, said: Statements, accelerator: Accelerator, notes: list[str], *, is_measured: bool
) -> float | None:
    """The power limit of a device that the row states, in W; None where it is the usual one or cannot be costed.

    is_measured: the rate of GEMMs under it is known.
    """
    usual_w, numbers = accelerator.tdp_w or 0.0, [m for m in said.mentions("power_w") if m.number]
    of_run = [m for m in numbers if not m.is_generic] or numbers
    stated = {float(m.number) for m in of_run} or {float(watts_of(row.text("gpu")) or usual_w)}
    limit_w = stated.pop()
    if stated or limit_w == usual_w:  # several: a contradiction, which has its note
        return None
    if not is_measured and power_assumptions().idle_ratio * usual_w < limit_w < usual_w:
        return limit_w
    why = "the measured rate of GEMMs has it in it" if is_measured else f"the usual one is {usual_w:g} W"
    notes.append(f"a power limit of {limit_w:g} W: not used, {why}")
    return None


def _accelerator(name: str) -> Accelerator:
    if not name:
        raise CannotPredictError(Reason.NO_ACCELERATOR)
    found = catalogued(name)
    if found is None:
        raise CannotPredictError(Reason.UNKNOWN_ACCELERATOR, name)
    return found


def _nodes(row: CsvRow, accelerator: Accelerator, num_devices: int, notes: list[str]) -> tuple[int, int]:
    """Devices per node (of those used) and nodes."""
    per_node, num_nodes = row.count("gpus_per_node"), row.count("num_nodes")
    if per_node is None and num_nodes and num_devices % num_nodes == 0 and num_devices // num_nodes <= MAX_PER_NODE:
        per_node = num_devices // num_nodes
    largest = catalog.fabric(catalog.default_fabric_name(accelerator.name)).scale_up_domain
    if per_node and per_node > largest and not row.count("gpus_per_node"):
        notes.append(f"{num_nodes} nodes of {per_node} devices: a node has at most {largest}, not used")
        per_node = None
    if per_node and per_node > largest:
        raise CannotPredictError(Reason.INCONSISTENT, f"{per_node} devices per node, at most {largest}")
    if per_node is None:
        per_node = catalog.usual_devices_per_node(accelerator.name)
        notes.append(f"{per_node} devices per node")
    per_node = min(per_node, num_devices)
    if num_devices % per_node:
        raise CannotPredictError(Reason.INCONSISTENT, f"{num_devices} devices in nodes of {per_node}")
    return per_node, num_devices // per_node


def _network(row: CsvRow, accelerator: Accelerator, devices_per_node: int, num_nodes: int) -> StatedNetwork:
    """The network that the row states; nothing for a device whose network is its own links, and within one domain."""
    name = fabric_name(accelerator, links_of(row), devices_per_node=devices_per_node)
    fabric = placed_fabric(name, devices_per_node=devices_per_node, num_nodes=num_nodes)
    if accelerator.vendor.lower() not in GPU_VENDORS or devices_per_node * num_nodes <= fabric.scale_up_domain:
        return StatedNetwork()
    return read_network_of(row, fabric, devices_per_node=devices_per_node)


def _says_its_links(clause: str, conditions: RunConditions) -> bool:
    """Return True if `clause` says that cards have no NVLink, and the run's have none."""
    return says_no_bridge(clause) and cluster_of(conditions).fabric.name.startswith("pcie")


def _precision(row: CsvRow, accelerator: Accelerator, software: Software, notes: list[str]) -> str:
    name = format_of(row)
    if name and not row.text("precision"):
        notes.append(f"precision {name}, as the note says")
    column = row.text("precision")
    said = read_statements(column)
    if column.lower() != name and (said.unread or len({m.value for m in said.mentions("precision")}) > 1):
        notes.append(f"precision {column!r} read as {name}")
    if not name:
        name = software.precision
        notes.append(f"precision {name}, the default of {software.title}")
    if name == "fp4":
        name = "mxfp4" if accelerator.vendor.lower() == "amd" else "nvfp4"
        notes.append(f"precision {name}, the 4 bits of {accelerator.name}")
    name = "fp32" if name == TF32 else name
    scaling = scaling_of(row)
    if name == "fp8" and scaling not in ("", "fp8", "tensorwise"):
        name = scaling
        notes.append(f"precision {name}, by the scaling that the row names")
    if name == "fp8" and software.delayed_scaling and scaling != "fp8":
        name = "fp8_delayed"
        notes.append(f"scales of earlier steps, the default of {software.stack.framework}")
    if name not in PRECISIONS or not multiplies(accelerator, PRECISIONS[name]):
        raise CannotPredictError(Reason.UNKNOWN_PRECISION, f"{name} on {accelerator.name}")
    return name


def _says_tf32(row: CsvRow) -> bool | None:
    """Return True if the row says that TF32 is used, False if it says that it is not, None if it says neither."""
    said = [read_statements(row.text(column)).value("tf32") for column in ("precision", "notes")]
    return next((value for value in said if value is not None), None)


def _optimizer(row: CsvRow, said: Statements, notes: list[str]) -> str:
    """The optimizer of the column or the note; AdamW, with a note, for another one that nothing models."""
    column = row.text("optimizer")
    found = read_statements(column)
    value = found.value("optimizer")
    if value is None and column:
        notes.append(f"optimizer {column}: AdamW is assumed")
    return value or said.value("optimizer") or ADAMW


def _has_no_masters(row: CsvRow, said: Statements) -> bool:
    """True if the precision or the note says that weights and optimizer states have no fp32 copy."""
    return (read_statements(row.text("precision")).value("masters") or said.value("masters")) == "none"


def _narrow_gemms(row: CsvRow, model: Model, precision: str, notes: list[str]) -> str:
    """GEMMs of a mixture that alone are in 8 or 4 bits, by its precision or its note; empty where all are."""
    texts = [text for text in (row.text("precision"), row.text("notes")) if read_statements(text).value("narrow_gemms")]
    if not texts or PRECISIONS[precision].linear_input_bytes >= BF16_BYTES:
        return ""
    stated = read_statements(texts[0]).value("narrow_gemms")
    if model.experts is None:
        notes.extend([f"precision {texts[0]!r} read as {precision}"] if stated == "experts" else [])
        return ""
    notes.append(f"saved inputs of all GEMMs in {precision}, though only {stated} has them")
    return stated


def _measured_gemm_rate(row: CsvRow, accelerator: Accelerator, precision: str, notes: list[str]) -> float | None:
    """FLOP/s of large GEMMs that the row, or its source for this system, states; None where neither does."""
    number_format = PRECISIONS[precision].matmul
    of_source = [
        system["gemm_tflops"]
        for system in published_systems()
        if (system["source_key"], system["accelerator"], system["format"])
        == (row.text("source_key"), accelerator.name, number_format)
    ]
    tflops = row.number("gemm_tflops") or next(iter(of_source), None)
    if not tflops:
        return None
    share = tflops * 1e12 / accelerator.peak_flops_per_s[number_format]
    if share > 1:
        raise CannotPredictError(Reason.ABOVE_PEAK, f"GEMMs at {share:.2f} times the peak")
    notes.append(f"GEMMs at {tflops:,g} TFLOP/s, measured on this system")
    return tflops * 1e12
