"""Results side by side: makers and partners by accelerator, spread of the partners, generation over generation.

Scores of folders are computed; published sets come from the catalogue. A computed score that is not one of them is
unverified. Results of MLPerf are not compared with other benchmarks' results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from meshwright.catalog.mlperf_results import MLPerfResult, mlperf_results
from meshwright.errors import InputError
from meshwright.json_values import jsonable
from meshwright.mlperf.benchmarks import benchmark_names, round_rules
from meshwright.mlperf.check_system import submitted_system
from meshwright.mlperf.log import read_log
from meshwright.mlperf.results import NOT_MLPERF, UNVERIFIED
from meshwright.mlperf.score import Score, result_files, result_folders, score_folder
from meshwright.result import Result

PUBLISHED = "published by MLCommons"
_SAME = 2e-4  # scores of one set, rounded minutes against milliseconds


@dataclass(frozen=True, kw_only=True)
class ComparedResult:
    """One score in a comparison."""

    round: str
    benchmark: str
    submitter: str
    system: str
    accelerator: str
    num_accelerators: int | None
    score_min: float
    raw_min: float
    label: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """Round, benchmark, accelerator and number of accelerators: results that agree in them form a group."""
        return self.round, self.benchmark, self.accelerator, self.num_accelerators


@dataclass(frozen=True, kw_only=True)
class ComparedGroup:
    """Results of one benchmark on as many of one accelerator in one round."""

    round: str
    benchmark: str
    accelerator: str
    num_accelerators: int | None
    results: tuple[ComparedResult, ...]
    maker: ComparedResult | None  # the accelerator's maker's own result, its best

    @property
    def partners(self) -> tuple[ComparedResult, ...]:
        """Results of other submitters than the accelerator's maker."""
        return tuple(r for r in self.results if self.maker is None or r.submitter != self.maker.submitter)

    @property
    def mean_min(self) -> float:
        """Mean score in minutes."""
        return mean(r.score_min for r in self.results)

    @property
    def partner_mean_min(self) -> float | None:
        """Mean score of the partners in minutes; None without any."""
        return mean(r.score_min for r in self.partners) if self.partners else None

    @property
    def spread(self) -> float | None:
        """Largest relative distance of a partner from the maker's own result."""
        if self.maker is None or not self.partners:
            return None
        return max(abs(r.score_min / self.maker.score_min - 1) for r in self.partners)


