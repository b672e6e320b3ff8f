"""Names of devices: a driver's name is known exactly, or the record says that it is unknown."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.catalog import lookup as catalog
from meshwright.catalog.clusters import own_cluster
from meshwright.runfile.accelerator_file import TEMPLATE, read_accelerator
from meshwright.training import device as devices

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver_says(monkeypatch):
    def say(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

    return say


@pytest.mark.parametrize(
    ("driver_name", "known"),
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_a_gpu_is_itself_or_unknown(driver_says, driver_name, known):
    driver_says(driver_name)
    assert devices.catalog_name(CUDA) == known


def test_a_cpu_has_no_catalogue_name(driver_says):
    driver_says("NVIDIA H200")
    assert devices.catalog_name(torch.device("cpu")) is None


def test_an_unknown_gpu_is_noted():
    (note,) = devices.notes_on_name("NVIDIA H200 NVL", device_type="cuda", cluster=None)
    assert note == (
        "the driver calls this device 'NVIDIA H200 NVL', which the catalogue does not know: peak measured here"
    )


def test_a_run_for_another_device_is_noted():
    cluster = catalog.cluster("h200-8x1")
    (note,) = devices.notes_on_name("NVIDIA H200 NVL", device_type="cuda", cluster=cluster)
    assert "the run is for h200" in note
    assert "'NVIDIA H200 NVL'" in note
    (note,) = devices.notes_on_name("NVIDIA B200", device_type="cuda", cluster=cluster)
    assert "h200's peak" in note


@pytest.mark.parametrize("cluster", [None, catalog.cluster("h200-8x1")])
def test_a_device_as_expected_is_not_noted(cluster):
    assert devices.notes_on_name("NVIDIA H200", device_type="cuda", cluster=cluster) == ()
    assert devices.notes_on_name("some processor", device_type="cpu", cluster=cluster) == ()


def test_a_users_accelerator_has_the_driver_names_of_its_file(tmp_path):
    path = tmp_path / "my.toml"
    named = 'driver_names = ["NVIDIA Special"]'
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace('#: driver_names = ["NVIDIA NAME"]', named))
    cluster = own_cluster(read_accelerator(path), devices_per_node=8, num_nodes=1)
    assert devices.notes_on_name("NVIDIA Special", device_type="cuda", cluster=cluster) == ()
    (note,) = devices.notes_on_name("NVIDIA H100 80GB HBM3", device_type="cuda", cluster=cluster)
    assert "the run is for my" in note


PEAK = "import torch; from meshwright.training import device; print(device.peak_memory_bytes(torch.device('cpu')))"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.when_touched  # the peak of one process is read above
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    ballast = bytearray(b"x") * 2**30
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, check=True)
    assert 2**27 < int(found.stdout) < len(ballast)
