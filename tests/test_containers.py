"""`containers/`: recipes of images, which keep the base's PyTorch. No test builds an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts import bundle

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "containers" / "install.sh"
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

NAME = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a Dockerfile, such as RUN, with its text."""

    keyword: str
    text: str


def instructions(recipe: Path) -> list[Instruction]:
    """Read a Dockerfile. Comments go, and a backslash continues a line."""
    lines = [line for line in recipe.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [Instruction(keyword=keyword, text=text) for keyword, text in pairs]


def arguments(recipe: Path) -> dict[str, str]:
    pairs = (i.text.partition("=") for i in instructions(recipe) if i.keyword == "ARG")
    return {name: default for name, _, default in pairs}


def every_recipe(function):
    return pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)(function)


def test_a_dockerfile_is_read_as_docker_reads_it(tmp_path):
    recipe = tmp_path / "Dockerfile"
    recipe.write_text("# a\nARG B=1\nFROM x:${B}\n\nRUN one \\\n  # why\n  && two\nRUN three\n")
    assert [(i.keyword, " ".join(i.text.split())) for i in instructions(recipe)] == [
        ("ARG", "B=1"), ("FROM", "x:${B}"), ("RUN", "one && two"), ("RUN", "three"),
    ]  # fmt: skip


def test_both_vendors_have_a_recipe():
    assert [path.stem for path in RECIPES] == ["cuda", "rocm"]


@every_recipe
def test_what_is_copied_exists_and_is_sent_to_the_builder(recipe):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for i in instructions(recipe) if i.keyword == "COPY" for source in i.text.split()[:-1]]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists() or source not in sent] == []


@every_recipe
def test_the_wheel_can_be_built_from_what_is_copied(recipe):
    """hatchling refuses to build without the files that pyproject.toml names."""
    copied = " ".join(i.text for i in instructions(recipe) if i.keyword == "COPY").split()
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


@every_recipe
def test_its_extras_exist(recipe):
    assert set(arguments(recipe)["EXTRAS"].split(",")) <= set(EXTRAS)


@every_recipe
def test_the_base_has_a_pytorch_that_is_new_enough(recipe):
    base = arguments(recipe)["BASE"]
    version = re.search(r"(?:^pytorch/pytorch:|_pytorch_release_)(\d+\.\d+\.\d+)", base)
    assert version, base
    (torch,) = (found for line in EXTRAS["torch"] if (found := Requirement(line)).name == "torch")
    assert torch.specifier.contains(version[1])


@every_recipe
def test_a_variable_is_declared_where_it_is_used(recipe):
    """An ARG before FROM is empty after it, and Docker does not say so."""
    declared, unknown = set(), []
    for i in instructions(recipe):
        unknown += [f"{i.keyword} {name}" for name in NAME.findall(i.text) if name not in declared]
        if i.keyword in {"ARG", "ENV"}:
            declared.add(i.text.partition("=")[0])
        elif i.keyword == "FROM":
            declared.clear()
    assert unknown == []


@every_recipe
@pytest.mark.parametrize("shell", ["bash", "sh"])  # Docker's is sh
def test_a_shell_can_read_every_run(recipe, shell):
    runs = [i.text for i in instructions(recipe) if i.keyword == "RUN"]
    assert any("install.sh" in text for text in runs)
    for text in runs:
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), text


@every_recipe
def test_a_launcher_gives_the_command(recipe):
    assert not {i.keyword for i in instructions(recipe)} & {"ENTRYPOINT", "CMD"}


