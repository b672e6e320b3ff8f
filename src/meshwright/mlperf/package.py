"""Submission folders: ORG/systems, ORG/benchmarks, ORG/results. The same inputs give the same tree.

The tree is built next to its place and renamed into it, so an interrupted command leaves the old one. The
official package checker runs on a copy, because it writes into the folder that it checks.
"""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import STALE_S, swap_names, sync, sync_tree
from meshwright.json_values import load_json
from meshwright.mlperf.check_system import description_problems
from meshwright.mlperf.log import read_log
from meshwright.mlperf.official import PACKAGE, ask, package_version
from meshwright.mlperf.score import Score, score_folder
from meshwright.programs import install_command
from meshwright.result import Result

LARGEST_BYTES = 50 * 1024 * 1024  # repo_checker.py: no larger file
_NAME = re.compile(r"[A-Za-z0-9_+=@,()\[\]-][A-Za-z0-9_.+=@,()\[\]-]*")
_IGNORED = shutil.ignore_patterns(".git", "__pycache__", "*.pyc")


@dataclass(frozen=True, kw_only=True)
class PackageCheck:
    """Outcome of the official package checker; `not_run` says why there is none.

    It checks the system description of one's own benchmarks and skips the results. The official compliance
    checker, under their own rule set, and the official seed checker check the results. `not_checked` lists
    the results that no official checker covers.
    """

    passes: bool | None
    messages: tuple[str, ...] = ()
    not_run: str = ""
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SubmissionPackage(Result):
    """A written submission folder.

    Attributes:
        folder: its path.
        changed: False if the folder held the same tree already.
        notes: points that a reviewer would ask about.
        scores: one for each set.
        files: all files, relative to the folder.
        check: outcome of the official package checker.
    """

    folder: Path
    changed: bool
    notes: tuple[str, ...]
    scores: tuple[Score, ...]
    files: tuple[str, ...]
    check: PackageCheck

    def to_dict(self) -> dict[str, Any]:
        sets = [
            {
                "benchmark": s.benchmark.name, "score_min": s.score_min, "rcp_scaling": s.test.scaling,
                "passes": s.passes,
            }
            for s in self.scores
        ]  # fmt: skip
        official = {
            "passes": self.check.passes, "messages": list(self.check.messages),
            "not_run": self.check.not_run or None, "not_checked": list(self.check.not_checked),
        }  # fmt: skip
        return {
            "folder": str(self.folder), "changed": self.changed, "passes": self.passes, "files": list(self.files),
            "benchmarks": sets, "official": official, "notes": list(self.notes),
        }  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each file."""
        return [{"file": name, "size_bytes": (self.folder / name).stat().st_size} for name in self.files]

    def summary(self) -> str:
        """Return folder, number of files and verdict."""
        return f"{self.folder}: {len(self.files)} files, {'passes' if self.passes else 'does not pass'}"

    @property
    def passes(self) -> bool:
        """Return True if every set is a result and the official package checker found no error."""
        return all(score.passes for score in self.scores) and self.check.passes is not False


def write_package(
    paths: Sequence[Path],
    *,
    out: Path,
    org: str,
    system: Path,
    code: Path,
    round_name: str | None = None,
    benchmarks: Sequence[Path] = (),
) -> SubmissionPackage:
    """Build `out/ORG` from folders of result files, a system description and the code. Raises InputError."""
    scores = tuple(score_folder(folder, round=round_name, folders=benchmarks) for folder in paths)
    try:
        values = load_json(system)
    except (OSError, ValueError) as error:
        raise InputError(f"{system}: system description cannot be read: {error}") from error
    description = values if isinstance(values, dict) else {}
    _check_inputs(scores, org=org, system=system, code=code, description=description)
    out.mkdir(parents=True, exist_ok=True)
    final = out / org
    for left in out.glob(f".{org}.*"):  # of a killed command
        if time.time() - left.stat().st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=f".{org}.", dir=out))
    try:
        tree = building / org
        if final.exists():
            shutil.copytree(final, tree, symlinks=True)
        _fill(tree, scores, system=system, code=code)
        files = tuple(sorted(str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()))
        changed = not (final.exists() and _same(final, tree))
        check = _official(tree, scores)
        if changed:
            sync_tree(tree)
            if not (final.exists() and swap_names(tree, final)):
                if final.exists():
                    final.rename(building / "old")
                tree.rename(final)
            sync(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return SubmissionPackage(
        folder=final, changed=changed, notes=_other_organizations(scores, org), scores=scores, files=files, check=check
    )  # fmt: skip


def _other_organizations(scores: Sequence[Score], org: str) -> tuple[str, ...]:
    """Return a note for each set whose logs name another organization than the submitter."""
    notes = []
    for score in scores:
        named = {read_log(score.folder / run.name).value("submission_org") for run in score.scored} - {org}
        if named:
            others = ", ".join(sorted(f"{name!r:.60}" for name in named))
            notes.append(f"{score.folder}: submission_org of the logs is {others}, the submitter is {org!r}")
    return tuple(notes)


def _check_inputs(scores: Sequence[Score], *, org: str, system: Path, code: Path, description: dict[str, Any]) -> None:
    """Raise InputError with all that no reviewer would accept."""
    problems = [f"{system}: {problem}" for problem in description_problems(description)]
    if description.get("submitter") not in (None, "", org):
        problems.append(f"{system}: submitter is {description['submitter']!r:.60}, not {org!r}")
    if not code.is_dir():
        problems.append(f"{code}: no folder of code")
    else:
        problems += _file_problems(code)
    for name in (org, system.stem):
        if not _NAME.fullmatch(name):
            problems.append(f"{name!r}: names hold no spaces or slashes and begin with no dot")
    rounds = {score.benchmark.round for score in scores}
    if len(rounds) > 1:
        problems.append(f"results of several rounds: {', '.join(sorted(rounds))}")
    names = [score.benchmark.name for score in scores]
    problems += [f"two folders hold results of {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    if len({score.benchmark.official for score in scores}) > 1:
        problems.append("benchmarks of MLPerf and others do not go into one submission")
    problems += [
        f"{score.folder}: {len(score.runs)} of {score.benchmark.runs} runs"
        for score in scores
        if len(score.runs) < score.benchmark.runs
    ]
    if problems:
        raise InputError("the submission cannot be built:\n  " + "\n  ".join(problems))


def _file_problems(code: Path) -> list[str]:
    problems = []
    for path in sorted(code.rglob("*")):
        relative = path.relative_to(code)
        if any(part in (".git", "__pycache__") for part in relative.parts):
            continue
        if " " in path.name or path.name.startswith("."):
            problems.append(f"{path}: the repository checker allows no space and no leading dot")
        elif path.is_symlink() and not path.exists():
            problems.append(f"{path}: broken link")
        elif path.is_file() and path.stat().st_size > LARGEST_BYTES:
            problems.append(f"{path}: larger than 50 MiB")
    return problems


def _fill(tree: Path, scores: Sequence[Score], *, system: Path, code: Path) -> None:
    (tree / "systems").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(system, tree / "systems" / f"{system.stem}.json")
    for score in scores:
        name = score.benchmark.name
        implementation = tree / "benchmarks" / name / "implementations" / system.stem
        shutil.rmtree(implementation, ignore_errors=True)
        shutil.copytree(code, implementation, ignore=_IGNORED)
        folder = tree / "results" / system.stem / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, run in enumerate(score.scored):
            shutil.copyfile(score.folder / run.name, folder / f"result_{number}.txt")
        if score.test.scaling > 1.0:
            (folder / "scaling.json").write_text(json.dumps({"scaling_factor": score.test.scaling}))


def _same(one: Path, other: Path) -> bool:
    """Compare two trees by their files' contents."""
    seen = [sorted(str(p.relative_to(root)) for p in root.rglob("*")) for root in (one, other)]
    if seen[0] != seen[1]:
        return False
    files = [name for name in seen[0] if (one / name).is_file()]
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in files)


def _official(tree: Path, scores: Sequence[Score]) -> PackageCheck:
    """Run the official package checker on a copy of the tree."""
    if package_version() is None:
        return PackageCheck(passes=None, not_run=f"{PACKAGE} is not installed: {install_command('mlperf')}")
    own = [score.benchmark for score in scores if not score.benchmark.official]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / tree.name
        shutil.copytree(tree, copy)
        request = {
            "action": "package", "folder": str(copy), "ruleset": scores[0].benchmark.rules.ruleset,
            "own": {rules.name: rules.ruleset_file and str(rules.ruleset_file.absolute()) for rules in own},
        }  # fmt: skip
        answer = ask(request)
    if "error" in answer:
        return PackageCheck(passes=False, messages=(answer["error"],))
    not_checked = [f"{rules.name}: convergence (the checks of this package tested it)" for rules in own]
    not_checked += [f"{rules.name}: result files, it has no rule set" for rules in own if rules.ruleset_file is None]
    return PackageCheck(
        passes=bool(answer["passes"]), messages=tuple(answer["messages"]), not_checked=tuple(not_checked)
    )
