"""Collect what a machine without a network lacks to run Meshwright: wheels, an installer and a check of all imports.

    python scripts/bundle.py FOLDER --have have.json [--python 3.12] [--extras kernels,liger] [--also NAME ...]
        [--glibc 2.28] [--machine x86_64] [--leave-out NAME ...] [--max-mib 40]

    --have        what the target has: the output of `python3 -m pip list --format=json` there
    --python      its Python  [default: that of this program]
    --extras      extras of Meshwright to take along
    --also        further packages, as pip's requirements: pytest sybil
    --glibc       its C library: the first line of `ldd --version` there ends with it  [default: 2.28]
    --machine     its processor: what `uname -m` prints there  [default: x86_64]
    --leave-out   packages to leave behind; nothing that needs them can run
    --max-mib     most MiB of all wheels; figures are left out first, and what is still too large is said

FOLDER gets `wheels/`, `install.sh`, `check.py` and `bundle.json`, which has each package with its size, its hash and
what needs it. On the target:

    sh install.sh site && export PYTHONPATH=$PWD/site && python3 check.py

pip resolves against what the target has: a package that is there and new enough stays behind, PyTorch, Triton and their
libraries stay as they are, and a conflict with them is an error. This needs an interpreter of the target's Python here,
on Linux, as requirements depend on both.

Exit code 0: the bundle is complete; 1: it is larger than --max-mib, or its requirements conflict; 2: bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.interpreters import PythonVersion, search_python

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST_PYTHON = int(PROJECT["requires-python"].rpartition(".")[2])
"""Minor version of the oldest Python that Meshwright runs with."""
KEPT = re.compile(r"torch|torchvision|torchaudio|triton|pytorch-triton.*|nvidia-.*|cuda-.*|.*rocm.*")
"""Packages of the target that a bundle never replaces: they fit its driver and each other."""
DRAWS = "vl-convert-python"
"""Draws figures. Without it every command works, and a page says which figures are left out."""
OLDEST_GLIBC, NEWEST_GLIBC = 5, 60
"""Minor versions of the oldest C library that wheels are built for, manylinux1's, and of one yet to come."""
MACHINES = ("x86_64", "aarch64")
OLDER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
NAME = re.compile(r"[\w.-]*\w", re.ASCII)
EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)""")
MIB = 2**20

INSTALL = """#!/bin/sh
# Installs this bundle into a folder of its own. Nothing that is installed changes.
#     sh install.sh [FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-site}
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --upgrade \\
    --target "$folder" "$here"/wheels/*.whl
folder=$(cd "$folder" && pwd)
echo "installed into $folder; next:"
echo "    export PYTHONPATH='$folder' && '$python' '$here/check.py'"
"""

CHECK = '''"""Import all of Meshwright and compare the installed versions with those of the bundle.

Exit code 0: all is there; 1: something is missing or has another version.
"""

import importlib
import importlib.util
import json
import os
import pkgutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "0")
bundle = json.loads((Path(__file__).resolve().parent / "bundle.json").read_text(encoding="utf-8"))
faults = []
for package in bundle["packages"]:
    try:
        found = version(package["name"])
    except PackageNotFoundError:
        found = "nothing"
    if found != package["version"]:
        faults.append(f"{package['name']}: {found} is imported, {package['version']} is in the bundle")
for name, wanted in bundle["kept"].items():
    try:
        found = version(name)
    except PackageNotFoundError:
        continue  # another machine than the bundle was made for may have other libraries
    if found.partition("+")[0] != wanted.partition("+")[0]:
        faults.append(f"{name}: {found} is here, the bundle was made for {wanted}")

try:
    import meshwright
except ModuleNotFoundError:
    sys.exit("error: there is no meshwright on the path: export PYTHONPATH=FOLDER with the folder of install.sh")


def is_of_other_programs(name):
    """Modules for processes of programs that run in environments of their own."""
    return any(part.startswith("in_") for part in name.split("."))

imported, absent = 0, {}
for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.", onerror=lambda name: None):
    if is_of_other_programs(module.name):
        continue
    try:
        importlib.import_module(module.name)
        imported += 1
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "meshwright" or missing.replace("_", "-") in bundle["needed"]:
            faults.append(f"{module.name}: {error}")
        else:
            absent.setdefault(missing, []).append(module.name)
    except Exception as error:
        faults.append(f"{module.name}: {type(error).__name__}: {error}")

print(f"imported {imported} modules of Meshwright {version('meshwright')} with Python {sys.version.split()[0]}")
for missing, modules in sorted(absent.items()):
    print(f"not imported, as the extra that has {missing} is not in the bundle: {len(modules)} modules")
for fault in faults:
    print(f"error: {fault}", file=sys.stderr)
sys.exit(1 if faults else 0)
'''


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that the bundle is for."""

    python: PythonVersion
    glibc: int
    """Minor version of its C library: 28 for 2.28."""
    machine: str
    packages: Mapping[str, str]
    """Versions of what it has, by normalized name."""

    @property
    def platforms(self) -> list[str]:
        """Tags of the wheels that run there. pip matches each exactly, so older C libraries are named too."""
        found = []
        for minor in range(self.glibc, OLDEST_GLIBC - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in OLDER_NAMES:
                found.append(f"{OLDER_NAMES[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]

    @property
    def kept(self) -> dict[str, str]:
        """Packages that stay as they are."""
        return {name: version for name, version in self.packages.items() if KEPT.fullmatch(name)}


@dataclass(frozen=True, kw_only=True)
class BundledPackage:
    """A wheel of the bundle."""

    name: str
    version: str
    file: str
    bytes: int
    sha256: str
    needed_by: tuple[str, ...]
    replaces: str | None
    """Version that the target has and that is too old; None if it has none."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Result of a bundle."""

    packages: tuple[BundledPackage, ...]
    """The largest first."""
    left_out: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(package.bytes for package in self.packages)

    def __str__(self) -> str:
        rows = [(p.bytes, f"{p.name} {p.version}{_about(p)}") for p in self.packages]
        rows.append((self.bytes, f"{len(rows)} packages"))
        lines = [f"{size / MIB:8.2f} MiB  {text}" for size, text in rows]
        lines += [
            f"left out: {name}{'; pages say which figures are left out' if name == DRAWS else ''}"
            for name in self.left_out
        ]
        return "\n".join(lines)


class ConflictError(Exception):
    """Requirements conflict with packages of the target, or have no wheel for it."""


def normalized(name: str) -> str:
    """The name of a package as indexes compare it.

    >>> normalized("ruamel.yaml"), normalized("vl_convert_python")
    ('ruamel-yaml', 'vl-convert-python')
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def read_have(path: Path) -> dict[str, str]:
    """Versions by normalized name from the output of `pip list --format=json`. Raises InputError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"--have: cannot read {path}: {error}", hint=HOW_TO_LIST) from None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("name"), str) and isinstance(row.get("version"), str)
        for row in rows
    ):
        raise InputError(f"--have: {path} has no list of packages", hint=HOW_TO_LIST)
    found = {}
    for name, version in ((row["name"], row["version"]) for row in rows):
        if not NAME.fullmatch(name):
            raise InputError("--have: not a name of a package", got=name, hint=HOW_TO_LIST)
        if normalized(name) in OUR_OWN:
            continue
        try:
            found[normalized(name)] = str(Version(version))
        except InvalidVersion:
            print(f"note: passed over {name}: {version!r} is not a version that pip compares", file=sys.stderr)
    return found


OUR_OWN = ("meshwright", "pip", "setuptools")
"""Packages that a bundle has of its own, or that its environment has."""
HOW_TO_LIST = "on the target: python3 -m pip list --format=json > have.json"


class Pip:
    """pip in an environment that pretends to have what the target has."""

    def __init__(self, folder: Path, target: Target) -> None:
        """Make the environment in `folder`. Raises InputError without an interpreter of the target's Python."""
        looked = search_python(oldest=target.python, newest=target.python)
        version = ".".join(map(str, target.python))
        if looked[-1].python is None:
            searched = "; ".join(f"{one.location}: {one.found}" for one in looked)
            raise InputError(
                f"there is no Python {version} here ({searched})",
                hint=f"uv python install {version}, or Debian's python{version}-venv",
            )
        subprocess.run([looked[-1].python, "-m", "venv", folder], check=True)
        self.python = folder / "bin" / "python"
        self.kept = ""
        self._run("install", "--quiet", "--upgrade", "pip")  # older ones do not resolve for another platform
        (site,) = folder.glob("lib/python*/site-packages")
        for name, at in target.packages.items():
            _pretend(site, name, at)
        self.kept = ", ".join(f"{name} {at}" for name, at in target.kept.items() if not name.startswith("nvidia-"))
        self.constraints = folder / "constraints.txt"
        self.constraints.write_text("".join(f"{name}=={at}\n" for name, at in target.kept.items()))
        self.platforms = [option for tag in target.platforms for option in ("--platform", tag)]

    def resolve(self, requirements: Sequence[str]) -> list[dict[str, Any]]:
        """Return pip's report on each package to install. Raises ConflictError."""
        printed = self._run(
            "install", "--dry-run", "--report", "-", "--quiet", "--only-binary=:all:", *self.platforms,
            "--constraint", str(self.constraints), *requirements,
        )  # fmt: skip
        return json.loads(printed)["install"]

    def download(self, pins: Sequence[str], folder: Path) -> None:
        """Download wheels of exact versions. Raises ConflictError."""
        self._run(
            "download", "--quiet", "--no-deps", "--only-binary=:all:", *self.platforms, "--dest", str(folder), *pins
        )

    def build(self, folder: Path) -> Path:
        """Build Meshwright's own wheel."""
        self._run("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        (wheel,) = folder.glob("meshwright-*.whl")
        return wheel

    def _run(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, "-m", "pip", "--disable-pip-version-check", *arguments],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith("WARNING: Location")]
            if self.kept:
                lines.append(f"The target keeps {self.kept}.")
            raise ConflictError("\n  ".join(["pip finds no packages that fit:", *lines]))
        return done.stdout


