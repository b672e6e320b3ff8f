#!/bin/sh
# Installs Meshwright into an image that has PyTorch, and changes none of the image's libraries for the accelerator.
#
#     sh containers/install.sh cuda|hip|cpu SOURCE [EXTRAS]
#
#     cuda|hip|cpu   the kind of PyTorch that the image must have
#     SOURCE         a checkout of Meshwright
#     EXTRAS         extras of Meshwright, separated by commas: kernels,torchtitan
#
# Exit code 0: installed and checked; 1: the image does not fit, or a library changed; 2: bad input.
set -eu

# The same names as KEPT in scripts/bundle.py
kept='torch|torchvision|torchaudio|triton|pytorch-triton.*|nvidia-.*|cuda-.*|.*rocm.*'

fail() {
  echo "error: $1" >&2
  exit "${2:-1}"
}

# Not `pip freeze`: for a wheel that was built in the image, that names a file which is no longer there.
libraries() {
  python -m pip list --disable-pip-version-check --format=freeze >"$folder/all"
  tr '_' '-' <"$folder/all" | grep -E "^($kept)==" | LC_ALL=C sort
}

accelerator=${1:-}
source=${2:-}
extras=${3:-}
case $accelerator in
  cuda | hip | cpu) ;;
  *) fail "the first argument is cuda, hip or cpu: got '$accelerator'" 2 ;;
esac
[ $# -le 3 ] || fail "three arguments at most: got $#" 2
[ -f "$source/pyproject.toml" ] || fail "the second argument is a checkout of Meshwright: got '$source'" 2
source=$(CDPATH= cd -- "$source" && pwd) # pip takes a name without a slash for a package

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

libraries >"$folder/before"
grep -q '^torch==' "$folder/before" || fail "python has no PyTorch"

# Debian's and Ubuntu's Python refuse to install without this. An image has one program, so nothing else can break.
export PIP_BREAK_SYSTEM_PACKAGES=1
python -m pip install --disable-pip-version-check --no-cache-dir --constraint "$folder/before" \
  "$source${extras:+[$extras]}"

# A constraint cannot prevent everything: PyPI's Triton would come beside one of another name.
libraries >"$folder/after"
diff "$folder/before" "$folder/after" || fail "libraries of the image changed: < before, > after"

cd "$folder" # an import finds the installed package, not the checkout
python - "$accelerator" <<'END'
import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import meshwright
import torch

wanted = sys.argv[1]
versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
found = next((name for name, version in versions.items() if version), "cpu")
if found != wanted:
    sys.exit(f"error: this PyTorch is for {found}, not for {wanted}: {torch.__version__}")
if find_spec("triton"):  # it compiles a launcher when a kernel first runs
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for headers
    headers = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not headers.is_file():
        sys.exit(f"error: Triton needs the headers of Python: there is no {headers}")
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        sys.exit("error: Triton needs a C compiler: there is neither gcc nor clang")
print(f"PyTorch {torch.__version__} for {found} {versions.get(found, '')}; {meshwright.__path__[0]}")
END
python -m meshwright --version
