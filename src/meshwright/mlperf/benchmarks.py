"""Benchmarks as data: one TOML file each, with the rounds that run it.

A file holds the rules that all its rounds share; a table `[rounds."5.1"]` overrides any of them for one round, key by
key. `data/rounds.toml` holds the rules that all benchmarks of a round share. A benchmark of one's own is a further file
of the same form in any folder: `official = false`, own reference convergence points, own rule set
(docs/guides/mlperf.md has one).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, value_named
from meshwright.files import record_of, toml_table
from meshwright.mlperf.formulas import evaluate_formula, is_number, names_in

DATA = Path(__file__).parent / "data"
BENCHMARKS = DATA / "benchmarks"
PROXIES = DATA / "proxies"
_ROUNDS = DATA / "rounds.toml"


@dataclass(frozen=True, kw_only=True)
class RuleOfHyperparameter:
    """Rule of one logged key. Without value, formulas and bounds the submitter chooses it."""

    key: str
    value: object = None
    formulas: tuple[str, ...] = ()  # any of them may hold; names are logged keys
    allowed: tuple[object, ...] = ()  # a choice among literals
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # strictly
    integer: bool = False
    required: bool = True  # the log must hold it
    absolute: float = 0.0  # tolerance beside the relative one of 1e-9
    official: bool = False  # the official checker compares the value too
    after: str = ""  # key whose record must stand before this one (the official checker reads in order)

    @property
    def tunable(self) -> bool:
        """Return True if a submitter chooses the value."""
        return self.value is None and not self.formulas


@dataclass(frozen=True, kw_only=True)
class EvaluationRule:
    """Cadence of evaluations. `interval` and `skip` are formulas over global_batch_size."""

    interval: str  # sequences
    skip: str = "0"  # first evaluations that the rules skip
    samples: int  # sequences of one evaluation
    first_is_open: bool = False  # no rule says at which multiple of the interval the first one stands


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """Rules that all benchmarks of a round share."""

    round: str
    published: str
    ruleset: str  # of mlperf-logging
    disclosure: str  # none, optional, required
    precisions: tuple[str, ...] = ()  # allowed values of the precision keys
    precision_keys: tuple[str, ...]
    degree_keys: tuple[str, ...]
    text_keys: tuple[str, ...]
    once: tuple[str, ...]  # keys logged exactly once
    initialization_minutes: Mapping[str, float]  # by division


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Rules of one benchmark in one round. Sample counts are sequences."""

    name: str
    title: str
    kind: str  # pretrain, lora
    official: bool  # a benchmark of MLPerf; else one's own, whose results never carry that name
    rules: RoundRules
    runs: int  # N of a score
    target: float
    metric: str
    is_higher_better: bool = False  # of an accuracy, which must exceed the target; a loss may equal it
    evaluation: EvaluationRule
    hyperparameters: Mapping[str, RuleOfHyperparameter]
    sequence_length: int | None = None
    rcp: Path | None = None  # reference convergence points, official schema
    ruleset_file: Path | None = None  # for the official checker, of a benchmark of one's own
    allowed_early_samples: int = 0  # the reference-convergence test allows a mean that much earlier
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)  # of one's own: what `mlperf run` needs
    sources: tuple[str, ...] = ()
    path: Path

    @property
    def round(self) -> str:
        return self.rules.round

    def interval(self, global_batch_size: int) -> int:
        """Sequences between two evaluations."""
        return self._count(self.evaluation.interval, global_batch_size, least=1)

    def skipped(self, global_batch_size: int) -> int:
        """Evaluations that the rules skip at the start."""
        return self._count(self.evaluation.skip, global_batch_size, least=0)

    def first_evaluation(self, global_batch_size: int) -> int:
        """Sequences before the first evaluation."""
        return self.interval(global_batch_size) * (1 + self.skipped(global_batch_size))

    def reached(self, value: float) -> bool:
        """Return True if a loss or an accuracy meets the target; one that is not positive and finite never does."""
        if not is_number(value):
            return False
        return self.target < value <= 1.0 if self.is_higher_better else 0.0 < value <= self.target

    def _count(self, formula: str, global_batch_size: int, *, least: int) -> int:
        value = evaluate_formula(formula, {"global_batch_size": global_batch_size})
        if value != int(value) or value < least:
            raise InputError(
                f"{self.path.name}: formula must give a whole number >= {least}", got=f"{formula} = {value}"
            )
        return int(value)


def round_names() -> tuple[str, ...]:
    """Rounds whose rules ship, oldest first."""
    return tuple(toml_table(_ROUNDS)["rounds"])


def benchmark_names(folders: Sequence[Path] = ()) -> tuple[str, ...]:
    """Names of all benchmarks: MLPerf's, then one's own."""
    return tuple(_files(folders))