def _pretend(site: Path, name: str, version: str) -> None:
    """Write the metadata of a package that is not there."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("")


def make_bundle(
    folder: Path,
    target: Target,
    *,
    extras: Sequence[str] = (),
    also: Sequence[str] = (),
    without: Iterable[str] = (),
    max_bytes: int | None = None,
) -> Bundle:
    """Write the bundle. Raises ConflictError and InputError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        whole = Path(temporary) / "bundle"
        wheels = whole / "wheels"
        wheels.mkdir(parents=True)
        pip = Pip(Path(temporary) / "environment", target)
        wheel = pip.build(wheels)
        asked = [f"{wheel}[{','.join(extras)}]" if extras else str(wheel), *also]
        found = pip.resolve(asked)
        left_out = {normalized(name) for name in without}
        if unknown := left_out - {_name(row) for row in found}:
            raise InputError("--leave-out: the bundle has no such package", got=", ".join(sorted(unknown)))
        taken = [row for row in found if _name(row) not in left_out]
        others = [row["metadata"] for row in taken if _name(row) != "meshwright"]
        if others:  # a target may lack nothing but Meshwright
            pip.download([f"{row['name']}=={row['version']}" for row in others], wheels)
        packages = [_bundled(row, wheels, found, target) for row in taken]
        if max_bytes is not None and sum(package.bytes for package in packages) > max_bytes:
            for package in [package for package in packages if package.name == DRAWS]:
                (wheels / package.file).unlink()
                packages.remove(package)
                left_out.add(DRAWS)
        packages.sort(key=lambda package: -package.bytes)
        bundle = Bundle(packages=tuple(packages), left_out=tuple(sorted(left_out)))
        _write(whole, target, bundle, extras=extras)
        whole.replace(folder)  # onto an empty folder or none
    return bundle


