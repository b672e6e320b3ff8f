"""Check the Triton kernels with another version of Triton than the installed one, without a GPU.

    python scripts/check_triton.py 3.4.0 [--numpy 2.2.6] [--folder FOLDER] [--only tests|compile]

    tests     tests/unit/kernels in that version's interpreter, slow ones too
    compile   every kernel with every tile for every architecture; spills and traffic that the installed version has not

The version goes into a folder of its own, first on the path; nothing that is installed changes. Interpreters of old
versions turn arrays of one number into numbers, which newer NumPy refuses: they get the older NumPy. Versions that link
AMD's objects with ROCm's `ld.lld` get a stand-in that copies them, where there is none: what is read here is the
assembly. Exit code 1: a test fails, or a kernel does not compile. Takes many minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKER = """#!/bin/sh
[ "$1" = "--version" ] && echo stand-in && exit 0
cp "$4" "$6"
"""
COMPILE = """
import triton
from meshwright.kernels import inspection
from meshwright.kernels.architectures import architectures

count = errors = 0
for source in inspection.kernel_sources():
    for tile in source.tiles:
        for architecture in architectures().values():
            if tile.architectures and architecture.name not in tile.architectures:
                continue
            count += 1
            try:
                row = inspection.inspect_one(source, tile=tile, architecture=architecture)
            except Exception as error:  # compilers raise what they like
                errors += 1
                text = str(error).replace(chr(10), " ")[:200]
                place = f"{source.name} [{tile.label}] on {architecture.name}"
                print(f"{place}: {type(error).__name__}: {text}", flush=True)
                continue
            for fault in row.faults:
                print(fault, flush=True)
print(f"Triton {triton.__version__}: {count - errors} of {count} compile")
raise SystemExit(errors > 0)
"""


def main() -> int:
    """Install and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--numpy", default="2.2.6")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=("tests", "compile"))
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix=f"triton-{given.version}-"))
    if not (folder / "triton").exists():
        packages = [f"triton=={given.version}", f"numpy=={given.numpy}"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *packages], check=True
        )
    environment = environment_of(folder)
    codes = []
    if given.only != "compile":
        lane = (
            "-W",
            "ignore:Conversion of an array:DeprecationWarning",
            "-m",
            "slow or not slow",
            "--deselect",
            "tests/unit/kernels/test_inspection.py",
        )
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/unit/kernels", *lane]
        codes.append(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    if given.only != "tests":
        codes.append(subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment).returncode)
    return int(any(codes))


def environment_of(folder: Path) -> dict[str, str]:
    """The environment in which the Triton of `folder` is imported, with a cache of its own."""
    linker = folder / "copying-linker"
    linker.write_text(LINKER)
    linker.chmod(0o755)
    path = os.pathsep.join([str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"TRITON_HIP_LLD_PATH": str(linker)} | kept | {
        "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
