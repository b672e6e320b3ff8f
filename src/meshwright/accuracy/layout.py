"""Parallel layout of a published row: degrees, sharding, micro-batch, schedule and recomputation.

    devices = TP PP CP DP          DP excludes CP; experts re-use these ranks
    G = b DP (accumulation steps)  G global batch in sequences, b micro-batch of one model replica

Values that the row does not state follow from these two identities if they decide them, else from the framework's
default; each such value is noted. A row that contradicts the identities is not predicted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from meshwright.accuracy.csvfile import MAX_TOKENS, CsvRow
from meshwright.accuracy.reasons import CannotPredictError, Reason
from meshwright.accuracy.recomputation import read_recompute
from meshwright.accuracy.shipped import frameworks, wordings
from meshwright.accuracy.software import Software
from meshwright.accuracy.stated import MESH, stated_cores
from meshwright.accuracy.statements import plain, read_statements
from meshwright.accuracy.wording import stated, yes_or_no
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS
from meshwright.specs.features import Dispatcher
from meshwright.specs.model import Model
from meshwright.specs.plan import Offload, Plan, Schedule, Sharding, read_layers

NO_ACCUMULATION = "no gradient accumulation"
"""The note on rows that state a micro-batch, and neither batch nor accumulation."""
OFFLOADED = "offloading of activations is not modelled"
"""The note on rows that offload, how much is not said."""
WHOLE_BATCH = "micro-batch of a replica's whole batch"
"""The note on rows that state a batch, and neither micro-batch nor accumulation."""


@dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """A plan, the global batch in sequences, and the assumptions behind them."""

    plan: Plan
    global_batch: int
    assumed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Degrees:
    tensor: int
    pipeline: int
    context: int
    data: int


def read_layout(row: CsvRow, model: Model, *, num_devices: int, seq_len: int, software: Software) -> PublishedLayout:
    """The plan of `row`. Raises CannotPredictError when degrees or batch are not stated or contradict."""
    notes: list[str] = []
    sharding = _sharding(row, software, notes)
    degrees = _degrees(row, num_devices, sharding, software, notes)
    micro_batch, global_batch = _batch(row, degrees, seq_len, software, notes)
    data_shard, data_replicate = _hybrid_split(row, degrees, sharding, software, notes)
    schedule, virtual = _pipeline(row, degrees.pipeline, model.num_layers, notes)
    is_split = degrees.tensor * degrees.pipeline > 1
    recompute, modules, layers = read_recompute(row, model, is_split=is_split, software=software, notes=notes)
    expert, expert_tensor = _experts(row, model, degrees, software, notes)
    plan = Plan(
        tensor=degrees.tensor,
        sequence_parallel=_sequence_parallel(row, degrees.tensor, software, notes),
        context=degrees.context,
        pipeline=degrees.pipeline,
        virtual_pipeline=virtual,
        layers_per_stage=_layers_per_stage(model, degrees.pipeline * virtual, software, notes),
        expert=expert,
        expert_tensor=expert_tensor,
        data_shard=data_shard,
        data_replicate=data_replicate,
        sharding=sharding,
        micro_batch=micro_batch,
        schedule=schedule,
        recompute=recompute,
        recompute_modules=modules,
        recompute_layers=layers,
        offload=_offload(row, software),
        **_stores(software, seq_len * micro_batch, notes),
    )
    mentions = f"{row.text('notes')} {row.text('recompute')}".lower()
    is_counted = software.stack.features.offloaded_activations is not None
    is_denied = read_statements(row.text("notes")).value("offload") is False
    if plan.offload is Offload.NONE and "offload" in mentions and not is_counted and not is_denied:
        notes.append(OFFLOADED)
    if "offload" in row.text("dp_type").lower():
        notes.append(f"dp_type {row.text('dp_type')!r}: its offloading is not modelled")
    return PublishedLayout(plan=plan, global_batch=global_batch, assumed=tuple(notes))


def _stores(software: Software, tokens: int, notes: list[str]) -> dict[str, Any]:
    """Formats of saved activations and chunks of the loss in the row's recipe, as fields of a `Plan`."""
    recipe, fields = software.recipe, {}
    if recipe.stored:
        fields["stored_activations"] = recipe.stored
        notes.append(f"activations of {' and '.join(recipe.stored)} kept in 8 bits, the recipe of {software.title}")
    if recipe.loss_chunks:
        fields["loss_chunk"] = -(-tokens // recipe.loss_chunks)
        notes.append(f"loss in {recipe.loss_chunks} chunks, the recipe of {software.title}")
    return fields


def _offload(row: CsvRow, software: Software) -> Offload:
    """Optimizer states in host memory, where "CPU offload" means that: FSDP's policy, and not Megatron's options."""
    said = read_statements("; ".join(row.text(column) for column in ("notes", "dp_type", "optimizer")))
    of_optimizer = read_statements(row.text("optimizer")).value("offload")
    if said.value("optimizer_offload") or of_optimizer:
        return Offload.OPTIMIZER
    if said.value("offload") is False:
        return Offload.NONE
    offloads = re.search(r"\bcpu[ -]offload\b", row.text("notes"), re.IGNORECASE)
    facts = stack_facts(software.stack.framework)
    on_host = offloads and facts.updates_on_host and facts.lineage.startswith("pytorch")
    return Offload.OPTIMIZER if on_host else Offload.NONE


# --- degrees ---


def _degrees(row: CsvRow, num_devices: int, sharding: Sharding, software: Software, notes: list[str]) -> _Degrees:
    tensor, pipeline, context, data = (row.count(c) for c in ("tp", "pp", "cp", "dp"))
    if tensor is None and software.recipe.tensor:
        tensor = software.recipe.tensor
        notes.append(f"tensor parallelism {tensor}, the recipe of {software.stack.framework}")
    if tensor is None and pipeline is None:
        why = _why_data_parallel(row, num_devices, sharding, software)
        if not why:
            raise CannotPredictError(Reason.NO_PARALLELISM)
        if num_devices > 1:
            notes.append(f"no tensor or pipeline parallelism: {why}")
    tensor, context = _in_devices(row, tensor, context, notes)
    width = (tensor or 1) * (pipeline or 1) * (context or 1)
    if context and context > 1 and data and data * width == num_devices * context and data % context == 0:
        notes.append(f"DP {data} counts the context ranks: {data // context} without")
        data //= context
    if num_devices % width:
        raise CannotPredictError(
            Reason.INCONSISTENT, f"{num_devices} devices are not a multiple of TP x PP x CP = {width}"
        )
    if data is not None and data * width != num_devices:
        raise CannotPredictError(Reason.INCONSISTENT, f"TP x PP x CP x DP = {data * width} but {num_devices} devices")
    return _Degrees(tensor=tensor or 1, pipeline=pipeline or 1, context=context or 1, data=num_devices // width)


def _in_devices(
    row: CsvRow, tensor: int | None, context: int | None, notes: list[str]
) -> tuple[int | None, int | None]:
    """Tensor and context degrees in chips, where the row counts the cores of a chip as devices of JAX.

    MaxText lays its mesh with the tensor axis innermost, then context: the cores of a chip lie along the first of them.
    """
    cores = stated_cores(row)
    for name, degree in (("tensor", tensor), ("context", context)):
        if cores > 1 and degree and degree > 1:
            if degree % cores:
                break
            notes.append(f"{name} parallelism {degree} of cores, {cores} a chip: {degree // cores} of chips")
            return (degree // cores, context) if name == "tensor" else (tensor, degree // cores)
    return tensor, context


def _why_data_parallel(row: CsvRow, num_devices: int, sharding: Sharding, software: Software) -> str:
    """Reason for which a row without tensor and pipeline degrees is data parallel; empty where it can be either."""
    micro, batch = row.count("mbs"), row.count("gbs")
    ranks = max(1, num_devices // (row.count("cp") or 1))
    if num_devices == 1:
        return "one device"
    if row.count("ep") == num_devices:
        return "expert-parallel ranks are all devices"
    if row.count("dp") == ranks:
        return "data-parallel and context ranks are all devices"
    if sharding is Sharding.PARAMETERS and (batch or micro) and (batch or 0) % ranks == 0:
        return "fully sharded data parallelism"
    if micro and batch == micro * ranks:
        return "the batch is micro-batch x data-parallel ranks"
    if software.data_parallel and (micro or batch):
        return f"the default of {software.title}"
    return ""


def _experts(row: CsvRow, model: Model, degrees: _Degrees, software: Software, notes: list[str]) -> tuple[int, int]:
    if model.experts is None:
        notes.extend(f"{c} {n}: the model has no experts" for c in ("ep", "etp") if (n := row.count(c) or 1) > 1)
        return 1, 1
    expert, expert_tensor = row.count("ep"), row.count("etp")
    if expert_tensor is None:
        expert_tensor = degrees.tensor if software.recipe.splits_experts else 1
        if expert_tensor > 1:
            notes.append(f"experts over {expert_tensor} tensor ranks, the recipe of {software.stack.framework}")
    if expert is None and (software.stack.features.dispatcher or Dispatcher.ALL_TO_ALL) is not Dispatcher.ALL_TO_ALL:
        expert = math.gcd(degrees.data * degrees.context, model.experts.num_experts)
        notes.append(f"expert parallelism {expert}: the row names a dispatcher, which needs it")
    if expert is None:
        expert = 1
        notes.append("no expert parallelism")
    ranks = degrees.data * degrees.context * degrees.tensor
    if ranks % (expert * expert_tensor) or model.experts.num_experts % expert:
        raise CannotPredictError(
            Reason.INCONSISTENT, f"EP {expert} does not divide {model.experts.num_experts} experts over {ranks} ranks"
        )
    return expert, expert_tensor


# --- batch ---


def _batch(row: CsvRow, degrees: _Degrees, seq_len: int, software: Software, notes: list[str]) -> tuple[int, int]:
    """Micro-batch of a replica and global batch, in sequences."""
    micro, steps = row.count("mbs"), row.count("grad_accum")
    batch, tokens = stated_batch(row, seq_len), row.count("gbs_tokens", limit=MAX_TOKENS)
    if batch is None and tokens:
        notes.append(f"a batch of {tokens:,} tokens is no whole number of sequences of {seq_len:,}: not used")
    if micro and software.batch_per_device and degrees.tensor > 1:
        micro *= degrees.tensor
        notes.append("micro-batch given per device")
    if batch is None:
        if micro is None or (degrees.pipeline > 1 and steps is None):
            raise CannotPredictError(Reason.NO_BATCH)
        batch = micro * degrees.data * (steps or 1)
        if steps is None:
            notes.append(NO_ACCUMULATION)
    if batch % degrees.data:
        raise CannotPredictError(Reason.INCONSISTENT, f"batch {batch} over {degrees.data} data-parallel ranks")
    if micro is None and "per_device_batch_size=" in row.text("notes") and degrees.pipeline == 1:
        micro = batch // degrees.data  # MaxText's whole batch is one micro-batch unless it accumulates
    if micro is None:
        micro = _missing_micro_batch(batch // degrees.data, steps, degrees.pipeline, software, notes)
    if steps and micro * degrees.data * steps != batch:
        notes.append(f"micro-batch {micro} x DP {degrees.data} x {steps} steps is not batch {batch}: batch and DP used")
    if batch % (micro * degrees.data):
        raise CannotPredictError(
            Reason.INCONSISTENT, f"batch {batch} is not a multiple of micro-batch {micro} x DP {degrees.data}"
        )
    return micro, batch


def stated_batch(row: CsvRow, seq_len: int) -> int | None:
    """The global batch that the row states, in sequences, whether it counts sequences or tokens."""
    tokens = row.count("gbs_tokens", limit=MAX_TOKENS)
    return row.count("gbs") or (tokens // seq_len if tokens and tokens % seq_len == 0 else None)


def _missing_micro_batch(
    per_replica: int, steps: int | None, pipeline: int, software: Software, notes: list[str]
) -> int:
    if steps and per_replica % steps == 0:
        return per_replica // steps
    if pipeline > 1 and software.micro_batch_per_stage and per_replica % pipeline == 0:
        notes.append(f"as many micro-batches as stages, the default of {software.title}")
        return per_replica // pipeline
    if pipeline > 1:
        notes.append("micro-batch 1")
        return 1
    notes.append(WHOLE_BATCH)
    return per_replica


# --- sharding ---

_PLAIN_FSDP = re.compile(r"fsdp ?[12]?|sharded", re.IGNORECASE)
"""Cells that leave open which ranks share the parameters, and when."""
IN_NODES = "parameters sharded over the"
"""Beginning of the note on a row of hybrid sharding that states no width."""
USUAL_SHARDING = "sharding"
"""Beginning of the note on a row that states none."""


def _named_sharding(text: str) -> Sharding | None:
    """Return the sharding that `text` names, None where it names none."""
    listed = wordings()["sharding_cell"] if text else ()
    return next((Sharding[one["sharding"]] for one in listed if re.search(one["say"], text, re.IGNORECASE)), None)


def _sharding(row: CsvRow, software: Software, notes: list[str]) -> Sharding:
    of_note = _named_sharding(read_statements(row.text("notes")).value("sharding") or "")
    of_column = _named_sharding(row.text("dp_type"))
    # FSDP names stage 3 and, with gathered parameters kept, stage 2
    if of_note is Sharding.GRADIENTS and _PLAIN_FSDP.fullmatch(row.text("dp_type")):
        notes.append("sharding gradients, as the note says")
        return of_note
    if of_column is not None and of_note not in (None, of_column):
        notes.append(f"notes say sharding of {of_note.name.lower()}: its column used, {row.text('dp_type')}")
    found = next((s for s in (of_column, of_note, _named_sharding(row.text("framework"))) if s is not None), None)
    if found is not None:
        return found
    if yes_or_no(row.text("fsdp")) is False and software.sharding is Sharding.PARAMETERS:
        return Sharding.NONE
    if text := row.text("dp_type"):
        notes.append(f"dp_type {text!r} is not understood")
    notes.append(f"{USUAL_SHARDING} {software.sharding.name.lower()}, the default of {software.title}")
    return software.sharding


_SHARD = re.compile(r"fsdp(?: |\d? ?[=:] ?|(?=\d\d))(\d+)", re.IGNORECASE)  # also dcn_fsdp and ici_fsdp, which multiply
_REPLICATE = re.compile(r"dcn_data (\d+)|ici_data_parallelism=(\d+)|(?<!\d)(\d+) slice(?:\(s\)|s)")


def _hybrid_split(
    row: CsvRow, degrees: _Degrees, sharding: Sharding, software: Software, notes: list[str]
) -> tuple[int, int]:
    """Ranks that shard the parameters and ranks that replicate them (HSDP): data = shard x replicate."""
    data = degrees.data
    if sharding is not Sharding.PARAMETERS:
        return data, 1
    text = row.text("dp_type")
    shard = [int(width) for width in _SHARD.findall(text)]
    replicas = _REPLICATE.search(text) or _REPLICATE.search(row.text("notes"))
    if shard:
        width = min(max(1, math.prod(shard)), data)
    elif replicas and not software.recipe.shards_slices:
        width = max(1, data // max(1, int(next(g for g in replicas.groups() if g))))
    elif _shards_in_nodes(row, degrees, software):
        width = min(row.count("gpus_per_node") or data, data)
        notes.append(f"{IN_NODES} {width} ranks of a node, as HSDP without a width")
    else:
        if "hsdp" in text.lower():
            notes.append("sharded over all data-parallel ranks: the width is not stated")
        return data, 1
    if data % width:
        notes.append(f"sharded over all data-parallel ranks: {width} does not divide {data}")
        return data, 1
    return width, data // width


def _shards_in_nodes(row: CsvRow, degrees: _Degrees, software: Software) -> bool:
    """True for hybrid sharding over the devices of a node, which PyTorch's HYBRID_SHARD is without a mesh."""
    column, said = row.text("dp_type"), read_statements(row.text("notes"))
    of_column, of_note = read_statements(column).value("sharding"), said.value("sharding")
    is_open = not column or _PLAIN_FSDP.fullmatch(column) is not None
    by_default = software.hybrid and not column and not re.search(r"full.shard|zero.?3", row.text("notes").lower())
    is_hybrid = of_column == "hsdp" or (is_open and of_note == "hsdp") or by_default
    is_stated = MESH.search(plain(row.text("notes"))) or said.mentions("dp_shard")
    is_whole = degrees.tensor * degrees.pipeline * degrees.context == 1
    return bool(is_hybrid and is_whole and not is_stated and stack_facts(software.stack.framework).lineage != "xla")


# --- schedule, recomputation, sequence parallelism ---


def _pipeline(row: CsvRow, pipeline: int, num_layers: int, notes: list[str]) -> tuple[Schedule, int]:
    """Schedule, and chunks per pipeline rank: the row's number, else the fewest that its schedule has."""
    if pipeline == 1:
        return Schedule.ONE_F_ONE_B, 1
    named, chunks = _stated_schedule(row, notes), row.count("vpp")
    of_chunk = int(read_statements(row.text("notes")).value("layers_per_chunk") or 0)
    if chunks is None and of_chunk and num_layers % (pipeline * of_chunk) == 0:
        chunks = num_layers // (pipeline * of_chunk)
        notes.append(f"vpp {chunks}: the note says {of_chunk} layers of a virtual stage")
    record = SCHEDULE_RECORDS[named]
    if chunks is None:
        chunks = record.min_chunks
        least = f"{chunks} virtual stages, the least that {named} has"
        notes.append("no virtual stages" if chunks == 1 else least)
    if named is not Schedule.ONE_F_ONE_B and record.allows_chunks(chunks):
        return named, chunks
    if named is not Schedule.ONE_F_ONE_B:
        notes.append(f"{named} has {record.chunks_allowed} virtual stages: the row's number used, {chunks}")
    return (Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B), chunks


def _stated_schedule(row: CsvRow, notes: list[str]) -> Schedule:
    """The schedule that the row's column or its note names; one forward, one backward where neither does."""
    said = (read_statements(row.text(column)).value("schedule") for column in ("schedule", "notes"))
    found = next(filter(None, said), None)
    if found is None and stated(row.text("schedule")):
        notes.append(f"schedule {row.text('schedule')!r} is not understood")
    return Schedule(found or Schedule.ONE_F_ONE_B)


def _layers_per_stage(model: Model, num_stages: int, software: Software, notes: list[str]) -> tuple[int, ...] | None:
    """The split of the framework's recipe for `model`, where there is one."""
    for entry in frameworks()["layers_per_stage"]:
        listed = entry["stages"].get(str(num_stages))
        if listed and model.name in entry["models"] and software.stack.framework in entry["frameworks"]:
            notes.append(f"layers per stage {listed}, the recipe of {software.stack.framework}")
            return read_layers(listed)
    return None


def _sequence_parallel(row: CsvRow, tensor: int, software: Software, notes: list[str]) -> bool:
    column = stated(row.text("seq_parallel"))
    answer = yes_or_no(column or read_statements(row.text("notes")).value("sequence_parallel") or "")
    if answer is None and column:
        answer = yes_or_no(read_statements(column).value("sequence_parallel") or "")
    if answer is not None:
        return answer
    if column:
        notes.append(f"seq_parallel {column!r} is not understood")
    if tensor > 1:
        state = "on" if software.sequence_parallel else "off"
        notes.append(f"sequence parallelism {state}, the default of {software.title}")
    return software.sequence_parallel