@dataclass(frozen=True, kw_only=True)
class GenerationRatio:
    """Minutes on one accelerator over those on another: same benchmark, as many devices."""

    benchmark: str
    num_accelerators: int | None
    slower: str  # "accelerator, round"
    faster: str
    ratio: float
    of: str  # whose results: a submitter, or means


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ResultComparison(Result):
    """Results of a benchmark side by side.

    Attributes:
        groups: results of one benchmark on as many of one accelerator in one round.
        generations: ratios between groups of one benchmark and size.
        endnotes: sources, labels and cautions.
    """

    groups: tuple[ComparedGroup, ...]
    generations: tuple[GenerationRatio, ...]
    endnotes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        groups = [
            asdict(g) | {name: getattr(g, name) for name in ("mean_min", "partner_mean_min", "spread")}
            for g in self.groups
        ]
        generations = [asdict(ratio) for ratio in self.generations]
        return jsonable({"groups": groups, "generations": generations, "endnotes": list(self.endnotes)})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each result."""
        return [asdict(result) for group in self.groups for result in group.results]

    def summary(self) -> str:
        """Return the numbers of results and groups, and the ratios."""
        ratios = "; ".join(f"{r.faster} is {r.ratio:.2f}x {r.slower}" for r in self.generations[:3])
        count = f"{sum(len(group.results) for group in self.groups)} results in {len(self.groups)} groups"
        return f"{count}; {ratios}" if ratios else count


def compare_sets(
    paths: Sequence[Path] = (),
    *,
    rounds: Sequence[str] = (),
    names: Sequence[str] = (),
    accelerators: Sequence[str] = (),
    devices: int | None = None,
    published: bool = True,
    baseline: str | None = None,
    benchmarks: Sequence[Path] = (),
) -> ResultComparison:
    """Compare the sets at and below `paths` with each other, and with published ones that the filters take.

    `benchmarks` hold further benchmark files. Raises InputError for unknown names and where nothing is to compare.
    """
    for name in rounds:
        round_rules(name)
    if unknown := [name for name in names if name not in benchmark_names(benchmarks)]:
        raise InputError("unknown benchmark", got=unknown[0], allowed=", ".join(benchmark_names(benchmarks)))
    wanted = list(dict.fromkeys(folder for path in paths for folder in result_folders(path)))
    scores = [score_folder(folder, folders=benchmarks) for folder in wanted]
    results = compared_scores(s for s in scores if not names or s.benchmark.name in names)
    if published and all(score.benchmark.official for score in scores):
        mine = {(r.round, r.submitter, r.system, r.benchmark) for r in results if r.label == PUBLISHED}
        found = published_results(rounds=rounds, benchmarks=names, accelerators=accelerators, devices=devices)
        results += [r for r in found if (r.round, r.submitter, r.system, r.benchmark) not in mine]
    return compare(results, baseline=baseline)


def compared_scores(scores: Iterable[Score]) -> list[ComparedResult]:
    """Results of folders. A score that equals a published one of the same system is labelled so."""
    found = []
    for score in scores:
        if score.score_min is None or score.raw_min is None:
            raise InputError(
                f"{score.folder} has no score: {_why_no_score(score)}", hint=f"meshwright mlperf score {score.folder}"
            )
        log = read_log(result_files(score.folder)[0])
        org, system = _names(score.folder, log.value("submission_org"))
        submission = submitted_system(score.folder)
        values = submission.values if submission else {}
        published = _published(score, org, system)
        found.append(
            ComparedResult(
                round=score.benchmark.round,
                benchmark=score.benchmark.name,
                submitter=org,
                system=system,
                accelerator=accelerator_name(str(values.get("accelerator_model_name", "")))
                or (accelerator_name(published.accelerator) if published else "")
                or str(log.value("submission_platform") or "unknown")[:60],
                num_accelerators=submission.num_devices if submission else published and published.num_accelerators,
                score_min=score.score_min,
                raw_min=score.raw_min,
                label=PUBLISHED if published else UNVERIFIED if score.benchmark.official else NOT_MLPERF,
                source=str(score.folder),
            )
        )
    return found


def _why_no_score(score: Score) -> str:
    failed = [f"{r.name}: {r.problem}" for r in score.scored if not r.converged]
    return "; ".join((*score.problems, *failed))


def published_results(
    *,
    rounds: Sequence[str] = (),
    benchmarks: Sequence[str] = (),
    accelerators: Sequence[str] = (),
    devices: int | None = None,
) -> list[ComparedResult]:
    """Published sets of the catalogue; empty filters take all."""
    return [
        _compared(result)
        for result in mlperf_results()
        if (not rounds or result.round in rounds)
        and (not benchmarks or result.benchmark in benchmarks)
        and (devices is None or result.num_accelerators == devices)
        and (not accelerators or accelerator_name(result.accelerator).lower() in {a.lower() for a in accelerators})
    ]


def compare(results: Sequence[ComparedResult], *, baseline: str | None = None) -> ResultComparison:
    """Group results and relate the groups; `baseline` is the accelerator of the ratios, the slowest without one."""
    if not results:
        raise InputError("no result to compare", hint="name folders of results, or widen the filters")
    if len({r.label == NOT_MLPERF for r in results}) > 1:
        raise InputError("results of MLPerf may not be compared with results of other benchmarks")
    keyed: dict[tuple[str, str, str, int | None], list[ComparedResult]] = {}
    for result in results:
        keyed.setdefault(result.key, []).append(result)
    groups = [_group(found) for found in keyed.values()]
    groups.sort(key=lambda g: (g.benchmark, g.num_accelerators or 0, g.round, g.mean_min))
    return ResultComparison(
        groups=tuple(groups), generations=tuple(_generations(groups, baseline)), endnotes=_endnotes(results)
    )


def accelerator_name(model: str) -> str:
    """Short name of an accelerator as system descriptions print it.

    >>> accelerator_name("AMD Instinct MI300X 192GB HBM3"), accelerator_name("NVIDIA Blackwell GPU (B200-SXM-180GB)")
    ('MI300X', 'B200')
    """
    for part in model.replace("(", " ").replace(")", " ").replace("-", " ").split():
        if len(part) > 3 and part[0] in "MHBGTAL" and any(c.isdigit() for c in part) and not part.endswith("GB"):
            return part
    return model


def maker_of(accelerator: str) -> str:
    """Maker of an accelerator by the form of its name."""
    return "AMD" if accelerator.startswith("MI") else "Google" if accelerator.startswith("TPU") else "NVIDIA"


def _names(folder: Path, org: object) -> tuple[str, str]:
    parts = folder.absolute().parts
    if len(parts) >= 4 and parts[-3] == "results":
        return parts[-4], parts[-2]
    return str(org or "unknown")[:60], folder.parent.name


def _published(score: Score, org: str, system: str) -> MLPerfResult | None:
    for result in mlperf_results():
        same = (result.submitter, result.system, result.round, result.benchmark) == (
            org, system, score.benchmark.round, score.benchmark.name,
        )  # fmt: skip
        if same and score.raw_min is not None and abs(result.raw_min / score.raw_min - 1) < _SAME:
            return result
    return None


def _compared(result: MLPerfResult) -> ComparedResult:
    return ComparedResult(
        round=result.round, benchmark=result.benchmark, submitter=result.submitter, system=result.system,
        accelerator=accelerator_name(result.accelerator), num_accelerators=result.num_accelerators,
        score_min=result.score_min, raw_min=result.raw_min, label=PUBLISHED,
        source=f"github.com/mlcommons/training_results_v{result.round}, {result.submitter}/results/{result.system}",
    )  # fmt: skip


def _group(found: list[ComparedResult]) -> ComparedGroup:
    first = found[0]
    own = [r for r in found if r.submitter == maker_of(first.accelerator)]
    return ComparedGroup(
        round=first.round, benchmark=first.benchmark, accelerator=first.accelerator,
        num_accelerators=first.num_accelerators, results=tuple(sorted(found, key=lambda r: r.score_min)),
        maker=min(own, key=lambda r: r.score_min) if own else None,
    )  # fmt: skip


def _generations(groups: Sequence[ComparedGroup], baseline: str | None) -> Iterable[GenerationRatio]:
    """Ratios to the baseline of each benchmark and size: from one maker's own results, or from means over
    sets."""
    sizes = dict.fromkeys((g.benchmark, g.num_accelerators) for g in groups)
    for benchmark, devices in sizes:
        same = [g for g in groups if (g.benchmark, g.num_accelerators) == (benchmark, devices)]
        named = [g for g in same if baseline is None or g.accelerator.lower() == baseline.lower()]
        if not named or len(same) < 2:
            continue
        base = max(named, key=lambda g: g.mean_min)
        for group in same:
            if group is base:
                continue
            own = base.maker is not None and group.maker is not None and base.maker.submitter == group.maker.submitter
            one = base.maker.score_min if own and base.maker else base.mean_min
            other = group.maker.score_min if own and group.maker else group.mean_min
            yield GenerationRatio(
                benchmark=benchmark, num_accelerators=devices, slower=f"{base.accelerator}, {base.round}",
                faster=f"{group.accelerator}, {group.round}", ratio=one / other,
                of=base.maker.submitter if own and base.maker else "means over sets",
            )  # fmt: skip


def _endnotes(results: Sequence[ComparedResult]) -> tuple[str, ...]:
    rounds = sorted({r.round for r in results if r.label == PUBLISHED})
    notes = []
    if rounds:
        listed = ", ".join(f"v{r}" for r in rounds)
        notes.append(
            f"Results of MLPerf Training {listed}, closed and open, from github.com/mlcommons/training_results_vX.Y: "
            "olympic mean of the minutes times the factor of scaling.json."
        )
    unverified = [r for r in results if r.label == UNVERIFIED]
    if unverified:
        systems = ", ".join(sorted({f"{r.submitter} {r.system}" for r in unverified}))
        notes.append(f"Unverified MLPerf Training results: {systems}. Result not verified by MLCommons Association.")
    if any(r.label == NOT_MLPERF for r in results):
        notes.append("These are results of own benchmarks and no MLPerf results.")
    else:
        notes.append(
            "The MLPerf name and logo are registered and unregistered trademarks of MLCommons Association in the "
            "United States and other countries. All rights reserved. Unauthorized use strictly prohibited. "
            "See www.mlcommons.org."
        )
        notes.append("Result files do not hold the precision: groups mix FP8 and FP4 systems.")
    return tuple(notes)