def _name(row: Mapping[str, Any]) -> str:
    return normalized(row["metadata"]["name"])


def _bundled(
    row: Mapping[str, Any], wheels: Path, all_rows: Sequence[Mapping[str, Any]], target: Target
) -> BundledPackage:
    name, version = _name(row), row["metadata"]["version"]
    (file,) = (path for path in wheels.iterdir() if normalized(path.name.split("-")[0]) == name)  # one version of each
    needed_by = [_name(other) for other in all_rows if name in _needs(other)]
    return BundledPackage(
        name=name, version=version, file=file.name, bytes=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(), needed_by=tuple(sorted(needed_by)),
        replaces=target.packages.get(name),
    )  # fmt: skip


def _needs(row: Mapping[str, Any]) -> set[str]:
    """Names that a package asks for, with the extras that are asked of it."""
    found = set()
    for line in row["metadata"].get("requires_dist", ()):
        extra = EXTRA.search(line)
        if extra is None or extra[1] in row.get("requested_extras", ()):
            found |= {normalized(name) for name in NAME.findall(line)[:1]}
    return found


def _write(folder: Path, target: Target, bundle: Bundle, *, extras: Sequence[str]) -> None:
    document = {
        "python": ".".join(map(str, target.python)), "glibc": f"2.{target.glibc}", "machine": target.machine,
        "extras": list(extras), "packages": [asdict(package) for package in bundle.packages],
        "left_out": bundle.left_out, "kept": target.kept,
        "needed": sorted({package.name for package in bundle.packages} | set(target.packages)),
    }  # fmt: skip
    write_atomically(folder / "bundle.json", json.dumps(document, indent=1) + "\n")
    write_atomically(folder / "install.sh", INSTALL)
    write_atomically(folder / "check.py", CHECK)


