"""The table of variables: every one has its reason; layers lie over it in their order."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from tests.every_member import check_every

from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import engine_names
from meshwright.errors import InputError
from meshwright.launch.environment import NAME, environment, rows, table_version
from meshwright.launch.site import Site

ROWS = rows()
KEYS = {
    "name", "value", "flag", "site", "vendors", "architectures", "engines", "multi_node", "multi_process", "reason",
    "source",
}  # fmt: skip


def of(
    vendor="AMD", architecture="CDNA 4", engine="native", num_nodes=2, devices_per_node=8, site=None,
    inherited=None, given=None, **layers,
):  # fmt: skip
    found = environment(
        vendor=vendor, architecture=architecture, engine=engine, num_nodes=num_nodes,
        devices_per_node=devices_per_node, site=site or {}, layers=layers, inherited=inherited, given=given,
        folder=Path("runs/first"), user="ann",
    )  # fmt: skip
    return {v.name: v for v in found}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}-{row.get('flag', '')}")
def test_every_row_has_a_reason_and_a_source_and_can_apply(row):
    assert set(row) <= KEYS
    assert NAME.fullmatch(row["name"])
    assert len(row["reason"].split()) >= 4
    assert len(row["source"].split()) >= 3
    assert sum(key in row for key in ("value", "flag", "site")) == 1
    accelerators = [catalog.accelerator(name) for name in catalog.accelerator_names()]
    assert set(row.get("vendors", ())) <= {a.vendor for a in accelerators}
    assert set(row.get("architectures", ())) <= {a.architecture for a in accelerators}
    assert set(row.get("engines", ())) <= set(engine_names())
    assert "site" not in row or row["site"] in Site.model_fields


def test_every_variable_of_every_accelerator_has_a_reason():
    check_every(product(catalog.accelerator_names(), engine_names()), has_reasons)


def has_reasons(member):
    name, engine = member
    accelerator = catalog.accelerator(name)
    found = of(accelerator.vendor, accelerator.architecture, engine)
    assert all(v.reason and v.source and v.value for v in found.values())
    assert "PYTHONUNBUFFERED" in found
    assert ("HSA_NO_SCRATCH_RECLAIM" in found) == (accelerator.architecture in ("CDNA 3", "CDNA 4"))


def test_no_two_rows_of_one_accelerator_set_one_thing():
    for accelerator in map(catalog.accelerator, catalog.accelerator_names()):
        for engine in engine_names():
            own = [
                (row["name"], row.get("flag", "").partition("=")[0])
                for row in ROWS
                if accelerator.vendor in row.get("vendors", (accelerator.vendor,))
                and accelerator.architecture in row.get("architectures", (accelerator.architecture,))
                and engine in row.get("engines", (engine,))
            ]
            assert len(own) == len(set(own))


def test_the_network_is_the_sites_and_only_for_several_nodes():
    site = {"interface": "ens1f0", "gid_index": 3}
    found = of(site=site)
    assert found["NCCL_SOCKET_IFNAME"].value == found["GLOO_SOCKET_IFNAME"].value == "ens1f0"
    assert found["NCCL_IB_GID_INDEX"].value == "3"
    assert "NCCL_IB_HCA" not in found
    assert of(site={"rdma_devices": "mlx5_0,mlx5_1"})["NCCL_IB_HCA"].value == "=mlx5_0,mlx5_1"
    assert "NCCL_SOCKET_IFNAME" not in of(site=site, num_nodes=1)


def test_an_unknown_device_gets_what_every_device_gets():
    assert set(of(vendor=None, architecture=None)) == {"PYTHONUNBUFFERED", "OMP_NUM_THREADS"}


def test_one_process_a_node_keeps_its_threads():
    assert "OMP_NUM_THREADS" not in of(devices_per_node=1)


def test_what_the_shell_exports_wins_over_the_table_and_the_command_line_over_both():
    shell = {"NCCL_DEBUG": "INFO", "GPU_MAX_HW_QUEUES": "4", "HOME": "/root"}
    found = of(inherited=shell, given={"GPU_MAX_HW_QUEUES": "8"}, site_file={"NCCL_DEBUG": "TRACE"})
    assert (found["NCCL_DEBUG"].value, found["NCCL_DEBUG"].source) == ("INFO", "this shell")
    assert found["GPU_MAX_HW_QUEUES"].value == "8"
    assert "HOME" not in found  # processes inherit it: nothing would change it


def test_a_user_without_a_name_has_a_number(monkeypatch):
    def fail():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", fail)
    found = environment(
        vendor="AMD", architecture="CDNA 4", engine="native", num_nodes=1, devices_per_node=8, site={}, layers={},
        folder=Path("runs/first"),
    )  # fmt: skip
    assert {v.name: v for v in found}["MIOPEN_USER_DB_PATH"].value == f"/var/tmp/miopen-{os.getuid()}"


def test_later_layers_win_and_none_takes_away():
    found = of(site_file={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": None}, env={"NCCL_DEBUG": "TRACE", "MINE": "x y"})
    assert found["NCCL_DEBUG"].value == "TRACE"
    assert found["NCCL_DEBUG"].source == "env"
    assert found["MINE"].value == "x y"
    assert "OMP_NUM_THREADS" not in found


def test_flags_are_joined_and_changed_one_by_one():
    table = of(engine="maxtext")["XLA_FLAGS"].value.split()
    assert len(table) == 4
    changed = of(engine="maxtext", env={"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true --xla_new=1"})
    now = changed["XLA_FLAGS"].value.split()
    assert "--xla_gpu_enable_triton_gemm=true" in now
    assert "--xla_new=1" in now
    assert len(now) == 5
    assert "XLA_FLAGS" not in of(engine="maxtext", env={"XLA_FLAGS": None})


@pytest.mark.parametrize("layer", [{"A-B": "1"}, {"A": "two\nlines"}])
def test_what_no_environment_can_hold_is_refused(layer):
    with pytest.raises(InputError, match="--env"):
        of(given=layer)


def test_the_table_has_a_date():
    assert table_version().count(".") == 2
