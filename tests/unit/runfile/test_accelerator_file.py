"""A user's own accelerator: the file's schema, and the cluster that a run makes of it."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog import entries
from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import OTHER_KEYS
from meshwright.errors import InputError, RunFileError
from meshwright.planner.request import request_for
from meshwright.planner.scaling import resized
from meshwright.planner.search import search
from meshwright.runfile import accelerator_file
from meshwright.runfile.accelerator_file import AcceleratorFile, assumptions_of, read_accelerator
from meshwright.runfile.fields import keys_of
from meshwright.runfile.hardware import stated_cluster
from meshwright.runfile.validate import validated
from meshwright.specs.hardware import Accelerator, Cluster

MINIMAL = """\
# A device of mine
vendor = "NVIDIA"
architecture = "Hopper"
num_compute_units = 132
memory_bytes = 85e9
memory_bytes_per_s = 3.35e12
default_fabric = "nvswitch-4-ndr"
peak_flops_per_s = {bf16 = 989e12}
"""


@pytest.fixture
def write(tmp_path):
    def written(text: str = MINIMAL, name: str = "my.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return written


def cluster_of(path: Path, shape: str = "8x4", **stated: str) -> Cluster:
    return runfile.named_cluster(stated_cluster(f"{path.stem}-{shape}", accelerator=path, **stated))


def run_on(cluster: object, folder: Path | None = None) -> str:
    return (
        f"model: llama3.1-8b\ndata: {{sequence_length: 4096}}\nbatch: {{global_sequences: 256}}\ncluster: {cluster}\n"
    )


def test_the_schema_has_the_keys_of_the_catalogues_entries():
    of_a_run = {"power_w", "clock_ratio", "clock_width"}  # which states a power limit
    keys = {f.name for f in fields(Accelerator)} - {"name"} - of_a_run
    assert set(keys_of(AcceleratorFile)) == {*keys, *OTHER_KEYS, *entries.ABOUT}


def test_every_accelerator_of_the_catalogue_follows_the_schema():
    def check(name: str) -> None:
        found = entries.entry(catalog.CatalogKind.ACCELERATOR, name)
        content = {**found.values, "aliases": list(found.aliases), "sources": found.sources}
        assert isinstance(validated(AcceleratorFile, content), AcceleratorFile)

    check_every(catalog.accelerator_names(), check)


def test_the_template_is_a_file_without_errors_and_names_every_key(write):
    text = accelerator_file.TEMPLATE.read_text(encoding="utf-8")
    assert read_accelerator(write(text)).values["default_fabric"] == "nvswitch-4-ndr"
    assert [key for key in keys_of(AcceleratorFile) if f"{key} = " not in text and f"[{key}]" not in text] == []


def test_a_copy_of_an_entry_gives_the_estimate_of_its_device(write):
    text = (entries.DATA / "accelerators" / "h100.toml").read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("aliases", "driver_names")))
    mine, theirs = cluster_of(write(text, "h100-mine.toml")), catalog.cluster("h100-8x4")
    assert asdict(mine.accelerator) == {
        **asdict(theirs.accelerator), "name": "h100-mine", "aliases": (), "driver_names": (),
        "sources": mine.accelerator.sources,
    }  # fmt: skip
    same = replace(mine.fabric, links_of="", sources=theirs.fabric.sources)
    assert same == theirs.fabric


def test_what_the_file_leaves_out_is_that_of_its_fabric(write):
    device = cluster_of(write()).accelerator
    assert device.scale_up_bytes_per_s == device.scale_up_peer_bytes_per_s == 450e9
    assert (device.scale_up_domain, device.scale_out_bytes_per_s) == (8, 50e9)
    assumed = assumptions_of(read_accelerator(write()))
    assert {"scale_up_bytes_per_s", "scale_out_bytes_per_s", "host_bytes_per_s", "tdp_w"} <= assumed.keys()
    assert assumed["efficiency"].startswith("as on Hopper")
    unlike = MINIMAL.replace('"Hopper"', '"Tensor Engine 1"')
    assert "wide interval" in assumptions_of(read_accelerator(write(unlike)))["efficiency"]
    like = f'rates_of = "Ada"\n{unlike}'
    assert assumptions_of(read_accelerator(write(like)))["efficiency"] == "as Ada has it, which rates_of names"


def test_the_links_of_the_file_replace_those_of_the_fabric(write):
    links = "scale_up_domain = 16\nscale_up_bytes_per_s = 200e9\nscale_out_bytes_per_s = 12.5e9\n"
    path = write(links + MINIMAL)
    cluster = cluster_of(path, "16x2")
    assert (cluster.fabric.scale_up_domain, cluster.fabric.scale_up_bytes_per_s) == (16, 200e9)
    assert (cluster.fabric.scale_up_peer_bytes_per_s, cluster.fabric.scale_out_bytes_per_s) == (200e9, 12.5e9)
    assert cluster.fabric.scale_up_latency_s == catalog.fabric("nvswitch-4-ndr").scale_up_latency_s
    assert "no source" in cluster.fabric.sources["scale_up_bytes_per_s"]
    assert resized(cluster, 64).fabric == cluster.fabric
    with pytest.raises(InputError, match="at most 16 devices"):
        cluster_of(path, "32x1")


def test_a_rack_of_the_file_has_its_own_number_of_devices(write):
    text = MINIMAL.replace("nvswitch-4-ndr", "nvl72")
    cluster = cluster_of(write(f"scale_up_domain = 36\n{text}"), "4x2")
    assert cluster.fabric.scale_up_domain == 8
    assert resized(cluster, 144).fabric.scale_up_domain == 36


def test_slower_links_and_less_memory_never_give_a_faster_step(write):
    def best_step_s(text: str) -> float:
        run = runfile.loads(run_on(f"{{name: my-8x4, accelerator: {write(text)}}}"))
        best = search(request_for(run), top=1).best
        assert best is not None
        return best.step_s

    usual = best_step_s(MINIMAL)
    assert best_step_s(f"scale_out_bytes_per_s = 1e9\n{MINIMAL}") > usual
    assert best_step_s(MINIMAL.replace("3.35e12", "1e12")) > usual
    assert best_step_s(MINIMAL.replace("989e12", "500e12")) > usual
    assert best_step_s(MINIMAL.replace("85e9", "40e9")) >= usual


def test_what_a_run_states_comes_over_the_file(write):
    cluster = cluster_of(write(), network="100Gb/s", device_memory="40GiB")
    assert cluster.fabric.scale_out_bytes_per_s == 12.5e9 / 8
    assert cluster.accelerator.memory_bytes == 40 * 2**30
    assert cluster.stated[0] == "accelerator my as its file describes it"
    assert len(cluster.stated) == 3


def test_the_path_starts_from_the_folder_of_the_run_file(write, tmp_path, monkeypatch):
    write(name="hardware/my.toml")
    run_file = write(run_on("{name: my-8x4, accelerator: hardware/my.toml}"), "runs/../run.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = runfile.load(run_file)
    assert run.cluster is not None
    assert (run.cluster.name, run.cluster_name) == ("my-8x4", "my-8x4")
    with pytest.raises(RunFileError, match=r"run\.yaml:4: cluster\.accelerator: .*no such file"):
        runfile.load(write(run_on("{name: my-8x4, accelerator: my.toml}"), "run.yaml"))
    with pytest.raises(RunFileError, match="no such file"):  # an option's starts from the working directory
        runfile.load(run_file, overrides=["cluster.accelerator=hardware/my.toml"])


def test_a_pinned_copy_in_another_folder_finds_the_file(write, tmp_path):
    write(name="hardware/my.toml")
    run = runfile.load(write(run_on("{accelerator: hardware/my.toml, devices_per_node: 8, num_nodes: 4}"), "run.yaml"))
    assert run.cluster_name == "my-8x4"
    best = search(request_for(run), top=1).best
    assert best is not None
    (tmp_path / "out").mkdir()
    runfile.pin_plan(run, best.plan, tmp_path / "out" / "pinned.yaml")
    assert runfile.load(tmp_path / "out" / "pinned.yaml").cluster == run.cluster


def test_one_part_of_two_generations_may_be_of_a_file(write):
    run = runfile.loads(run_on(f"{{name: my-8x2+h100-8x2, accelerator: {write()}}}"))
    assert run.cluster is not None
    assert [part.accelerator.name for part in run.cluster.parts] == ["my", "h100"]
    assert run.cluster.stated == ("accelerator my as its file describes it",)


def test_an_alias_names_the_accelerator_too(write):
    path = write('aliases = ["My 80GB"]\n' + MINIMAL)
    assert runfile.named_cluster({"name": "my-80gb-8x4", "accelerator": str(path)}).name == "my-8x4"


def test_all_errors_of_a_file_are_said_at_once(write):
    wrong = """\
