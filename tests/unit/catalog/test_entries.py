import tomllib
from itertools import product

import pytest
from tests.every_member import check_every

from meshwright.catalog import entries
from meshwright.catalog import lookup as catalog
from meshwright.catalog.entries import DESCRIBE, CatalogKind, _natural, entry, names
from meshwright.errors import InputError, UnknownNameError

ALL = [(kind, name) for kind in CatalogKind for name in names(kind)]


def test_every_value_has_a_source():
    check_every(ALL, has_sources)


def has_sources(member):
    found = entry(*member)
    leaves = _leaves(found.values)
    assert leaves
    assert all(found.source_of(path) for path in leaves)
    assert "published" in found.sources or all(f"published.{key}" in found.sources for key in found.published)


def test_notes_speak_of_things_that_exist():
    check_every(ALL, notes_exist)


def notes_exist(member):
    found = entry(*member)
    known = {*_leaves(found.values), *found.values, "aliases", "published", "all"}
    known |= {f"published.{key}" for key in found.published}
    assert set(found.sources) <= known
    assert found.title
    assert found.title != found.name


@pytest.mark.parametrize("kind", list(CatalogKind))
def test_no_alias_means_two_things(kind):
    owners = {}
    for name in names(kind):
        for alias in (name, *entry(kind, name).aliases):
            key = alias.lower().replace("_", "-").replace(" ", "-")
            assert owners.setdefault(key, name) == name


def test_looking_up_a_name_reads_one_file(monkeypatch):
    read = []
    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: read.append(text) or real(text))
    entries._read.cache_clear()
    entries._entry.cache_clear()
    assert entry(CatalogKind.MODEL, "mixtral-8x7b").name == "mixtral-8x7b"
    assert len(read) == 1


def test_names_are_in_natural_order():
    found = names(CatalogKind.MODEL)
    assert found.index("llama3-8b") < found.index("llama3-70b") < found.index("llama3.1-405b")
    assert sorted(["b2", "b10", "7b"], key=_natural) == ["7b", "b2", "b10"]


def test_unknown_name_has_the_nearest_known_one():
    with pytest.raises(UnknownNameError, match="did you mean 'mi355x'"):
        entry(CatalogKind.ACCELERATOR, "mi335x")


def test_an_accelerator_can_be_described_and_nothing_else():
    for kind in CatalogKind:
        with pytest.raises(UnknownNameError) as found:
            entry(kind, "nothing-of-this-name")
        assert (DESCRIBE in str(found.value.hint)) == (kind is CatalogKind.ACCELERATOR)


def test_source_of_a_nested_value_falls_back_to_its_parent_then_to_all():
    found = entry(CatalogKind.ACCELERATOR, "gaudi2")
    assert found.source_of("peak_flops_per_s.bf16") == found.sources["peak_flops_per_s"]
    assert found.source_of("vendor") == found.sources["all"]


def _leaves(values, prefix=""):
    paths = []
    for key, value in values.items():
        paths += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return paths


LOOK_UPS = (
    catalog.model, catalog.accelerator, catalog.fabric, catalog.cluster, catalog.claim, catalog.run_file_text,
    catalog.price_per_device_hour, catalog.engine_facts, catalog.default_fabric_name,
    catalog.usual_devices_per_node, catalog.accelerator_with_driver_name, catalog.driver_name_of_pci_id,
    lambda name: catalog.entry(CatalogKind.MODEL, name),
    lambda name: catalog.entry(name, "llama3-8b"),
    lambda name: catalog.placed_fabric(name, devices_per_node=8, num_nodes=1),
    lambda name: catalog.placed_fabric("nvl72", devices_per_node=name, num_nodes=1),
    lambda name: catalog.cluster("h100-8x1", fabric_name=name or b""),
)  # fmt: skip


NO_NAMES = (None, ["h100"], {}, {1}, 3.5, b"h100", True, 10**400, object())


def test_what_is_no_name_is_an_input_error():
    check_every(product(range(len(LOOK_UPS)), NO_NAMES), is_refused, name=look_up_and_type)


def is_refused(member):
    number, name = member
    with pytest.raises(InputError, match=r"got .*allowed"):
        LOOK_UPS[number](name)


def look_up_and_type(member):
    number, name = member
    return f"look-up {number} of a {type(name).__name__}"


def test_look_ups_take_their_name_as_a_keyword_too():
    assert catalog.accelerator(name="h100") == catalog.accelerator("h100")
    with pytest.raises(InputError, match="a name of the catalogue"):
        catalog.model(name=["llama3-8b"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mi355x", "mi355x-1x1 is one device, mi355x-8x1 one node"),
        ("GB200-72", "72 devices are gb200-4x18"),
        ("8xh100", "8 devices are h100-8x1"),
        ("16 x H100", "16 devices are h100-8x2"),
        ("h100:4", "4 devices are h100-4x1"),
        ("h100x13", "13 devices are h100-1x13 with one in each node; nodes of 8 are h100-8x1, h100-8x2"),
        ("tpu-v5p*8", "8 devices are tpu-v5p-4x2"),
        ("rtx-5090x4", "4 devices are rtx-5090-1x4"),
        ("a potato", "meshwright catalog"),
    ],
)
def test_a_name_without_a_shape_leads_to_one(name, hint):
    with pytest.raises(InputError) as error:
        catalog.cluster(name)
    assert hint in error.value.hint


def test_a_cluster_of_endless_digits_is_refused():
    with pytest.raises(InputError, match="a cluster name has another form"):
        catalog.cluster("h100-8x" + "9" * 5000)
