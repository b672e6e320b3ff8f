import shutil
import tomllib
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.catalog.run_files import EXAMPLES, FOLDER
from meshwright.errors import InputError, RunFileError, UnknownNameError


def test_a_name_stands_for_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runfile.load("llama3.1-405b", overrides=["cluster=b200-8x8"])
    assert (run.name, run.model.name, run.cluster_name) == ("llama3.1-405b", "llama3.1-405b", "b200-8x8")
    assert run.text == catalog.run_file_text("llama3.1-405b")


def test_a_file_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(FOLDER / "llama3-8b.yaml", tmp_path / "moe-2t")
    assert runfile.load("moe-2t").model.name == "llama3-8b"


def test_a_near_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFileError, match="did you mean 'mixtral-8x7b', which ships") as caught:
        runfile.load("mixtral-8x7")
    assert caught.value.exit_code == 2
    with pytest.raises(RunFileError, match="lists those that ship"):
        runfile.load("mine.yaml")
    with pytest.raises(UnknownNameError, match="run file"):
        catalog.run_file_text("../models/llama3-8b")


@pytest.mark.parametrize("name", catalog.run_file_names())
def test_each_says_where_it_comes_from(name):
    comment = [line for line in catalog.run_file_text(name).splitlines() if line.startswith("#")]
    assert "AMD 2025" in " ".join(comment)


def test_examples_are_copied_and_never_overwrite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied = catalog.copy_examples(Path("examples"))
    source = Path(__file__).parents[3] / "examples"
    assert {path: path.read_bytes() for path in copied} == {
        Path("examples", p.relative_to(source)): p.read_bytes() for p in source.rglob("*.*") if p.is_file()
    }
    assert runfile.load("examples/runs/llama3.1-8b-pretrain.yaml").model.name == "llama3.1-8b"
    copied[0].unlink()
    assert catalog.copy_examples(Path("examples")) == copied  # what is there already is no obstacle
    copied[0].unlink()
    copied[-1].write_text("mine")
    with pytest.raises(InputError, match="is there, and is another file"):
        catalog.copy_examples(Path("examples"))
    assert (copied[-1].read_text(), copied[0].exists()) == ("mine", False)


def test_a_wheel_holds_the_examples():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"examples": f"meshwright/catalog/data/{EXAMPLES}"}
