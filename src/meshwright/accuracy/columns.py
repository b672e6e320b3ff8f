"""Columns of a table of runs under the names that other tables give them, with their units.

A name is compared without case, spaces and signs: "Step time (ms)" is `step_time_ms`. Columns that no table
here has are not read; `notes_on_columns` names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.accuracy.csvfile import Column, CsvRow
from meshwright.accuracy.rates import RATE_COLUMNS, rate_unit
from meshwright.accuracy.shipped import shipped_columns
from meshwright.accuracy.statements import read_statements
from meshwright.accuracy.tablefile import read_lines
from meshwright.runfile.synonyms import key_for

_KEYS = {
    "model": "model", "precision": "precision", "stack.framework": "framework", "data.sequence_length": "seq_len",
    "batch.micro": "mbs", "batch.global_sequences": "gbs", "batch.global_tokens": "gbs_tokens",
    "parallel.tensor": "tp", "parallel.pipeline": "pp", "parallel.context": "cp", "parallel.expert": "ep",
    "parallel.expert_tensor": "etp", "parallel.virtual_pipeline": "vpp", "parallel.schedule": "schedule",
    "parallel.recompute": "recompute", "parallel.sequence_parallel": "seq_parallel",
    "cluster.accelerator": "gpu", "cluster.num_nodes": "num_nodes", "cluster.devices_per_node": "gpus_per_node",
}  # fmt: skip
"""Keys of the run file, whose names in other tools `runfile.synonyms` has -> columns."""

_NAMES = {
    "gpu": "accelerator_type accelerator_name gpu_model device device_name hardware system platform",
    "num_gpus": "gpus n_gpus ngpus gpu_count num_devices devices world_size num_accelerators accelerators chips "
    "num_chips number_of_gpus no_of_gpus tpu_chips",
    "seq_len": "seqlen sequence_len sequence sequence_length context seq_len_t",
    "precision": "compute_dtype numerics",
    "dp": "dp_size data_parallel_size data_parallel_degree data_parallel",
    "dp_type": "zero_stage zero sharding sharding_strategy sharding_type data_parallel_type",
    "fsdp": "fsdp use_fsdp fsdp2",
    "dp_shard": "data_parallel_shard_degree fsdp_degree fsdp_size ici_fsdp_parallelism",
    "dp_replicate": "data_parallel_replicate_degree hsdp_replicas",
    "grad_accum": "gradient_accumulation_steps grad_acc gradient_accumulation grad_accumulation ga gas "
    "accumulation_steps",
    "gpus_per_node": "gpus_node gpu_node gpu_per_node gpus_per_host",
    "num_nodes": "n_nodes number_of_nodes num_hosts hosts",
    "layers": "num_layers n_layers n_layer num_hidden_layers",
    "hidden": "hidden_size d_model n_embd hidden_dim embedding_size",
    "heads": "num_heads n_heads n_head num_attention_heads attention_heads",
    "kv_heads": "num_kv_heads n_kv_heads num_key_value_heads",
    "ffn": "ffn_hidden_size intermediate_size ffn_size feed_forward_size",
    "moe_ffn": "moe_intermediate_size moe_ffn_hidden_size",
    "vocab": "vocab_size",
    "experts": "num_experts n_experts num_local_experts n_routed_experts num_routed_experts",
    "topk": "top_k num_experts_per_tok moe_router_topk",
    "params_b": "parameters_b params_billion parameters_billion",
    "model_size": "size model_size model_scale params parameters num_params n_params",
    "mbs": "ubs lbs micro_bs bs_gpu bs_per_gpu batch_size_per_gpu batch_size_per_device",
    "gbs": "global_bs gbs_samples gbs_sequences global_batch_size_samples global_batch_size_sequences",
    "gbs_tokens": "global_batch_size_tokens batch_tokens batch_size_tokens tokens_per_global_batch global_batch_size_t",
    "recompute": "act_ckpt activation_ckpt activation_recompute activation_recomputation act_recomp act_recompute "
    "ac_mode activation_checkpointing_mode grad_ckpt gradient_ckpt",
    "tok_s_gpu_best": "tokens_per_s_per_gpu tokens_per_second_per_gpu tokens_per_sec_per_gpu tokens_s_gpu tok_s_gpu "
    "tokens_per_s_per_device tokens_s_device tok_s_device tgs tokens_gpu_s tokens_per_gpu_per_second "
    "tokens_per_gpu_per_s tokens_sec_gpu tok_sec_gpu tps_gpu t_s_gpu",
    "step_time_s": "step_time_sec step_time_seconds time_per_step_s time_per_step_sec seconds_per_step s_per_step "
    "iteration_time_s iter_time_s time_per_iteration_s sec_per_step s_it s_step s_iter s_iteration sec_step sec_iter "
    "time_step_s time_iteration_s",
    "tflops_per_gpu": "tflop_s_gpu tflops_gpu tflops_per_device tflop_s_device model_tflops_per_gpu tflops_s_gpu "
    "tflop_per_s_per_gpu tflops_per_second_per_gpu model_tflop_s_gpu model_tflops_s_gpu tflop_s_chip tflops_chip",
    "mfu_pct": "mfu_percent",
    "hfu_pct": "hfu_percent",
    "mem_gb_per_gpu": "memory_gb mem_gb max_memory_gb peak_memory_gb memory_gb_per_gpu peak_memory_gb_per_gpu "
    "gpu_memory_gb",
    "framework": "software library",
    "interconnect": "network node_network inter_node internode fabric nics nic network_bandwidth",
    "framework_version": "software_version version release container container_image docker_image image",
    "pp": "pipe_parallel_size",
    "vpp": "vp virtual_pp pipeline_chunks model_chunks",
    "etp": "expert_tp expert_tensor_parallel expert_tensor_parallelism",
    "seq_parallel": "sequence_parallel sequence_parallelism",
    "source": "url source_url link reference",
    "notes": "note comment comments remarks",
    "date": "published publication_date",
}

_SCALED = {
    "step_time_s": (1e-3, "step_time_ms time_per_step_ms iteration_time_ms iter_time_ms ms_per_step ms_it ms_step "
                    "ms_iter time_step_ms time_iteration_ms"),
    "mem_gb_per_gpu": (2**30 / 1e9, "memory_gib mem_gib max_memory_gib peak_memory_gib mem_gib_per_gpu "
                       "memory_gib_per_gpu peak_memory_gib_per_gpu gpu_memory_gib"),
}  # fmt: skip
"""Column -> factor of another unit, and the names of columns that have it."""

_RATIOS = {"mfu": "mfu_pct", "hfu": "hfu_pct"}
"""Names without a unit: a column without a value above 1 is a share, any other one percent."""

_PLAIN = (
    (r"(?:elapsed|training|avg|average|mean|median|total|max|maximum|peak|achieved|throughput|reserved)_", ""),
    (r"_sec(?:ond)?s?(?=_|$)", "_s"),
    (r"_per_", "_"),
)
"""Words of a name that change nothing, and shorter ones: "Elapsed training step time (s)" is "Step time (s)"."""

_AMBIGUOUS = ("batch_size", "batch")
"""Names that some tables give the global and others the micro-batch."""

_SEPARATORS = r"[,;()+]"
"""Signs between a framework, its version and what else their cells say."""

PRINTED_RATE = "tokens_per_s_per_gpu"
"""A rate as its source prints it; read only from a table without `tok_s_gpu_best`."""

MEASURES = ("tok_s_gpu_best", "step_time_s", "tflops_per_gpu", "mfu_pct", "hfu_pct", "mem_gb_per_gpu", *RATE_COLUMNS)
"""Columns of which a table of measured runs has one or more."""


def our_columns(header: Sequence[str]) -> list[Column]:
    """The columns of `header`: renamed where they have another table's name and the file has not ours.

    >>> [c.name for c in our_columns(["GPU type", "# GPUs", "Step time (ms)", "Weather"])]
    ['gpu', 'num_gpus', 'step_time_s', 'Weather']
    """
    taken, found = set(header), []
    for name in header:
        ours = name in shipped_columns() and name != PRINTED_RATE
        column = Column(name=name) if ours else _known_as(name)
        if column is None or (column.name != name and column.name in taken):
            column = Column(name=name)
        taken.add(column.name)
        found.append(column)
    return found


def notes_on_columns(path: Path) -> list[str]:
    """Sentences on the columns of a file that are read under another name, and on those that are not read."""
    table = read_lines(path)
    header, lines = table.header, [line for line in table.lines if len(line.cells) == len(table.header)]
    columns = list(zip(header, our_columns(header), strict=True))
    renamed = [f"{name} as {c.name}{_unit(c)}" for name, c in columns if c.name != name]
    others = [name for name, c in columns if c.name == name and name and name not in shipped_columns()]
    as_notes = [name for name in others if any(_states(name, line.cells[header.index(name)]) for line in lines)]
    unread = [name for name in others if name not in as_notes]
    notes = [f"columns read under our names: {', '.join(renamed)}"] if renamed else []
    notes += [f"columns read as notes: {', '.join(as_notes)}"] if as_notes else []
    return notes + ([f"columns that are not read: {', '.join(unread)}"] if unread else [])


def with_switches_as_notes(row: CsvRow) -> CsvRow:
    """`row` with everything in its note that states a switch: cells of columns that are none of ours, and words beside
    the framework and its version ("2025-09, no compile").
    """
    others = {name: cell for name, cell in row.cells.items() if name and name not in shipped_columns()}
    stated = [f"{name}: {cell}" for name, cell in others.items() if _states(name, cell)]
    software = re.split(_SEPARATORS, f"{row.text('framework')}; {row.text('framework_version')}")
    stated += [text.strip() for text in software if _switches(text)]
    if not stated:
        return row
    return replace(row, cells=row.cells | {"notes": "; ".join(filter(None, (row.text("notes"), *stated)))})


def _states(name: str, cell: str) -> bool:
    """True where a column of an unknown name and its cell name a switch: "Dispatcher" and "DeepEP"."""
    return bool(cell) and any(clause.mentions for clause in read_statements(f"{name}: {cell}").clauses)


def _switches(text: str) -> bool:
    """True where the text beside a framework states a switch, and not only a number: a release is one."""
    mentions = [m for clause in read_statements(text).clauses for m in clause.mentions]
    return any(m.value is not None and m.value != m.number for m in mentions)


def _unit(column: Column) -> str:
    if column.is_ratio:
        return " (shares where none exceeds 1, else percent)"
    return "" if column.scale == 1.0 else f" (times {column.scale:g})"


def _known_as(name: str) -> Column | None:
    word = re.sub(r"[^a-z0-9]+", "_", name.lower().replace("%", " percent ")).strip("_")
    plain = word
    for pattern, spelling in _PLAIN:
        plain = re.sub(pattern, spelling, plain)
    parted = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")  # SeqLen
    return _of_word(word) or _of_word(plain) or _of_word(parted)


def _of_word(word: str) -> Column | None:
    if word in _RATIOS:
        return Column(name=_RATIOS[word], is_ratio=True)
    if word in shipped_columns() and word != PRINTED_RATE:
        return Column(name=word)
    for ours, (scale, names) in _SCALED.items():
        if word in names.split():
            return Column(name=ours, scale=scale)
    for ours, names in _NAMES.items():
        if word in names.split():
            return Column(name=ours)
    if unit := rate_unit(word):
        ours = "tok_s_gpu_best" if (unit.amount, unit.owner) == ("tokens", "device") else unit.column
        return Column(name=ours, scale=unit.scale)
    ours = None if word in _AMBIGUOUS else _KEYS.get(key_for(word) or "")
    return Column(name=ours) if ours in shipped_columns() else None
