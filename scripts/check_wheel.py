"""Check a wheel in a fresh environment and an empty folder: its commands, data and example runs need no checkout.

    python scripts/check_wheel.py dist/meshwright-*.whl

The planning half only: no PyTorch is installed. Exit code 0: all commands did what they should; 1: one did not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMMANDS = (
    ("--version",),
    ("plan", "llama3-8b", "--top", "2"),
    ("plan", "--model", "qwen3-30b-a3b", "--cluster", "h100-8x4", "--gbs", "64", "--seq", "4096", "--html", "p.html"),
    ("estimate", "llama3.1-405b", "--html", "estimate.html"),
    ("scale", "llama3-70b", "--json"),
    ("inference", "estimate", "--model", "llama3.1-8b", "--cluster", "h100-8x1", "--input-tokens", "512",
     "--output-tokens", "128"),
    ("export", "llama3-70b", "--engine", "megatron", "--out", "exported"),
    ("catalog", "models"),
    ("examples", "examples"),
    ("plan", "examples/runs/llama3.1-8b-pretrain.yaml"),
)  # fmt: skip
"""Each reads data of the package by name, and some write files."""


def check(wheel: Path) -> int:
    """Install `wheel`, run all commands and return the number of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder, "environment"), Path(folder, "work")
        work.mkdir()
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", wheel.resolve()], check=True)
        failed = 0
        for command in COMMANDS:
            done = subprocess.run([python, "-m", "meshwright", *command], cwd=work, capture_output=True, text=True)
            print(f"{'ok' if done.returncode == 0 else 'FAILED'}  meshwright {' '.join(command)}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stderr, file=sys.stderr)
        return failed


def main() -> int:
    """Check the wheel that the command names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    return 1 if check(parser.parse_args().wheel) else 0


if __name__ == "__main__":
    raise SystemExit(main())
