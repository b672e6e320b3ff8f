"""`meshwright.export` and `meshwright.import_run`: a run as the configuration of another engine, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import runs
from meshwright.api.question import AnyPath, PathOrText, PlainText, Unchecked, answered_by_body, question
from meshwright.api.runs import EngineName, Overrides, RunSource

if TYPE_CHECKING:
    from meshwright.answers.run_export import RunExport
    from meshwright.answers.run_import import RunImport
    from meshwright.answers.run_survey import ConfigurationSurvey

CLUSTER = Unchecked(
    "Cluster to run on, such as h100-8x64 (64 nodes of 8 devices); configurations do not name one.", metavar="CLUSTER"
)
IGNORE = PlainText("Leave out this setting, which the engine's configurations do not have.", metavar="KEY")


@question("meshwright.answers.run_export:export_run", is_about_run=True)
def export(
    run: Annotated[RunSource, runs.RUN],
    *,
    folder: Annotated[
        str | os.PathLike[str], AnyPath("New or empty folder for the files.", flag="--out", is_file=False)
    ],
    engine: Annotated[str | None, EngineName("Engine to write for.", unset="the run file's")] = None,
    overrides: Annotated[Overrides, runs.OVERRIDES] = (),
) -> RunExport:
    """Write a run as the configuration of an engine, which need not be installed.

    If the run leaves its plan open, the planner's best plan is written.

    Returns:
        The files, the command that starts them on every host, the memory of the plan, and notes.

    Raises:
        InputError: an argument is wrong, the engine cannot do something of the run, or the folder is not empty.
        InfeasibleError: no plan is possible.

    Example:
        >>> import meshwright as mw
        >>> done = mw.export("llama3-8b", engine="torchtitan", folder="titan")  # doctest: +SKIP
        >>> done.command  # doctest: +SKIP
        'torchrun --nproc-per-node=8 -m meshwright.engines.torchtitan.worker titan/meshwright_run.py'
    """
    return answered_by_body()


@question("meshwright.answers.run_import:import_configuration")
def import_run(
    source: Annotated[
        str | os.PathLike[str],
        PathOrText("Configuration of another program: a file, with settings behind it, or a name.", metavar="CONFIG"),
    ],
    *,
    engine: Annotated[str | None, EngineName("Engine of the configuration.", unset="by its content")] = None,
    cluster: Annotated[str | Mapping[str, Any], CLUSTER],
    accelerator: Annotated[str | os.PathLike[str] | None, runs.ACCELERATOR] = None,
    network: Annotated[str | None, runs.NETWORK] = None,
    device_memory: Annotated[str | None, runs.DEVICE_MEMORY] = None,
    ignore: Annotated[Sequence[str], IGNORE] = (),
    file: Annotated[
        str | os.PathLike[str] | None,
        AnyPath("Write the run file there.", flag="--out", metavar="RUN.yaml", is_folder=False, unset="no file"),
    ] = None,
) -> RunImport:
    """Read the configuration of another engine as a run file.

    Every setting that a run file cannot express is refused or noted.

    Returns:
        The run, its file as text, the memory of its plan, and notes.

    Raises:
        InputError: an argument is wrong, or the configuration cannot be read.
        MissingDependencyError: the engine must be installed to read it.

    Example:
        >>> import meshwright as mw
        >>> found = mw.import_run("llama3_8b.toml", cluster="h100-8x1")  # doctest: +SKIP
        >>> found.run.model.num_layers, found.notes  # doctest: +SKIP
    """
    return answered_by_body()


@question("meshwright.answers.run_survey:survey")
def survey_configurations(
    folder: Annotated[str | os.PathLike[str], AnyPath("Folder to search.", is_file=False)],
    *,
    cluster: Annotated[str | None, CLUSTER] = None,
    ignore: Annotated[Sequence[str], IGNORE] = (),
) -> ConfigurationSurvey:
    """Say what `import_run` reads of every configuration below a folder. Nothing of the folder is executed.

    Files are recognised by their content. Without a cluster, each file is read on 512 H100s, else on the first number
    of nodes that its degrees fill.

    Returns:
        Every configuration with its project, its status and all reasons.

    Raises:
        InputError: an argument is wrong.

    Example:
        >>> import meshwright as mw
        >>> mw.survey_configurations("torchtitan").counts  # doctest: +SKIP
    """
    return answered_by_body()
