"""Rules that hold for the whole repository. Tools run here too, so that one pytest run checks everything."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from tests.every_member import check_every

import meshwright
from meshwright.catalog.lookup import engine_names
from meshwright.cli.main import VERBS

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", "scripts", "containers", ".ci")
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".yaml", ".yml", ".json", ".csv", ".sh", ".Dockerfile"}
MAX_LINES = 600
GENERATED = {ROOT / "docs" / "reference" / "commands.md"}  # looked up, not read from end to end

PRESENT = [name for name, verb in VERBS.items() if importlib.util.find_spec(verb.target.partition(":")[0])]

HEAVY = {"torch", "jax", "transformers", "scipy", "altair", "vl_convert", "pandas", "matplotlib"}
DRAWING = {"numpy", "rich", "pydantic", "ruamel"}

MACHINE_PATH = re.compile(r"(?<![\w.}$~-])/(?:work|root|tmp|home)/\w")
WORKPLACE = re.compile(r"\bsources/\d|\bthis\s+session\b|\bthe seeds?\b|\bas an AI\b", re.IGNORECASE)
CONSTANT = re.compile(r"\b[A-Z_0-9]+(?=\s*=[^=])")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")


def text_files() -> list[Path]:
    files = [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]  # a file in a worktree
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*") if p.is_file()]
    ignored = {"__pycache__", ".egg-info"}
    return sorted(p for p in files if p.suffix in TEXT_SUFFIXES and not ignored & set(p.parts) and p != Path(__file__))


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in text_files()}


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path, text in texts().items():
        for hit in pattern.finditer(text):
            number = text.count("\n", 0, hit.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{number}: {hit.group()}")
    return found


@pytest.mark.parametrize("pattern", [MACHINE_PATH, WORKPLACE, UNFINISHED], ids=["path", "workplace", "unfinished"])
def test_no_file_holds(pattern):
    assert matches(pattern) == []


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (MACHINE_PATH, "see /home/x", True),
        (MACHINE_PATH, "catalog/home/x and $HOME/tmp/x", False),
        (WORKPLACE, "as in sources/003", True),
        (UNFINISHED, "# TODO later", True),
    ],
)
def test_the_patterns_find_what_they_should(pattern, text, expected):
    assert bool(pattern.search(text)) is expected


def test_no_module_gives_a_name_two_values():
    """A second constant of the same name changes what the functions above it read."""
    twice = []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if max(Counter(CONSTANT.findall(text)).values(), default=0) < 2:
            continue  # most files, which need no parser
        assigned = [
            target.id
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        ]
        twice += [f"{path.relative_to(ROOT)}: {name}" for name, n in Counter(assigned).items() if n > 1]
    assert twice == []


def test_a_reader_can_hold_every_file_in_the_head():
    long = {}
    for path, text in texts().items():
        num_lines = len(text.splitlines())
        if path.suffix in {".py", ".md"} and num_lines >= MAX_LINES and path not in GENERATED:
            long[str(path.relative_to(ROOT))] = num_lines
    assert long == {}


def test_every_module_can_be_imported():
    pytest.importorskip("torch")  # the doing half imports it
    names = [module.name for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")]
    ours = [name for name in names if ".in_" not in name]  # the others are for the processes of other programs
    assert len(ours) > 500
    check_every(ours, importlib.import_module)


def test_no_module_is_a_drawer():
    drawers = {"utils", "util", "helpers", "common", "misc", "manager", "managers"}
    assert [str(p) for p in (ROOT / "src").rglob("*") if p.stem in drawers] == []


def test_the_licence_is_the_one_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / project["license-files"][0]).read_text()


def imported_by(*commands: list[str]) -> list[set[str]]:
    """Heavy packages that are loaded after each of the commands, which run one after the other in one process."""
    code = """
import contextlib, io, json, sys
from meshwright.cli.main import run
commands, packages = json.loads(sys.argv[1])
loaded = []
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(command) == 0, command
    loaded.append([name for name in packages if name in sys.modules])
print(json.dumps(loaded))
"""
    asked = json.dumps([commands, sorted(HEAVY | DRAWING)])
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [set(names) for names in json.loads(done.stdout)]


def test_the_help_of_the_group_imports_nothing_heavy():
    assert imported_by(["--help"]) == [set()]


def test_every_command_of_the_table_is_there():
    assert set(VERBS) - set(PRESENT) == set()


def test_the_help_of_a_command_imports_nothing_heavy():
    loaded = imported_by(*([name, "--help"] for name in PRESENT))
    assert {name: found & HEAVY for name, found in zip(PRESENT, loaded, strict=True) if found & HEAVY} == {}


def test_plans_and_exports_for_every_engine_import_nothing_heavy(tmp_path):
    """An engine's contract is opened to say what it would refuse. SciPy, which only fits need, takes 0.3 s."""
    sizes = ["--model", "qwen3-0.6b", "--cluster", "h100-8x1", "--gbs", "8", "--seq", "1024"]
    commands = [["plan", *sizes, "--top", "1", "--engine", name] for name in engine_names()]
    others = sorted({*engine_names()} - {"native"})
    commands += [["export", "llama3-8b", "--engine", name, "--out", str(tmp_path / name)] for name in others]
    tokens = ["--input-tokens", "64", "--output-tokens", "16"]
    served = [*sizes[:4], *tokens]
    commands += [["inference", "plan", *served], ["inference", "estimate", *served, "--rate", "1"]]
    for command, loaded in zip(commands, imported_by(*commands), strict=True):
        assert loaded & HEAVY == set(), command


def test_help_starts_within_half_a_second():
    def processor_s() -> float:
        """User's and system's time of the command: waiting for other processes of this machine is not ours."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "meshwright", "plan", "--help"], check=True, capture_output=True)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert any(processor_s() < 0.5 for _ in range(5))


TOOLS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "types": ["ty", "check", "--no-progress", "--output-format=concise", "--python", sys.executable],
    "import rules": ["lint-imports", "--no-cache"],
    "all types": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


@pytest.mark.when_touched  # by any change (RULES in tests/changes.py): of the same sources a tool says the same
@pytest.mark.parametrize(
    "tool", [name if name != "all types" else pytest.param(name, marks=pytest.mark.slow) for name in TOOLS]
)
def test_tool(tool):
    """`all types` takes a minute; `types` finds most of the same faults in a ninth of that."""
    name, *arguments = TOOLS[tool]
    program = Path(sys.executable).parent / name
    environment = os.environ | {"NODE_OPTIONS": "--max-semi-space-size=64"}  # a twelfth less time for all types
    done = subprocess.run([program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
