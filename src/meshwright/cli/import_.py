"""`meshwright import`: another engine's configuration as a run file."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import click

from meshwright.cli.options import json_option, verb
from meshwright.errors import InputError


@verb("import", examples=["meshwright import llama3_8b.toml --cluster h100-8x1 --out run.yaml"])
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--cluster", required=True, metavar="CLUSTER", help="Where it runs: configurations do not say.")
@click.option(
    "--out", "out", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml",
    help="Write the run file there instead of to stdout.",
)  # fmt: skip
@json_option
def command(path: Path, cluster: str, out: Path | None, as_json: bool) -> None:
    """Read a TOML file of torchtitan (up to 0.2) and write the run file that says the same.

    What a run file cannot say is refused or noted, key by key, and so is what `estimate` and the engine have against
    the run: a batch that does not divide, a plan that does not fit, a plan that torchtitan 0.3.0 no longer takes.
    """
    from ruamel.yaml import YAML

    from meshwright import runfile
    from meshwright.cli.export import lint
    from meshwright.cli.output import emit_json, note
    from meshwright.engines.base import find_engine
    from meshwright.engines.torchtitan.importing import import_toml
    from meshwright.files import write_atomically

    if path.suffix != ".toml":
        raise InputError(
            "only torchtitan's TOML files are read",
            got=str(path),
            hint="its configuration modules are programs",
        )
    found = import_toml(path, cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    text = f"# From {path.name}, a configuration of torchtitan\n{stream.getvalue()}"
    run = runfile.loads(text, file=str(out or path.with_suffix(".yaml")))
    refusals = [f"torchtitan 0.3.0: {problem}" for problem in find_engine("torchtitan").check(run)]
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
