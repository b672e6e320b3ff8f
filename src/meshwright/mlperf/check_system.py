"""Rules about the system: its description in the submission, and the logs' lines about it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.files import toml_table
from meshwright.json_values import parse_json
from meshwright.mlperf.benchmarks import DATA, Benchmark
from meshwright.mlperf.check_evaluations import global_batch
from meshwright.mlperf.findings import CheckFinding, finding
from meshwright.mlperf.formulas import is_number
from meshwright.mlperf.log import RunLog

_SYSTEM = toml_table(DATA / "system.toml")
SYSTEM_FIELDS, SYSTEM_STATUSES = tuple(_SYSTEM["fields"]), tuple(_SYSTEM["statuses"])


@dataclass(frozen=True, kw_only=True)
class SubmittedSystem:
    """A file systems/SYSTEM.json; `values` is empty where it cannot be read."""

    path: Path
    values: dict[str, Any]

    @property
    def num_nodes(self) -> int | None:
        return _count(self.values.get("number_of_nodes"))

    @property
    def num_devices(self) -> int | None:
        """Accelerators of the whole system."""
        per_node = _count(self.values.get("accelerators_per_node"))
        return None if per_node is None or self.num_nodes is None else per_node * self.num_nodes


def submitted_system(folder: Path) -> SubmittedSystem | None:
    """Description of a set in `ORG/results/SYSTEM/BENCHMARK`, or None outside a submission tree."""
    where = folder.absolute()
    if where.parent.parent.name != "results":
        return None
    path = where.parent.parent.parent / "systems" / f"{where.parent.name}.json"
    if not path.is_file():
        return None
    try:
        values = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        values = {}
    return SubmittedSystem(path=path, values=values if isinstance(values, dict) else {})


def system_findings(
    logs: Sequence[RunLog], rules: Benchmark, system: SubmittedSystem | None, *, folder: Path
) -> Iterator[CheckFinding]:
    """Findings about the description, and about logs that disagree with it."""
    if system is None:
        return
    for message in description_problems(system.values):
        yield CheckFinding(file=system.path.name, line=None, rule="system-description", message=message)
    for log in logs:
        yield from _division(log, system)
        yield from _nodes(log, system)
        yield from _devices(log, system)


def description_problems(values: dict[str, Any]) -> list[str]:
    """All that the official checker would reject in a system description."""
    if not values:
        return ["the file is no JSON object"]
    absent = [name for name in SYSTEM_FIELDS if name not in values]
    problems = [f"missing: {', '.join(absent)}"] if absent else []
    if "status" in values and values["status"] not in SYSTEM_STATUSES:
        problems.append(f"status is {values['status']!r:.60}, allowed: {'; '.join(SYSTEM_STATUSES)}")
    return problems


def _division(log: RunLog, system: SubmittedSystem) -> Iterator[CheckFinding]:
    """The official checker chooses its rules by the description, and ours by the log."""
    record, submitted = log.last("submission_division"), system.values.get("division")
    if record is not None and submitted in ("closed", "open") and record.value != submitted:
        message = f"{record.value!r:.40}, {system.path.name} has {submitted!r}"
        yield finding(log, "division", message, record)


def _nodes(log: RunLog, system: SubmittedSystem) -> Iterator[CheckFinding]:
    """`4xMI300X` is how submitters write four nodes."""
    record = log.last("submission_platform")
    found = re.match(r"\s*(\d{1,6})\s*x", record.value) if record and isinstance(record.value, str) else None
    if record is None or found is None or system.num_nodes is None:
        return
    if int(found.group(1)) != system.num_nodes:
        message = f"{record.value!r:.60}, {system.path.name} has {system.num_nodes} nodes"
        yield finding(log, "platform-nodes", message, record)


def _devices(log: RunLog, system: SubmittedSystem) -> Iterator[CheckFinding]:
    """Compare the batch with the degrees, where the log discloses them (6.0 and later)."""
    batch, devices = global_batch(log), system.num_devices
    keys = ("micro_batch_size", "gradient_accumulation_steps")
    degrees = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism")
    values = {key: _count(log.value(key)) for key in (*keys, *degrees)}
    if batch is None or not devices or any(not v for v in values.values()):
        return
    split = math.prod(values[key] or 1 for key in degrees)
    each = (values["micro_batch_size"] or 1) * (values["gradient_accumulation_steps"] or 1)
    if devices % split or each * devices // split != batch:
        message = (
            f"micro-batch {values['micro_batch_size']} * accumulation {values['gradient_accumulation_steps']} * "
            f"{devices} devices / {split} (tensor, pipeline, context) is not the global batch size {batch}"
        )
        yield finding(log, "devices", message, log.last("global_batch_size"))


def _count(value: object) -> int | None:
    """A positive whole number, also as text."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 12:
        value = int(value)
    return int(value) if is_number(value) and value > 0 and value == int(value) else None
