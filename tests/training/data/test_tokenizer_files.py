"""Files of a tokenizer are copied from its own folder alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError
from meshwright.training.data.tokenizer_files import TOKENIZER_FILES, copy_files


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    source = tmp_path / "model"
    source.mkdir()
    (source / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="leads out of the folder"):
        copy_files(source, tmp_path / "copy", patterns=TOKENIZER_FILES)
    assert not (tmp_path / "copy" / "vocab.txt").exists()


@pytest.mark.parametrize("link", ["../../blobs/1a2b", "vocab.json"], ids=["cache of the hub", "beside it"])
def test_links_within_the_folder_and_the_cache_of_the_hub_are_copied(tmp_path, link):
    source = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    for folder in (source, tmp_path / "models--org--name" / "blobs", tmp_path / "copy"):
        folder.mkdir(parents=True)
    (source / link).write_text("{}")
    (source / "tokenizer.json").symlink_to(link)
    copy_files(source, tmp_path / "copy", patterns=TOKENIZER_FILES)
    copied = tmp_path / "copy" / "tokenizer.json"
    assert (copied.read_text(), copied.is_symlink()) == ("{}", False)
