"""`meshwright import`: another engine's configuration as a run file."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from meshwright.cli.options import EngineChoice, json_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.engines.base import ImportingEngine


@verb(
    "import",
    examples=[
        "meshwright import llama3_8b.toml --cluster h100-8x1 --out run.yaml",
        "meshwright import llama3:llama3_8b --cluster h100-8x1 --out run.yaml",
        "meshwright import titan/meshwright_run.py --cluster h100-8x8",
        'meshwright import "train.sh --vocab-size 32000" --cluster h100-8x8',
        "meshwright import run_config.yaml --cluster h100-8x8",
    ],
)
@click.argument("source", metavar="CONFIG")
@click.option(
    "--engine", "engine_name", type=EngineChoice(),
    help="Whose configuration it is.  [default: as the name says]",
)  # fmt: skip
@click.option("--cluster", required=True, metavar="CLUSTER", help="Where it runs: configurations do not say.")
@click.option(
    "--out", "out", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml",
    help="Write the run file there instead of to stdout.",
)  # fmt: skip
@json_option
def command(source: str, engine_name: str | None, cluster: str, out: Path | None, as_json: bool) -> None:
    """Read an engine's own configuration and write the run file that says the same.

    Of torchtitan: MODULE:FUNCTION of a configuration module (`llama3:llama3_8b`, `path/to/module.py:train`), which is
    evaluated in a process of its own where torchtitan is installed; the JSON tree that this process prints; or a TOML
    file of its versions up to 0.2. Of MaxText: a YAML file, with settings behind it as one argument
    (`"llama3_8b.yml steps=10"`). Of Megatron-LM: a shell script that calls pretrain_gpt.py, a file of its arguments
    (NAME.args), or the YAML of its tests, with options behind it (`"train.sh TP=4 --vocab-size 32000"`). Of
    Megatron-Bridge: the YAML of its configurations, as in its checkpoints, with overrides in files and behind it
    (`"run_config.yaml more.yaml train.train_iters=100"`).

    What a run file cannot say is refused or noted, setting by setting, and so is what `estimate` and the engine have
    against the run: a batch that does not divide, a plan that does not fit, a flag that contradicts another.
    """
    from ruamel.yaml import YAML

    from meshwright import runfile
    from meshwright.cli.export import lint
    from meshwright.cli.output import emit_json, note
    from meshwright.engines.base import find_engine
    from meshwright.files import write_atomically

    name = engine_name or _engine_of(source)
    engine = find_engine(name)
    if not hasattr(engine, "import_run"):
        raise InputError("configurations of this engine are not read", got=name)
    found = cast("ImportingEngine", engine).import_run(source, cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    text = f"# From {source}, a configuration of {name}\n{stream.getvalue()}"
    run = runfile.loads(text, file=str(out or Path(source).with_suffix(".yaml")))
    refusals = [f"the {name} engine: {problem}" for problem in engine.check(run)]
    notes = [*found.notes, *refusals, *lint(run)]
    if out is not None:
        try:
            write_atomically(out, text)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    if as_json:
        emit_json({"run": found.content, "notes": notes, "file": out})
        return
    if out is None:
        print(text, end="")
    for words in notes:
        note(words)


def _engine_of(source: str) -> str:
    """Whose configuration `source` is, by its name: a file's ending, or MODULE:FUNCTION."""
    from meshwright.catalog.engines import engine_names
    from meshwright.planner.engines import engine_facts

    named = {name: engine_facts(name).configurations for name in engine_names()}
    source = source.partition(" ")[0]  # settings may stand behind it
    path, colon, function = source.rpartition(":")
    ending = Path(path if colon and function.isidentifier() else source).suffix
    claimed = [
        [name for name, endings in named.items() if mark in endings] for mark in (ending, colon) if mark
    ]
    owners = next((names for names in claimed if names), [])
    if len(owners) == 1:
        return owners[0]
    allowed = [mark for endings in named.values() for mark in endings if mark != ":"]
    raise InputError(
        "whose configuration this is cannot be told by its name",
        got=source,
        allowed=", ".join(owners) or f"MODULE:FUNCTION, or a name that ends with {', '.join(allowed)}",
        hint="say it with --engine",
    )