def test_the_installer_and_a_bundle_keep_the_same_libraries():
    (kept,) = re.findall(r"^kept='(.*)'$", INSTALL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert kept == bundle.KEPT.pattern


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image's `python`. A test says which packages its pip lists and installs."""

    folder: Path

    def has(self, *packages: str) -> None:
        (self.folder / "packages").write_text("".join(f"{line}\n" for line in packages))

    def gets(self, *packages: str) -> None:
        (self.folder / "installed").write_text("".join(f"{line}\n" for line in packages))

    @property
    def asked(self) -> str:
        """The arguments of `pip install`, and its constraints below them."""
        return (self.folder / "asked").read_text()

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        paths = f"{self.folder}{os.pathsep}{ROOT / 'src'}"
        return subprocess.run(
            ["sh", INSTALL, *arguments],
            cwd=ROOT.parent, capture_output=True, text=True, env=os.environ | {"PATH": path, "PYTHONPATH": paths},
        )  # fmt: skip


@pytest.fixture
def image(tmp_path) -> Image:
    """PyTorch of this image is for CUDA 13.0."""
    (tmp_path / "torch.py").write_text("class version: cuda, hip = '13.0', None\n__version__ = '2.13.0+cu130'\n")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  "-m pip list"*) cat '{tmp_path}/packages' ;;
  "-m pip install"*)
    echo "$*" >'{tmp_path}/asked'
    while [ "$1" != --constraint ]; do shift; done
    cat "$2" >>'{tmp_path}/asked'
    cat '{tmp_path}/installed' >>'{tmp_path}/packages' ;;
  *) exec '{sys.executable}' "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    image = Image(folder=tmp_path)
    image.has("numpy==2.4.0", "nvidia_cublas==13.1", "torch==2.13.0+cu130", "torchdata==0.11.0", "triton==3.9.0")
    image.gets("meshwright==0.1.0", "tyro==1.0")
    return image


def test_the_libraries_of_an_image_are_the_constraints(image):
    done = image.install("cuda", str(ROOT), "kernels,torchtitan")
    assert done.returncode == 0, done.stderr
    asked, *constraints = image.asked.splitlines()
    assert asked.endswith(f" {ROOT}[kernels,torchtitan]")
    assert constraints == ["nvidia-cublas==13.1", "torch==2.13.0+cu130", "triton==3.9.0"]
    assert "PyTorch 2.13.0+cu130 for cuda 13.0" in done.stdout


def test_a_relative_folder_without_extras(image):
    assert image.install("cuda", ROOT.name, "").returncode == 0
    assert image.asked.splitlines()[0].endswith(f" {ROOT}")


def test_a_second_library_is_an_error(image):
    """A constraint names packages that are there; PyPI's Triton is not pytorch-triton-rocm."""
    image.has("pytorch_triton_rocm==3.6.0", "torch==2.11.0+rocm7.2")
    image.gets("triton==3.9.0")
    done = image.install("hip", str(ROOT), "kernels")
    assert done.returncode == 1
    assert "> triton==3.9.0" in done.stdout
    assert "libraries of the image changed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hip", str(ROOT)), 1, "this PyTorch is for cuda, not for hip: 2.13.0+cu130"),
        (("cpu", str(ROOT)), 1, "this PyTorch is for cuda, not for cpu"),
        (("rocm", str(ROOT)), 2, "the first argument is cuda, hip or cpu: got 'rocm'"),
        (("cuda", str(ROOT), "kernels", "more"), 2, "three arguments at most: got 4"),
        (("cuda",), 2, "the second argument is a checkout of Meshwright: got ''"),
    ],
)
def test_an_image_that_does_not_fit_and_bad_input_are_refused(image, arguments, code, message):
    done = image.install(*arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_an_image_without_pytorch_is_refused_before_anything_is_installed(image):
    image.has("torchvision==0.28.0", "numpy==2.4.0")
    done = image.install("cuda", str(ROOT))
    assert (done.returncode, done.stderr) == (1, "error: python has no PyTorch\n")
    assert not (image.folder / "asked").exists()


@pytest.mark.slow
def test_an_installation_keeps_this_pytorch(tmp_path):
    """pip installs into a new environment, which sees the packages of this one as an image's."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if torch.version.cuda or torch.version.hip or not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("needs PyTorch for CPUs, and a C compiler for Triton")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "TRITON_INTERPRET"}}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def install(accelerator: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", INSTALL, accelerator, ROOT, "kernels"], capture_output=True, text=True, env=variables
        )

    done = install("cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PyTorch {torch.__version__} for cpu" in done.stdout
    assert str(site / "meshwright") in done.stdout
    assert not (site / "torch").exists()

    done = install("cuda")
    assert done.returncode == 1
    assert "this PyTorch is for cpu, not for cuda" in done.stderr
