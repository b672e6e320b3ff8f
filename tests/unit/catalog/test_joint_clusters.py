"""Clusters of several parts."""

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.joint_clusters import joint_cluster
from meshwright.errors import InputError, UnknownNameError


def test_devices_have_what_all_parts_have():
    joint = joint_cluster("h200-8x4 + h800-8x2")
    h200, h800 = catalog.accelerator("h200"), catalog.accelerator("h800")
    assert joint.name == "h200-8x4+h800-8x2"
    assert (joint.num_nodes, joint.num_devices) == (6, 48)
    assert joint.accelerator.memory_bytes == h800.memory_bytes
    assert joint.accelerator.memory_bytes_per_s == h800.memory_bytes_per_s
    assert joint.fabric.scale_up_bytes_per_s == catalog.cluster("h800-8x2").fabric.scale_up_bytes_per_s
    assert joint.accelerator.peak_flops_per_s == h200.peak_flops_per_s


def test_power_is_the_mean():
    a100, h100 = (catalog.accelerator(name).tdp_w for name in ("a100", "h100"))
    assert a100
    assert h100
    assert joint_cluster("a100-8x1+h100-8x3").accelerator.tdp_w == pytest.approx((a100 + 3 * h100) / 4)


def test_formats_are_those_of_all():
    assert "fp8" not in joint_cluster("h100-8x1+a100-8x1").accelerator.peak_flops_per_s


def test_order_does_not_matter():
    one, other = joint_cluster("mi300x-8x2+mi325x-8x2"), joint_cluster("mi325x-8x2+mi300x-8x2")
    assert (one.accelerator, one.fabric) == (other.accelerator, other.fabric)


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "neighbours", "domain"),
    [
        ("h100-8x8+h100-4x1", 9, 68, 4, 4),
        ("h100-4x1+h100-8x8", 9, 68, 4, 4),
        ("h100-8x2+h100-6x1", 3, 22, 2, 2),
        ("gb200-4x18+gb200-4x9", 27, 108, 4, 36),
        ("h100-8x8+gb200-4x18", 26, 136, 4, 8),
    ],
)
def test_nodes_of_several_sizes_have_the_neighbours_of_all(name, nodes, devices, neighbours, domain):
    joint = joint_cluster(name)
    assert (joint.num_nodes, joint.num_devices) == (nodes, devices)
    assert (joint.devices_per_node, joint.fabric.scale_up_domain) == (neighbours, domain)


def test_links_of_a_mesh_are_those_of_the_smaller_node():
    joint = joint_cluster("mi300x-8x1+mi300x-4x1").fabric
    assert joint.scale_up_bytes_per_s == catalog.cluster("mi300x-4x1").fabric.scale_up_bytes_per_s


def test_one_part_is_a_cluster():
    assert joint_cluster("h100-8x4") == catalog.cluster("h100-8x4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-8x1+mi300x-8x1", "same vendor"),
        ("h100-8x1+", "another form"),
        ("+".join(["h100-8x1"] * 9), "too many parts"),
        ("h100-8x1+h100", "h100-1x1 is one device"),
    ],
)
def test_parts_that_do_not_train_together(name, message):
    with pytest.raises(InputError, match=message):
        joint_cluster(name)


def test_an_unknown_part():
    with pytest.raises(UnknownNameError, match="h1000"):
        joint_cluster("h100-8x1+h1000-8x1")
