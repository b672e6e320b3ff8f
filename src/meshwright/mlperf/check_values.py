"""Rules of one log about single values: required keys, hyperparameters, seeds, disclosure."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import Benchmark, RuleOfHyperparameter
from meshwright.mlperf.findings import CheckFinding, finding
from meshwright.mlperf.formulas import evaluate_formula, is_number, names_in
from meshwright.mlperf.log import RunLog

AT_LEAST_ONCE = ("cache_clear", "init_start", "eval_accuracy")

_RUN_KEYS = ("run_start", "run_stop", "eval_accuracy", "block_start", "block_stop", "train_samples")
"""Keys that a log that is being written may not hold after init_stop."""


def value_findings(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    """Findings about keys and values."""
    for fault in log.faults:
        yield CheckFinding(
            file=log.path.name, line=fault.line, rule="log-syntax", message=f"{fault.problem}: {fault.text[:80]}"
        )
    if not log.records:
        yield finding(log, "log-empty", "no record")
        return
    if not log.finished:
        yield finding(log, "unfinished", f"no run_stop; the last record is {log.records[-1].key}", log.records[-1])
    yield from _keys(log, rules)
    yield from _types(log)
    yield from _submission(log, rules)
    if log.value("submission_division") != "open":
        for rule in rules.hyperparameters.values():
            yield from _hyperparameter(log, rule)
        record = log.last("eval_samples")
        if record is not None and not _equal(record.value, rules.evaluation.samples, 0.0):
            message = f"eval_samples is {record.value!r:.60}, the rules say {rules.evaluation.samples}"
            yield finding(log, "eval-samples", message, record)
        yield from _seeds(log)
    yield from _disclosure(log, rules)


def required_keys(rules: Benchmark, *, closed: bool) -> tuple[str, ...]:
    """Keys that a finished log holds."""
    own = tuple(k for k, r in rules.hyperparameters.items() if r.required) if closed else ()
    disclosed = rules.rules
    keys = disclosed.precision_keys + disclosed.degree_keys + disclosed.text_keys
    return tuple(
        dict.fromkeys(rules.rules.once + AT_LEAST_ONCE + own + (keys if disclosed.disclosure == "required" else ()))
    )


def absent_keys(log: RunLog, rules: Benchmark) -> list[str]:
    """Required keys that the log does not hold."""
    closed = log.value("submission_division") != "open"
    absent = [k for k in required_keys(rules, closed=closed) if not log.all(k)]
    for one, other in (("block_start", "epoch_start"), ("block_stop", "epoch_stop")):
        if not log.all(one, other):
            absent.append(one)
    return absent


def not_yet(log: RunLog, key: str) -> bool:
    """Return True for a key that an unfinished log may still bring."""
    if log.finished:
        return False
    return key in _RUN_KEYS if log.first("init_stop") is not None else True


def _keys(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    disclosed = (*rules.rules.precision_keys, *rules.rules.degree_keys, *rules.rules.text_keys)
    for key in absent_keys(log, rules):
        if not not_yet(log, key):
            yield finding(log, "disclosure-missing" if key in disclosed else "key-missing", f"no {key}")
    once = dict.fromkeys((*rules.rules.once, *rules.hyperparameters, *disclosed))
    for key in once:
        found = log.all(key)
        if len(found) < 2:
            continue
        values = {repr(r.value) for r in found}
        if len(values) > 1:
            shown = ", ".join(sorted(values)[:4])
            yield finding(log, "key-repeated", f"{key} has {len(found)} records with values {shown:.160}", found[1])
        elif key not in ("init_stop", "run_start", "run_stop"):  # phase-repeated
            yield finding(log, "key-doubled", f"{key} has {len(found)} records of one value", found[1])


def _types(log: RunLog) -> Iterator[CheckFinding]:
    """One finding for each key that has another type of event than its name says."""
    expected = {"_start": "INTERVAL_START", "_stop": "INTERVAL_END"}
    seen: set[str] = set()
    for record in log.records:
        for ending, event in expected.items():
            if record.key.endswith(ending) and record.event != event and record.key not in seen:
                seen.add(record.key)
                yield finding(log, "event-type", f"{record.key} is {record.event!r:.40}", record)


def _submission(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    division = log.last("submission_division")
    if division is not None and division.value not in ("closed", "open"):
        yield finding(log, "division", f"got {division.value!r:.60}", division)
    name = log.last("submission_benchmark")
    if name is not None and name.value != rules.name:
        yield finding(log, "benchmark-name", f"the log names {name.value!r:.60}, checked is {rules.name}", name)
    for key in ("submission_org", "submission_platform"):
        empty = next((r for r in log.all(key) if not isinstance(r.value, str) or not r.value.strip()), None)
        if empty is not None and key in rules.rules.once:
            yield finding(log, "key-missing", f"{key} is empty", empty)
    cleared = next((r for r in log.all("cache_clear") if r.value is not True), None)
    if cleared is not None:
        yield finding(log, "cache-clear", f"cache_clear is {cleared.value!r:.40}", cleared)


def _hyperparameter(log: RunLog, rule: RuleOfHyperparameter) -> Iterator[CheckFinding]:
    record = log.last(rule.key)
    if record is None:
        return
    problem = _problem(log, rule, record.value)
    if problem:
        yield finding(log, "hyperparameter", f"{rule.key} is {record.value!r:.60}, the rules say {problem}", record)
    before = log.first(rule.after) if rule.after else None
    if before is not None and before.line > record.line:
        yield finding(log, "hyperparameter-order", f"{rule.key} stands before {rule.after}", record)


def _problem(log: RunLog, rule: RuleOfHyperparameter, value: object) -> str:
    """Allowed values, if `value` is none of them."""
    if rule.value is not None and not _equal(value, rule.value, rule.absolute):
        return repr(rule.value)
    if rule.allowed and not any(_equal(value, a, rule.absolute) for a in rule.allowed):
        return "one of " + ", ".join(map(repr, rule.allowed))
    if rule.formulas:
        return _formula_problem(log, rule, value)
    bounded = rule.integer or any(b is not None for b in (rule.minimum, rule.maximum, rule.above))
    if bounded and not is_number(value):
        return "a number"
    if not is_number(value):
        return ""
    if rule.integer and value != int(value):
        return "a whole number"
    if rule.minimum is not None and value < rule.minimum:
        return f">= {rule.minimum:g}"
    if rule.maximum is not None and value > rule.maximum:
        return f"<= {rule.maximum:g}"
    return f"> {rule.above:g}" if rule.above is not None and value <= rule.above else ""


def _formula_problem(log: RunLog, rule: RuleOfHyperparameter, value: object) -> str:
    expected = []
    for formula in rule.formulas:
        names = {name: log.value(name) for name in names_in(formula)}
        if any(v is None for v in names.values()):
            return ""  # key-missing says so
        try:
            expected.append(evaluate_formula(formula, names))
        except InputError as error:
            return f"{formula}, which cannot be computed: {error.message:.100}"
    if any(_equal(value, e, rule.absolute) for e in expected):
        return ""
    return " or ".join(f"{formula} = {e:.10g}" for formula, e in zip(rule.formulas, expected, strict=True))


def _equal(value: object, wanted: object, absolute: float) -> bool:
    if is_number(wanted):
        return is_number(value) and abs(value - wanted) <= max(absolute, 1e-9 * abs(wanted))
    return value == wanted


def _seeds(log: RunLog) -> Iterator[CheckFinding]:
    found = log.all("seed")
    if not found and not not_yet(log, "seed"):
        yield finding(log, "seed-missing", "no seed")
    for record in found:
        if isinstance(record.value, bool) or not is_number(record.value) or record.value != int(record.value):
            yield finding(log, "seed-integer", f"seed is {record.value!r:.60}", record)
    if len({repr(r.value) for r in found}) > 1:
        yield finding(log, "seed-several", f"{len(found)} seeds", found[1])


def _disclosure(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    shared = rules.rules
    if shared.disclosure == "none":
        return
    for key in shared.precision_keys:
        record = log.last(key)
        if record is not None and record.value not in shared.precisions:
            message = f"{key} is {record.value!r:.60}, allowed: {', '.join(shared.precisions)}"
            yield finding(log, "disclosure-value", message, record)
        named = log.last(key.replace("_in_", "_"))
        if record is None and named is not None:
            yield finding(log, "disclosure-name", f"{named.key} stands for {key}", named)
    for key in shared.degree_keys:
        record = log.last(key)
        if record is None:
            continue
        value = record.value
        if not is_number(value) or value != int(value) or value < 1:
            yield finding(log, "disclosure-value", f"{key} is {value!r:.60}, allowed: integers >= 1", record)
    for key in shared.text_keys:
        record = log.last(key)
        if record is not None and (not isinstance(record.value, str) or not record.value):
            yield finding(log, "disclosure-value", f"{key} is {record.value!r:.60}", record)
