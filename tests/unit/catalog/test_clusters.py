import pytest
from tests.every_member import check_every

from meshwright.catalog.lookup import accelerator_names, cluster, fabric, fabric_names, usual_devices_per_node
from meshwright.errors import InputError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "accelerator", "num_devices", "domain", "fabric_name"),
    [
        ("mi355x-8x12288", "mi355x", 98_304, 8, "xgmi-mi350x"),
        ("h100-8x16", "h100", 128, 8, "nvswitch-4-ndr"),
        ("gb200-4x18", "gb200", 72, 72, "nvl72"),
        ("gb200-72x1", "gb200", 72, 72, "nvl72"),
        ("gb200-4x36", "gb200", 144, 72, "nvl72"),
        ("gb200-4x64", "gb200", 256, 64, "nvl72"),  # not whole racks: 64 of each
        ("gb200-4x2", "gb200", 8, 8, "nvl72"),
        ("a100-40gb-8x2", "a100-40gb", 16, 8, "nvswitch-3-hdr"),
        ("tpu-v5p-4x16", "tpu-v5p", 64, 64, "ici-v5p"),
        ("tpu-v5e-8x64", "tpu-v5e", 512, 256, "ici-v5e"),  # two pods
        ("cpu-1x1", "cpu", 1, 1, "cpu-ethernet"),
        ("H100-4x2", "h100", 8, 4, "nvswitch-4-ndr"),  # half of a node
    ],
)
def test_names_read_as_clusters(name, accelerator, num_devices, domain, fabric_name):
    c = cluster(name)
    assert (c.accelerator.name, c.num_devices, c.fabric.scale_up_domain, c.fabric.name) == (
        accelerator, num_devices, domain, fabric_name,
    )  # fmt: skip


def test_every_accelerator_has_a_usual_system():
    def check(name):
        c = cluster(f"{name}-{usual_devices_per_node(name)}x4")
        assert c.name == f"{name}-{usual_devices_per_node(name)}x4"
        assert 1 <= c.fabric.scale_up_domain <= c.num_devices

    check_every(accelerator_names(), check)


def test_part_of_a_mesh_has_part_of_its_links():
    whole, smaller, single = cluster("mi300x-8x1"), cluster("mi300x-4x2"), cluster("mi300x-1x8")
    assert whole.fabric.scale_up_bytes_per_s == 448e9
    assert smaller.fabric.scale_up_bytes_per_s == 3 * 64e9
    assert single.fabric.scale_up_bytes_per_s == 64e9  # nothing to talk to; kept positive
    # a switch gives its full rate to any two devices
    assert cluster("h100-2x1").fabric.scale_up_bytes_per_s == 450e9


@pytest.mark.parametrize("name", ["h100", "h100-8", "8x16", "h100-8x", "h100-8x16x2", "h100-8.5x2", "", "-8x2"])
def test_other_forms_are_refused_with_an_example(name):
    with pytest.raises(InputError, match="mi355x-8x64"):
        cluster(name)


@pytest.mark.parametrize("name", ["h100-0x4", "h100-8x0"])
def test_empty_clusters_are_refused(name):
    with pytest.raises(InputError, match="at least one"):
        cluster(name)


def test_more_devices_than_a_node_holds_are_refused():
    with pytest.raises(InputError, match="at most 8"):
        cluster("h100-16x2")


def test_unknown_accelerator_and_fabric_are_refused():
    with pytest.raises(UnknownNameError, match="unknown accelerator"):
        cluster("h1000-8x2")
    with pytest.raises(UnknownNameError, match="unknown fabric"):
        cluster("h100-8x2", fabric_name="carrier-pigeon")


def test_a_fabric_can_be_named():
    c = cluster("h100-8x64", fabric_name="aws-efa-p5")
    assert c.fabric.name == "aws-efa-p5"
    assert not c.fabric.rail_optimized


def test_fabrics_are_physical():
    def check(name):
        f = fabric(name)
        assert 0 < f.scale_up_peer_bytes_per_s <= f.scale_up_bytes_per_s
        assert 0 < f.scale_out_bytes_per_s <= f.scale_up_bytes_per_s
        assert 0.1e-6 <= f.scale_up_latency_s <= f.scale_out_latency_s <= 50e-6
        assert f.oversubscription >= 1
        assert f.nodes_per_pod >= 1
        assert f.devices_per_nic > 0

    check_every(fabric_names(), check)


def test_published_networks_have_their_link_counts():
    assert fabric("jean-zay").scale_out_bytes_per_s == 4 * 100e9 / 8 / 8
    assert fabric("oci-roce-1600").scale_out_bytes_per_s == 1600e9 / 8 / 8
    assert fabric("aws-efa-p5").scale_out_bytes_per_s == 32 * 100e9 / 8 / 8
    assert fabric("nvswitch-3-hdr4").scale_out_bytes_per_s == 4 * 200e9 / 8 / 8
    assert fabric("selene").scale_out_bytes_per_s == 8 * 200e9 / 8 / 8
