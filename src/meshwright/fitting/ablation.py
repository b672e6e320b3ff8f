"""Worth of each mechanism of the step model: `python -m meshwright.fitting.ablation --markdown PAGE`.

A mechanism is switched off in the conditions of the published rows, in the facts of their systems or in the priors, the
calibration is fitted again, and each source is predicted without its own rows. The refit without a source is one of the
linearized model (`linearized_errors`): its errors differ by half a point in the median from the errors of
whole refits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.predict import log_step_of
from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import Calibration, Parameter, prior
from meshwright.cost.uncertainty import derivatives
from meshwright.files import write_atomically
from meshwright.fitting import published_runs
from meshwright.specs.features import RELEASE_DEFAULTS

ITERATIONS = 12
"""Reweightings of the linearized fit without one source."""
NEGLIGIBLE = 1e-3
"""Factor on a prior that takes a term out."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One part of the model, and how rows, problem or priors look without it."""

    name: str
    runs: Callable[[PublishedRun], PublishedRun] = lambda run: run
    facts: Mapping[str, float] | None = None  # fields of every row's system
    parameters: Callable[[Parameter], Parameter] = lambda parameter: parameter


def _without_notes(run: PublishedRun) -> PublishedRun:
    if run.conditions is None:
        return run
    stack = replace(run.conditions.stack, features=RELEASE_DEFAULTS)
    return replace(run, conditions=replace(run.conditions, stack=stack))


def _small(*names: str) -> Callable[[Parameter], Parameter]:
    """Take the terms of these parameters out: their priors become small and are not fitted."""

    def change(p: Parameter) -> Parameter:
        if p.name not in names:
            return p
        return replace(p, prior=p.prior * NEGLIGIBLE, sd=0.0, levels={}, measured={})

    return change


def _without_levels(*levels: str) -> Callable[[Parameter], Parameter]:
    """Let no parameter depend on these levels, neither by its prior nor by fitted offsets."""

    def change(p: Parameter) -> Parameter:
        kept = {level: sd for level, sd in p.levels.items() if level not in levels}
        measured = {} if p.measured and p.measured["level"] in levels else p.measured
        return replace(p, levels=kept, measured=measured)

    return change


def _saturated(p: Parameter) -> Parameter:
    return replace(p, prior=0.999, sd=0.0, levels={}) if p.name == "sustained_ratio" else p


