"""docs/guides/adding-an-accelerator.md carried out: one file, and every look-up knows the device."""

import re
import shutil
from pathlib import Path

import pytest

from meshwright.catalog import entries
from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import _driver_names, _pci_ids, accelerator
from meshwright.catalog.lookup import cluster, fabric

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "adding-an-accelerator.md"
CACHED = (
    entries.names, entries._entry, entries._read, entries._aliases, accelerator, _driver_names,
    _pci_ids, fabric, cluster,
)  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A copy of the catalogue's data, which all look-ups read."""
    copy = tmp_path / "data"
    shutil.copytree(entries.DATA, copy)
    monkeypatch.setattr(entries, "DATA", copy)
    for function in CACHED:
        function.cache_clear()
    yield copy
    for function in CACHED:
        function.cache_clear()


def record() -> str:
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_record_of_the_page_is_all_that_is_needed(data):
    assert catalog.accelerator_with_driver_name("NVIDIA H300") is None
    for function in CACHED:
        function.cache_clear()

    (data / "accelerators" / "h300.toml").write_text(record(), encoding="utf-8")

    assert "h300" in catalog.accelerator_names()
    assert catalog.accelerator("H300-SXM").peak_flops_per_s["bf16"] == 1200e12
    assert catalog.cluster("h300-8x2").num_devices == 16
    assert catalog.accelerator_with_driver_name("NVIDIA H300") == "h300"
    assert catalog.driver_name_of_pci_id("10de:ffff") == "NVIDIA H300"
    assert catalog.entry(catalog.CatalogKind.ACCELERATOR, "h300").source_of("driver_names")


def test_a_training_knows_the_name_of_the_page(data):
    pytest.importorskip("torch")
    from meshwright.training.device import notes_on_name

    assert notes_on_name("NVIDIA H300", device_type="cuda", cluster=None)
    for function in CACHED:
        function.cache_clear()
    (data / "accelerators" / "h300.toml").write_text(record(), encoding="utf-8")
    assert notes_on_name("NVIDIA H300", device_type="cuda", cluster=None) == ()


def test_a_copied_record_is_recognised_only_by_its_own_names(data):
    text = (data / "accelerators" / "h200.toml").read_text(encoding="utf-8")
    text = re.sub(r"^aliases = .*$", 'aliases = ["H200-NVL"]', text, flags=re.MULTILINE)
    text = re.sub(r"^driver_names = \[.*$", 'driver_names = ["NVIDIA H200 NVL"]', text, flags=re.MULTILINE)
    (data / "accelerators" / "h200-nvl.toml").write_text(text, encoding="utf-8")

    assert catalog.accelerator_with_driver_name("NVIDIA H200 NVL") == "h200-nvl"
    assert catalog.accelerator_with_driver_name("NVIDIA H200") == "h200"