def _about(package: BundledPackage) -> str:
    parts = []
    if package.needed_by:
        parts.append(f"for {', '.join(package.needed_by)}")
    if package.replaces:
        parts.append(f"in place of {package.replaces}")
    return f"  ({'; '.join(parts)})" if parts else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--have", type=Path, required=True, metavar="FILE")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    parser.add_argument("--extras", default="")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--glibc", default="2.28")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--max-mib", type=float)
    return parser


def _minor(option: str, text: str, *, first: int, least: int, most: int) -> int:
    """The minor version of `text`. Raises InputError."""
    found = re.fullmatch(rf"{first}\.(\d{{1,3}})", text)
    if found is None or not least <= int(found[1]) <= most:
        raise InputError(f"{option}: not such a version", got=text, allowed=f"{first}.{least} to {first}.{most}")
    return int(found[1])


def _end(number: int, frame: object) -> NoReturn:
    """End as Ctrl-C does, so that what is half done is removed."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the bundle and print its sizes."""
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        return _bundle(given)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: the folder of the bundle cannot be written: {error}", file=sys.stderr)
        return 2
    except ConflictError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _bundle(given: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise InputError("a bundle is made on Linux: requirements depend on the system", got=sys.platform)
    if given.folder.exists() and (not given.folder.is_dir() or any(given.folder.iterdir())):
        what = "not empty" if given.folder.is_dir() else "a file"
        raise InputError(f"the folder of the bundle is {what}", got=str(given.folder))
    if given.machine not in MACHINES:
        raise InputError("--machine: no wheels are built for it", got=given.machine, allowed=", ".join(MACHINES))
    if given.machine != platform.machine():
        print(f"note: requirements for {platform.machine()} alone are read as this machine's", file=sys.stderr)
    if given.max_mib is not None and not (math.isfinite(given.max_mib) and given.max_mib > 0):
        raise InputError("--max-mib", got=str(given.max_mib), allowed="a number above 0")
    for text in given.also:
        try:
            Requirement(text)
        except InvalidRequirement:
            raise InputError("--also: not a requirement", got=text, allowed="NAME or NAME>=VERSION") from None
    target = Target(
        python=(3, _minor("--python", given.python, first=3, least=OLDEST_PYTHON, most=99)),
        glibc=_minor("--glibc", given.glibc, first=2, least=OLDEST_GLIBC, most=NEWEST_GLIBC),
        machine=given.machine,
        packages=read_have(given.have),
    )
    extras = [name for name in given.extras.split(",") if name]
    known = PROJECT["optional-dependencies"]
    if unknown := set(extras) - set(known):
        raise InputError("--extras: no such extra", got=", ".join(sorted(unknown)), allowed=", ".join(known))
    max_bytes = None if given.max_mib is None else int(given.max_mib * MIB)
    bundle = make_bundle(
        given.folder, target, extras=extras, also=given.also, without=given.leave_out, max_bytes=max_bytes
    )
    print(bundle)
    if max_bytes is not None and bundle.bytes > max_bytes:
        largest = ", ".join(package.name for package in bundle.packages[:3])
        print(
            f"error: the wheels are larger than {given.max_mib:g} MiB: leave out an extra, or packages that you do not "
            f"need with --leave-out (the largest: {largest})",
            file=sys.stderr,
        )
        return 1
    print(f"next: take {given.folder} along, and there: sh install.sh site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
