"""MaxText's own Python environment, created by one command and found by every training.

    python -m meshwright.engines.maxtext.environment [--python PATH] [--jax EXTRA] [DIR]

MaxText needs Python 3.12 and JAX, which the environment of Meshwright need not have. The packages are those that
training imports, without TensorFlow and PyTorch (1.6 GB on disk for a CPU). The environment is complete when its marker
file has been written; the same command continues an interrupted installation. The folder is the argument, else
$MESHWRIGHT_MAXTEXT, else `maxtext-VERSION` in Meshwright's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright import interpreters
from meshwright.engines.maxtext import VERSION
from meshwright.errors import MeshwrightError, MissingDependencyError
from meshwright.files import default_cache, write_atomically
from meshwright.interpreters import PythonCandidate
from meshwright.json_values import load_json

OLDEST_PYTHON = (3, 12)
VARIABLE = "MESHWRIGHT_MAXTEXT"
MARK = "meshwright.json"
COMMAND = "python -m meshwright.engines.maxtext.environment"
PACKAGES = (
    f"maxtext=={VERSION}", "flax>=0.12.9", "optax", "orbax-checkpoint>=0.12.4", "grain>=0.2.18", "aqtp", "chex",
    "cloudpickle", "datasets", "drjax>=0.2.1", "jinja2", "jsonlines", "ml_collections", "omegaconf", "pathwaysutils",
    "pillow", "psutil", "pydantic", "qwix", "safetensors", "sentencepiece", "sympy", "tabulate", "tiktoken",
    "tokamax", "transformers>=5.17",
)  # fmt: skip
"""MaxText has dependencies only in extras, which include TensorFlow; lower bounds are those of its extras."""
JAX = ">=0.11.1"


def default_folder() -> Path:
    """Return the folder of the environment if none is given."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else default_cache() / f"maxtext-{VERSION}"


def find(folder: Path | None = None) -> Path | None:
    """Return the interpreter of the environment; None: it does not exist or is incomplete."""
    folder = default_folder() if folder is None else folder
    try:
        made = load_json(folder / MARK)
    except (OSError, ValueError):
        return None
    python = _interpreter(folder)
    return python if made.get("maxtext") == VERSION and python.exists() else None


def require() -> Path:
    """Return the interpreter of the environment. Raises MissingDependencyError with the command that creates it."""
    python = find()
    if python is None:
        raise MissingDependencyError(
            f"MaxText {VERSION} needs an environment of its own, and there is none in {default_folder()}", hint=COMMAND
        )
    return python


def _interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def search_python(given: str | None = None) -> list[PythonCandidate]:
    """Search for a Python that MaxText runs on."""
    return interpreters.search_python(oldest=OLDEST_PYTHON, given=given)


def choose_python(given: str | None = None) -> Path:
    """Return a Python that MaxText runs on. Raises MissingDependencyError with the searched locations."""
    candidates = search_python(given)
    if candidates[-1].python is not None:
        return candidates[-1].python
    oldest = ".".join(map(str, OLDEST_PYTHON))
    searched = "; ".join(f"{one.location}: {one.found}" for one in candidates)
    raise MissingDependencyError(
        f"MaxText {VERSION} needs Python {oldest} or newer, and none was found: {searched}",
        hint=f"install one, for example with `uv python install {oldest}` or `pyenv install {oldest}`, "
        f"or name it: {COMMAND} --python PATH",
    )


def create(folder: Path, *, python: str | None = None, jax: str | None = None) -> Path:
    """Create the environment in `folder`, or continue an interrupted installation; return its interpreter.

    `jax` is an extra of the JAX package: `cuda12`, `cuda13`. Only one process creates it; others wait. Raises
    MissingDependencyError if no Python is suitable, MeshwrightError when an installation fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        existing = find(folder)
        if existing is not None:
            return existing
        interpreter = _interpreter(folder)
        if interpreters.output_of([str(interpreter), "-m", "pip", "--version"]) is None:
            shutil.rmtree(folder, ignore_errors=True)  # interrupted before pip worked
            _run([str(choose_python(python)), "-m", "venv", str(folder)])
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "--upgrade", "pip"])  # older versions choose packages that must be compiled
        extra = f"[{jax}]" if jax else ""
        _run([*install, f"jax{extra}{JAX}", *PACKAGES])
        _run([str(interpreter), "-c", "import maxtext.trainers.pre_train.train"])
        about = {"maxtext": VERSION, "jax_extra": jax, "packages": PACKAGES}
        write_atomically(folder / MARK, json.dumps(about, indent=1) + "\n")
        return interpreter


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdout=sys.stderr, env=os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    )
    if done.returncode:
        raise MeshwrightError(
            f"`{' '.join(command[:6])} ...` ended with exit code {done.returncode}",
            hint="run the command again: it continues where it stopped",
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    import fcntl  # absent on Windows, where Meshwright plans and exports

    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"default: {default_folder()}")
    parser.add_argument("--python", metavar="PATH", help="a Python 3.12 or newer; default: the first that is found")
    parser.add_argument("--jax", metavar="EXTRA", help="of the JAX package, for accelerators: cuda12, cuda13")
    given = parser.parse_args()
    folder = (given.folder or default_folder()).expanduser().absolute()
    try:
        python = create(folder, python=given.python, jax=given.jax)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(python)
    if given.folder is not None and folder != default_folder().absolute():
        print(f"trainings find it with {VARIABLE}={folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
