"""The index of a checkpoint is a pickle: it is read without running what it contains."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.errors import InputError
from meshwright.training.checkpoints import SavedCheckpoint, load
from meshwright.training.checkpoints.metadata import CheckpointReader, read_index, require_index


class Runs:
    """A pickle that runs a command when it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "step-00000001"
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)
    state = {str(dtype): torch.zeros(3, 4).to(dtype) for dtype in dtypes} | {"step": 3}
    state["image"] = torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=path)
    (path / "manifest.json").write_text("{}")
    return path


def test_it_reads_what_pytorch_reads(checkpoint):
    found, expected = read_index(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    whole = {"torch.float32": torch.ones(3, 4)}
    load(SavedCheckpoint(path=checkpoint, step=1), into=whole)
    assert not whole["torch.float32"].any()


def test_enumerations_are_read_from_every_python(checkpoint, monkeypatch):
    """Python 3.11.0 to 3.11.3 stores a member as `getattr(class, name)`, others as `class(value)`."""
    index = read_index(checkpoint)
    for reduced in (lambda self, _: (getattr, (type(self), self.name)), lambda self, _: (type(self), (self.value,))):
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
        assert read_index(checkpoint).state_dict_metadata == index.state_dict_metadata


def calls(target: Path):
    return {
        "system": Runs(os.system, f"touch {target}"),
        "eval": Runs(eval, f"open({str(target)!r}, 'w')"),
        "getattr": Runs(getattr, (), "count"),
        "getattr of a class": Runs(getattr, torch.Size, "numel"),
        "getattr of an enumeration": Runs(getattr, _MEM_FORMAT_ENCODING, "__members__"),
        "path": Runs(Path.touch, target),
        "storage": Runs(torch.load, str(target)),
        "dtype": [torch.float32, Runs(torch.hub.load, str(target))],
    }


@pytest.mark.parametrize("name", sorted(calls(Path())))
def test_nothing_in_it_runs(checkpoint, tmp_path, name):
    target = tmp_path / "touched"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(calls(target)[name]))
    for read in (
        read_index,
        require_index,
        lambda path: CheckpointReader(path).read_metadata(),
        lambda path: load(SavedCheckpoint(path=path, step=1), into={}),
    ):
        with pytest.raises(InputError, match="is not the index of a checkpoint: it refers to"):
            read(checkpoint)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps({"a": 1})], ids=range(4))
def test_a_damaged_one_is_bad_input(checkpoint, content):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match="is not the index of a checkpoint"):
        read_index(checkpoint)


def test_tensors_lie_in_the_checkpoint(checkpoint):
    index = read_index(checkpoint)
    next(iter(index.storage_data.values())).relative_path = "../elsewhere.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match="outside of the checkpoint"):
        read_index(checkpoint)


def test_no_other_reader_is_used():
    """Every reader of checkpoints in the package is the restricted one."""
    source = Path(__file__).parents[2] / "src" / "meshwright"
    users = [path.name for path in source.rglob("*.py") if "FileSystemReader" in path.read_text()]
    assert users == ["metadata.py"]