MECHANISMS = (
    Mechanism(name="nothing"),
    Mechanism(name="switches from notes", runs=_without_notes),
    Mechanism(name="host time", parameters=_small("host_layer_s", "host_moe_s", "host_expert_s")),
    Mechanism(name="attention by kernel", parameters=_without_levels("attention")),
    Mechanism(name="one copy for each node of a dispatcher", facts={"deduplicates": 0.0}),
    Mechanism(name="fused experts", facts={"fused_experts": 0.0}, parameters=_without_levels("expert_kernels")),
    Mechanism(name="tiles that two experts share", facts={"ragged_rows": 0.0}),
    Mechanism(name="imbalance of experts", facts={"expert_imbalance": 1.0}),
    Mechanism(
        name="overlap of tensor parallelism and compilers", parameters=_without_levels("tensor_overlap", "fusion")
    ),
    Mechanism(name="formats on the wire", facts={"wire_gradient_bytes": 0.0, "wire_parameter_bytes": 0.0}),
    Mechanism(name="recomputation that stops early", facts={"stops_recompute": 0.0}),
    Mechanism(name="waves of output tiles", facts={"num_units": 0.0}),
    Mechanism(name="power limit", parameters=_saturated),
    Mechanism(name="rates by die", parameters=_without_levels("die_format", "device_format")),
    Mechanism(name="named releases and gains per year", parameters=_without_levels("release")),
)


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Errors of sources left out, outside sweeps: ratios."""

    name: str
    median: float
    p90: float
    dense: float
    moe: float
    sources: float  # mean over sources of the median


def measure(mechanism: Mechanism, runs: Sequence[PublishedRun]) -> Ablation:
    """The errors without `mechanism`. Each run has conditions and a rate."""
    chosen = [mechanism.runs(run) for run in published_runs.thinned(runs)]
    problem = published_runs.make_problem(chosen, _prior_without(mechanism))
    if mechanism.facts is not None:
        changed = {name: np.full(len(chosen), value) for name, value in mechanism.facts.items()}
        tables = replace(problem.tables, facts=replace(problem.tables.facts, **changed))
        problem = replace(problem, tables=tables)
    sources = np.array([run.source_key for run in chosen])
    error = np.abs(np.expm1(linearized_errors(problem, _prior_without(mechanism), sources)))
    steady, moe = ~problem.is_sweep, problem.is_moe
    by_source = [np.median(error[steady & (sources == s)]) for s in sorted(set(sources[steady].tolist()))]
    return Ablation(
        name=mechanism.name,
        median=float(np.median(error[steady])),
        p90=float(np.quantile(error[steady], 0.9)),
        dense=float(np.median(error[steady & ~moe])),
        moe=float(np.median(error[steady & moe])),
        sources=float(np.mean(by_source)),
    )


def _prior_without(mechanism: Mechanism) -> Calibration:
    start = prior()
    return replace(start, parameters={name: mechanism.parameters(p) for name, p in start.parameters.items()})


def linearized_errors(
    problem: published_runs.FitProblem, start: Calibration, sources: NDArray[np.str_]
) -> NDArray[np.float64]:
    """log(predicted / measured rate) of each row by a fit without its source.

    The fit without a source minimizes the same objective with residuals linear around the fit to all rows.
    """
    whole = published_runs.solve(problem, start, use=np.ones(len(sources), dtype=bool))
    slopes = derivatives(
        log_step_of(problem.tables, start), *published_runs.etas_at(problem, start, whole.beta), names=problem.columns
    )
    J = published_runs.jacobian_of(problem, slopes, len(whole.beta))
    constant = whole.residual - J @ whole.beta
    precision = np.diag(1 / problem.prior_sd**2)
    error = np.zeros(len(sources))
    for source in sorted(set(sources.tolist())):
        use, beta = sources != source, whole.beta
        for _ in range(ITERATIONS):
            weights = published_runs.weights_of(constant + J @ beta, problem, use, published_runs.CAUCHY)
            beta = -np.linalg.solve((J.T * weights) @ J + precision, J.T @ (weights * constant))
        error[~use] = -(constant + J @ beta)[~use]
    return error


def as_markdown(found: Sequence[Ablation]) -> str:
    """The page of the results."""
    lines = [
        "# Ablation of the step model",
        "",
        "Each mechanism is switched off by itself, the calibration fitted again, and every source predicted by a fit "
        "without its rows (linearized, see `meshwright.fitting.ablation`). Absolute errors outside sweeps; sources "
        "with more than 100 rows count with 100.",
        "",
        '<!--- skip: next "takes minutes" -->',
        "```bash",
        "python -m meshwright.fitting.ablation --markdown docs/reference/ablation.md",
        "```",
        "",
        "| without | median | p90 | dense, median | mixtures of experts, median | mean of sources' medians |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for one in found:
        cells = (one.median, one.p90, one.dense, one.moe, one.sources)
        lines.append(f"| {one.name} | " + " | ".join(f"{100 * x:.1f} %" for x in cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure all mechanisms and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="page to write; the default prints it")
    arguments = parser.parse_args()
    runs = [run for run in read_runs(measured_runs_path()) if run.reason is None]
    found = []
    for mechanism in MECHANISMS:
        found.append(measure(mechanism, runs))
        print(f"without {mechanism.name}: {found[-1].median:.3f}", file=sys.stderr)
    page = as_markdown(found)
    if arguments.markdown is None:
        print(page)
    else:
        write_atomically(arguments.markdown, page)


if __name__ == "__main__":
    main()
