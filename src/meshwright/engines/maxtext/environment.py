"""MaxText's own Python environment, made by one command and found again by every training.

    python -m meshwright.engines.maxtext.environment [--python PATH] [--jax EXTRA] [DIR]

MaxText needs Python 3.12 and JAX, which the environment of Meshwright need not have. The packages are what training
imports, without TensorFlow and PyTorch (1.6 GB on disk for a CPU). The folder counts as made when its mark is written,
as the last thing: a command that was stopped is given again and goes on. Where it is: the argument, else
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
from dataclasses import dataclass
from pathlib import Path

from meshwright.engines.maxtext import VERSION
from meshwright.errors import MeshwrightError, MissingDependencyError
from meshwright.files import default_cache, write_atomically

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
"""MaxText names no dependencies but in extras, which bring TensorFlow; lower bounds are those of its extras."""
JAX = ">=0.11.1"
ASK = "import sys; print(*sys.version_info[:3]); import ensurepip, venv"


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One place where a Python was looked for, and what was there."""

    place: str
    found: str
    python: Path | None = None  # one that will do


def default_folder() -> Path:
    """Where the environment is unless a folder is named."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else default_cache() / f"maxtext-{VERSION}"


def find(folder: Path | None = None) -> Path | None:
    """The interpreter of the environment; None: it was not made, or not to its end."""
    folder = default_folder() if folder is None else folder
    try:
        made = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    python = _interpreter(folder)
    return python if made.get("maxtext") == VERSION and python.exists() else None


def require() -> Path:
    """The interpreter of the environment. Raises MissingDependencyError with the command that makes it."""
    python = find()
    if python is None:
        raise MissingDependencyError(
            f"MaxText {VERSION} lives in an environment of its own, and there is none in {default_folder()}",
            hint=COMMAND,
        )
    return python


def _interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def look_for_python(given: str | None = None) -> list[Looked]:
    """Every place where a Python may be, in order, up to the first that will do. Each is tried by running it."""
    looked = []
    for place, command in _places(given):
        looked.append(_try(place, command))
        if looked[-1].python:
            break
    return looked


def _places(given: str | None) -> Iterator[tuple[str, str | None]]:
    if given is not None:
        yield f"--python {given}", given
        return
    yield "this Python", sys.executable
    for minor in (12, 13):
        name = f"python3.{minor}"
        yield f"{name} on PATH", shutil.which(name)
    root = _output(["pyenv", "root"])
    if root is None:
        yield "pyenv", None
    else:
        versions = sorted(Path(root, "versions").glob("3.1[2-9]*"))
        if not versions:
            yield f"pyenv's versions in {root}", None
        for version in versions:
            yield f"pyenv's {version.name}", str(version / "bin" / "python")
    yield "uv", _output(["uv", "python", "find", ">=3.12"])


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _try(place: str, command: str | None) -> Looked:
    if command is None:
        return Looked(place=place, found="not there")
    printed = _output([command, "-c", ASK])
    if printed is None:
        return Looked(place=place, found=f"{command} does not run, or lacks venv")
    version = tuple(map(int, printed.split()))
    words = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Looked(place=place, found=f"Python {words}")
    return Looked(place=place, found=f"Python {words}", python=Path(command))


def choose_python(given: str | None = None) -> Path:
    """A Python that MaxText runs on. Raises MissingDependencyError, which says where it was looked for."""
    looked = look_for_python(given)
    if looked[-1].python is not None:
        return looked[-1].python
    wanted = ".".join(map(str, OLDEST_PYTHON))
    words = "; ".join(f"{one.place}: {one.found}" for one in looked)
    raise MissingDependencyError(
        f"MaxText {VERSION} needs Python {wanted} or newer, and none was found: {words}",
        hint=f"install one, for example with `uv python install {wanted}` or `pyenv install {wanted}`, "
        f"or name it: {COMMAND} --python PATH",
    )


def create(folder: Path, *, python: str | None = None, jax: str | None = None) -> Path:
    """Make the environment in `folder`, or finish one that was begun; return its interpreter.

    `jax` is an extra of the JAX package: `cuda12`, `cuda13`. Only one process makes it; others wait. Raises
    MissingDependencyError where no Python will do, MeshwrightError when an installation fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        made = find(folder)
        if made is not None:
            return made
        interpreter = _interpreter(folder)
        if _output([str(interpreter), "-m", "pip", "--version"]) is None:
            shutil.rmtree(folder, ignore_errors=True)  # what was begun without a working pip
            _run([str(choose_python(python)), "-m", "venv", str(folder)])
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "--upgrade", "pip"])  # older ones choose packages that must be compiled
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
            hint="the command goes on where it was when it is given again",
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    import fcntl  # absent on Windows, where runs are planned and exported

    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"default: {default_folder()}")
    parser.add_argument(
        "--python", metavar="PATH", help="a Python 3.12 or newer; default: the first that is found"
    )
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