vendor = 3
arch = "Foo"
num_compute_units = 0
memory_bytes = 80
memory_bytes_per_s = nan
default_fabric = "nvswitch-4"
rates_of = "Hoper"
scale_up_bytes_per_s = inf
tdp_w = -1
aliases = ["H100 80GB"]
devices_per_nod = 8
peak_flops_per_s = {bf16 = 989, int3 = 3e12}
"""
    with pytest.raises(RunFileError) as caught:
        read_accelerator(write(wrong))
    message = str(caught.value)
    for words in (
        "14 errors", "vendor: must be text: got 3", "architecture: is missing",
        "bf16: is out of range: got 989, allowed: >= 1,000,000,000; hint: in FLOP per second",
        "int3: unknown value: got 'int3', allowed: fp32, tf32", "80 GB are 80e9", "got nan", "got inf",
        "num_compute_units: is out of range: got 0, allowed: > 0", "did you mean 'nvswitch-4-ndr'?",
        "did you mean 'Hopper'?", "tdp_w: is out of range: got -1", "is a device of the catalogue (h100)",
        "arch: unknown key", "devices_per_nod: unknown key; hint: did you mean 'devices_per_node'?",
    ):  # fmt: skip
        assert words in message, message


def test_contradictions_are_errors(write):
    def check(line: str, words: str) -> None:
        with pytest.raises(RunFileError, match=words):
            read_accelerator(write(line + MINIMAL))

    check_every(
        [
            ("scale_up_bytes_per_s = 1e9\nscale_up_peer_bytes_per_s = 2e9\n", "more than scale_up_bytes_per_s"),
            ("x = ", "is not TOML"),
            ("vendor = 'AMD'\n", "is not TOML"),
        ],
        lambda case: check(*case),
    )
    with pytest.raises(RunFileError, match="fp8: is less than bf16"):
        read_accelerator(write(MINIMAL.replace("{bf16", "{fp8 = 1e12, bf16")))


def test_names_that_are_no_clusters_are_refused(write):
    def check(name: str, words: str) -> None:
        with pytest.raises(RunFileError, match=words):
            read_accelerator(write(name=name))

    check_every(
        [
            ("h100.toml", "rename the file, to my-h100.toml"), ("here.toml", "allowed: small letters"),
            ("a+b.toml", "allowed: small letters"),
        ],
        lambda case: check(*case),
    )  # fmt: skip
    assert read_accelerator(write(name="My GPU.toml")).name == "my-gpu"


def test_a_cluster_of_another_accelerator_is_refused(write):
    def check(cluster: str, words: str) -> None:
        with pytest.raises(RunFileError, match=words):
            runfile.loads(run_on(cluster))

    path = write()
    check_every(
        [
            (f"{{name: h100-8x4, accelerator: {path}}}", "cluster.name: has no devices.*allowed: my-DEVICESxNODES"),
            ("{name: h100-8x4, accelerator: h200}", "cluster.accelerator: is no file: got 'h200'"),
            (f"{{name: here, accelerator: {path}}}", "cluster.name: is this machine"),
        ],
        lambda case: check(*case),
    )
    with pytest.raises(InputError, match="cluster: network: is no rate"):
        cluster_of(path, network="fast")
    with pytest.raises(InputError, match="cluster: nodes: unknown key"):
        runfile.named_cluster({"name": "h100-8x4", "nodes": 3})
