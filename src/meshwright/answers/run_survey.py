"""Every configuration below a folder: what `import` reads of it, and what it refuses."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.answers.run_import import import_configuration
from meshwright.answers.text_table import TextTable
from meshwright.engines.recognition import Recognised, configurations_below
from meshwright.errors import InputError, MeshwrightError
from meshwright.result import Result

_NODES = sorted(size << power for power in range(11) for size in (1, 3, 5, 7, 9))
CLUSTERS = (*(f"h100-8x{nodes}" for nodes in dict.fromkeys((64, *_NODES))), "h100-4x1", "h100-2x1", "h100-1x1")
"""Clusters that a file is read on where none is given: the first that its degrees fill."""
CLUSTER_OF_HINT = re.compile(r"hint: --cluster (\S+)")
"""The cluster that a refusal names: what is refused there is the reason, and not its size."""
NOT_OF_CLUSTERS = 4
"""Clusters, of 64, 1, 2 and 3 nodes, on all of which the same reason refuses a file on any."""


class ImportStatus(StrEnum):
    """Result of `import` for a file."""

    READ = "read"
    NOTED = "read with notes"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class SurveyedFile:
    """One configuration.

    Attributes:
        path: the file, relative to the folder; FILE:FUNCTION for a function of a module.
        project: the project that reads it.
        status: what `import` makes of it.
        reasons: notes, or the reason of the refusal with its hint.
        cluster: the cluster that it was read on; None where it is not read.
    """

    path: Path
    project: str
    status: ImportStatus
    reasons: tuple[str, ...]
    cluster: str | None

    @property
    def about(self) -> dict[str, str]:
        """File, project and status."""
        return {"file": str(self.path), "project": self.project, "status": str(self.status)}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConfigurationSurvey(Result):
    """Results of `import` for the configurations below a folder.

    Attributes:
        folder: the folder.
        files: its configurations in the order of their paths.
    """

    folder: Path
    files: tuple[SurveyedFile, ...]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Files by project and status."""
        counted = Counter((file.project, file.status) for file in self.files)
        projects = sorted({project for project, _ in counted})
        return {name: {str(status): counted[name, status] for status in ImportStatus} for name in projects}

    def to_dict(self) -> dict[str, Any]:
        files = [{**file.about, "cluster": file.cluster, "reasons": list(file.reasons)} for file in self.files]
        return {"folder": str(self.folder), "counts": self.counts, "files": files}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each file, with the first reason."""
        return [{**f.about, "first_reason": next(iter(f.reasons), "").partition("\n")[0]} for f in self.files]

    def tables(self) -> list[TextTable]:
        """Return the files, and their counts by project."""
        text = ("file", "project", "import", "first reason")
        counts = [(project, *found.values()) for project, found in self.counts.items()]
        return [
            TextTable(title="", headings=text, text_columns=text, rows=[(*row.values(),) for row in self.to_rows()]),
            TextTable(title="", headings=("project", *ImportStatus), rows=counts),
        ]

    def summary(self) -> str:
        """Return the numbers of configurations, and of those that are read."""
        read = sum(file.status in (ImportStatus.READ, ImportStatus.NOTED) for file in self.files)
        return f"{self.folder}: {len(self.files)} configurations, {read} read"


def survey(folder: Path, *, cluster: str | None, ignore: Sequence[str] = ()) -> ConfigurationSurvey:
    """Return what `import` reads of every configuration below `folder`. Executes nothing of it.

    Raises InputError if there is no such folder.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", got=str(folder))
    clusters = CLUSTERS if cluster is None else (cluster,)
    return ConfigurationSurvey(
        folder=folder,
        files=tuple(
            _surveyed(Path(one), found, folder=folder, clusters=clusters, ignore=ignore)
            for path, found in configurations_below(folder)
            for one in ([f"{path}:{name}" for name in found.functions] or [path])
        ),
    )


def _surveyed(
    path: Path, found: Recognised, *, folder: Path, clusters: Sequence[str], ignore: Sequence[str]
) -> SurveyedFile:
    name = path.relative_to(folder)
    reasons: tuple[str, ...] = ()
    num_equal = 0
    source = str(path) if found.engine == "torchtitan" else shlex.quote(str(path))  # others split it as a shell does
    queue = [*clusters]
    for cluster in queue:
        try:
            read = import_configuration(source, engine=found.engine, cluster=cluster, ignore=ignore)
        except MeshwrightError as error:
            found_here = tuple(filter(None, (error.message, error.hint and f"hint: {error.hint}")))
            named = CLUSTER_OF_HINT.search(" ".join(reasons))
            reasons = found_here if not reasons or (named and named[1] == cluster) else reasons
            num_equal += found_here == reasons
            named = CLUSTER_OF_HINT.search(" ".join(found_here))
            queue += [named[1]] if named and len(clusters) > 1 and named[1] not in queue else []
            if num_equal == NOT_OF_CLUSTERS:
                break
        except Exception as error:  # one file that breaks a reader does not end the survey
            reasons = reasons or (f"{type(error).__name__} in the reader: {error}",)
        else:
            status = ImportStatus.NOTED if read.notes else ImportStatus.READ
            return SurveyedFile(path=name, project=found.project, status=status, reasons=read.notes, cluster=cluster)
    return SurveyedFile(path=name, project=found.project, status=ImportStatus.REFUSED, reasons=reasons, cluster=None)