def load_benchmark(name: str, round: str | None = None, *, folders: Sequence[Path] = ()) -> Benchmark:
    """Rules of a benchmark in a round, its newest without one.

    `name` is the NAME of a file `NAME.toml` that ships or stands in one of `folders`, or a path of such a
    file. Raises UnknownNameError for a name and InputError for a round in which it was not run.

    >>> lora = load_benchmark("llama2_70b_lora", "5.1")
    >>> lora.first_evaluation(8), lora.interval(8)
    (1536, 384)
    """
    path = _file(name, folders)
    return read_benchmark(path, round)


def read_benchmark(path: Path, round: str | None = None) -> Benchmark:
    """Rules in the file `path` for a round, the last of the file without one."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: benchmark file cannot be read: {error}") from error
    rounds = document.get("rounds")
    if not isinstance(rounds, dict) or not rounds:
        raise InputError(f'{path}: a benchmark file has a table [rounds."..."] for each of its rounds')
    chosen = round if round is not None else list(rounds)[-1]
    if chosen not in rounds:
        raise InputError(f"{path.stem} is no benchmark of this round", got=chosen, allowed=", ".join(rounds))
    shared = {k: v for k, v in document.items() if k != "rounds"}
    try:
        return _benchmark(path, _merged(shared, rounds[chosen]), chosen)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: round {chosen}: a key is missing or of another type: {error}") from error


def round_rules(round: str) -> RoundRules:
    """Rules that all benchmarks of a round share; raises UnknownNameError."""
    document = toml_table(_ROUNDS)
    row, keys = value_named("round", round, document["rounds"]), document["disclosure"]
    return record_of(
        RoundRules, row, round=round, precision_keys=keys["precisions"], degree_keys=keys["degrees"],
        text_keys=keys["texts"], initialization_minutes=document["initialization_minutes"],
    )  # fmt: skip


def _benchmark(path: Path, row: dict[str, Any], round: str) -> Benchmark:
    evaluation = EvaluationRule(**row["evaluation"])
    for formula in (evaluation.interval, evaluation.skip):
        if names_in(formula) - {"global_batch_size"}:
            raise InputError(f"{path}: cadence may read global_batch_size alone", got=formula)
    rules = {key: _hyperparameter(key, values) for key, values in row.get("hyperparameters", {}).items()}
    if not is_number(row["target"]["value"]) or int(row["runs"]) < 1:
        raise InputError(f"{path}: the target is a number and the runs of a score are positive")
    return Benchmark(
        name=row.get("name", path.stem),
        title=row["title"],
        kind=row["kind"],
        official=bool(row["official"]),
        rules=round_rules(round),
        runs=int(row["runs"]),
        target=float(row["target"]["value"]),
        metric=row["target"]["metric"],
        is_higher_better=bool(row["target"].get("is_higher_better", False)),
        evaluation=evaluation,
        hyperparameters=rules,
        sequence_length=row.get("model", {}).get("sequence_length"),
        rcp=_file_named_by(path, row.get("rcp"), official=bool(row["official"])),
        ruleset_file=_file_named_by(path, row.get("ruleset_file"), official=False),
        allowed_early_samples=int(row.get("convergence", {}).get("allowed_early_samples", 0)),
        model=row.get("model", {}),
        data=row.get("data", {}),
        training=row.get("training", {}),
        sources=tuple(row.get("sources", ())),
        path=path,
    )


def _hyperparameter(key: str, values: dict[str, Any]) -> RuleOfHyperparameter:
    row = dict(values)
    formula = row.pop("formula", ())
    formulas = (formula,) if isinstance(formula, str) else tuple(formula)
    for each in formulas:
        names_in(each)
    return RuleOfHyperparameter(key=key, formulas=formulas, allowed=tuple(row.pop("allowed", ())), **row)


def _file_named_by(path: Path, name: str | None, *, official: bool) -> Path | None:
    """A file that a benchmark file names: MLPerf's stand in data/rcps, others beside it."""
    if name is None:
        return None
    return (DATA / "rcps" / name) if official and path.parent == BENCHMARKS else (path.parent / name)


def _merged(shared: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`shared` with the keys of `over`, table by table."""
    result = dict(shared)
    for key, value in over.items():
        kept = result.get(key)
        result[key] = _merged(kept, value) if isinstance(kept, dict) and isinstance(value, dict) else value
    return result


def _files(folders: Sequence[Path]) -> dict[str, Path]:
    """Name -> file; a later folder cannot replace a benchmark of MLPerf."""
    found: dict[str, Path] = {}
    for folder in (BENCHMARKS, PROXIES, *folders):
        for path in sorted(folder.glob("*.toml")):
            if path.stem in found:
                raise InputError(
                    f"{path}: two benchmarks share the name", got=path.stem, hint="rename one of the files"
                )
            found[path.stem] = path
    return found


def _file(name: str, folders: Sequence[Path]) -> Path:
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    return value_named("benchmark", name, _files(folders))
