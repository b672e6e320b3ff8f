"""Archives of GPU measurements become a page, defaults of kernels and documents; the device of these is invented."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from benchmarks.gpu_results import best_order, best_orders, compiled_operations, read_results
from hypothesis import given
from hypothesis import strategies as st
from tests.every_member import check_every

from benchmarks import gpu, gpu_apply, gpu_page, gpu_results
from meshwright.errors import InputError
from meshwright.kernels.operations import OPERATIONS
from meshwright.records.kernel_routes import PassTime, TimedRoute
from meshwright.records.trainings import TABLE

ROOT = Path(__file__).parents[2]
COLUMNS = TABLE.header
DEVICE = {"type": "cuda", "name": "Test GPU 80GB", "architecture": "sm90", "memory_bytes": 80 * 2**30}
SOFTWARE = {"meshwright": "0.1.0", "torch": "2.13.0"}
CARD = {"accelerator": None, "type": "cuda", "name": DEVICE["name"], "count": 1, "memory_bytes": 80 * 2**30}
DEFAULTS = (ROOT / gpu_apply.DEFAULTS).read_text(encoding="utf-8")
SWIGLU = {"reference": 4.0, "triton": 1.0, "liger": 2.0, "compile": 3.0}
NORM = {"reference": 4.0, "triton": 2.0, "liger": 1.0, "compile": 0.5}


def timed(op, shape, route, milliseconds, *, error=1e-3, is_default=False):
    seconds = 1e-3 * milliseconds
    pass_time = PassTime(median=seconds / 2, low=seconds / 2, high=seconds / 2)
    return TimedRoute(
        op=op, model="llama", shape=shape, format="bf16", route=route, reason="", forward_s=pass_time,
        backward_s=pass_time, flops=0.0, least_bytes=1e6, roofline_ratio=0.4 / milliseconds, peak_bytes=None,
        error=error, is_default=is_default, is_fastest=False,
    )  # fmt: skip


def call(times, *, wrong=(), failed=(), shape="8"):
    """Rows of a call with milliseconds of its routes; `wrong` ones round wrongly, `failed` ones have no time."""
    rows = [
        timed("swiglu", shape, r, ms, error=1.0 if r in wrong else 1e-3, is_default=r == "triton")
        for r, ms in times.items()
    ]
    return rows + [
        timed("swiglu", shape, r, 1.0).model_copy(
            update={"forward_s": None, "backward_s": None, "error": None, "is_failure": True}
        )
        for r in failed
    ]


def as_calls(*found):
    """Calls of different shapes from their rows."""
    return gpu_results._calls(
        [row.model_copy(update={"shape": str(i)}) for i, rows in enumerate(found) for row in rows]
    )


def as_row(row):
    document = row.model_dump()
    for name in ("forward_s", "backward_s"):
        document[name] |= {"low": 1e-4, "high": 1e-2}
    return document


def training(engine, seconds, losses, folder):
    """A row of trainings.csv, with the step log in its folder."""
    log = folder / "trainings" / engine / "1"
    log.mkdir(parents=True)
    lines = [json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses, start=1)]
    (log / "steps.jsonl").write_text("\n".join(lines) + "\n")
    values = {
        "configuration": f"eight engine={engine}", "engine": engine, "run": 1, "status": "ok",
        "folder": f"trainings/{engine}/1", "started": "2026-11-28T04:00:00+00:00", "wall_s": 9.0, "model": "8B shapes",
        "precision": "bf16", "plan": "DP1", "num_devices": 1, "threads": 8, "sequence_length": 4096,
        "global_batch": 8, "micro_batch": 1, "steps": 20, "step_s_median": seconds, "step_s_low": seconds,
        "step_s_high": seconds, "tokens_per_s_per_device": 32768 / seconds, "mfu": 0.5 / seconds,
        "mfu_convention": "model FLOPs", "peak_memory_bytes": 7e10, "first_loss": losses[0], "last_loss": losses[-1],
        "predicted_step_s": 1.0, "predicted_step_s_low": 0.5, "predicted_step_s_high": 2.0, "predicted_mfu": 0.5,
        "predicted_memory_bytes": 7e10, "error": 1 / seconds - 1, "inside": "yes",
    }  # fmt: skip
    return ",".join(str(values.get(name, "")) for name in COLUMNS)


def archive(path, *, dry_run=False, has_results=True):
    """Write an archive as a GPU would leave it: two operations, a step on two engines, and a failure."""
    folder = path.parent / "results"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = ("kernels-8b", "step-8b", "gemm") if has_results else ("gemm",)
    gpu.write(
        folder,
        [
            {
                "name": name, "exit_code": 1 if name == "gemm" else 0, "device": DEVICE, "software": SOFTWARE,
                "started": "2026-11-28T04:00:00+00:00", "wall_s": 30.0,
                "stderr": ["CUDA error: misaligned address"] if name == "gemm" else [], "dry_run": dry_run,
            }
            for name in names
        ],
    )  # fmt: skip
    if has_results:
        facts = {
            "device": CARD,
            "software": SOFTWARE,
            "started": "2026-11-28T04:00:00+00:00",
            "command": ["meshwright"],
        }
        rows = [
            as_row(timed(op, shape, route, ms, is_default=route == "triton"))
            for op, times in (("swiglu", SWIGLU), ("rms_norm", NORM))
            for shape in ("8 x 8", "16 x 8")
            for route, ms in times.items()
        ]
        (folder / "kernels-8b").mkdir()
        document = {"schema": "meshwright kernel routes 1", **facts, "rows": rows}
        (folder / "kernels-8b" / "kernels.json").write_text(json.dumps(document))
        step = folder / "step-8b"
        lines = [training("native", 1.0, [10.0, 8.0], step), training("torchtitan", 1.25, [10.0, 8.004], step)]
        (step / "trainings.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
        sidecar = facts | {
            "schema": "meshwright bench trainings 1", "driver": None, "software": {"native": SOFTWARE}, "ended": None,
            "git_commit": None, "steps": 20, "warmup": 3,
            "configurations": {f"eight engine={e}": {} for e in ("native", "torchtitan")},
        }  # fmt: skip
        (step / "trainings.json").write_text(json.dumps(sidecar))
        (folder / "caches").mkdir()
        (folder / "caches" / "big.json").write_text("{}")
    with tarfile.open(path, "w:gz") as file:
        for item in folder.rglob("*"):
            file.add(item, item.relative_to(folder).as_posix(), recursive=False)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """Parts of a checkout that `--apply` needs: its package, its script, and documents."""
    root = tmp_path / "checkout"
    for name in (
        "src/meshwright",
        "scripts/renew_kernels.py",
        "docs/reference/kernels.md",
        *map(str, gpu_apply.SENTENCES),
    ):
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return root


def run_script(*arguments):
    """Run the script as a user does."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True)


@pytest.fixture
def run(capsys):
    """Run the script in this process: a start of it imports PyTorch."""

    def call(*arguments):
        try:
            returncode = gpu.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            returncode = ended.code
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, returncode, captured.out, captured.err)

    return call


SECONDS = st.floats(0.01, 100.0)
ROUTES = ("reference", "triton", "liger")
TIMES = st.fixed_dictionaries({"reference": SECONDS}, optional={"triton": SECONDS, "liger": SECONDS})


def mean_loss(order, calls):
    """Geometric mean of time over that of the fastest route, by its definition."""
    product = 1.0
    for c in calls:
        product *= next(c.able[name] for name in order if name in c.able) / min(c.able.values())
    return product ** (1 / len(calls))


@given(st.lists(TIMES, min_size=1, max_size=5), st.permutations(ROUTES))
def test_no_order_is_better_than_the_one_that_is_chosen(times, other):
    calls = as_calls(*map(call, times))
    order = best_order(calls, before=("triton", "reference"))
    assert mean_loss(order, calls) <= mean_loss(other, calls) * (1 + 1e-6)
    assert order[-1] == "reference"
    assert sorted(order) == sorted({*order})
    slower = as_calls(*(call({name: 7 * ms for name, ms in t.items()}) for t in times))
    assert best_order(slower, before=("triton", "reference")) == order


@pytest.mark.parametrize(
    ("calls", "before", "order"),
    [
        ([SWIGLU], ["liger", "reference"], ["triton", "liger", "reference"]),
        ([NORM], ["triton", "reference"], ["liger", "triton", "reference"]),  # slower than Liger: no default
        ([{"reference": 1.0, "triton": 1.0}], ["triton", "reference"], ["triton", "reference"]),  # as it was
        ([{"reference": 1.0, "triton": 2.0}], ["triton", "reference"], ["reference"]),
        ([SWIGLU], ["triton", "reference"], ["triton", "liger", "reference"]),
        ([{"reference": 1.0, "liger": 2.0}], ["triton", "reference"], ["reference"]),  # triton was not measured
        ([{"reference": 2.0, "liger": 1.0}], ["triton", "reference"], ["liger", "triton", "reference"]),
        ([{"reference": 4.0, "triton": 1.0, "liger": 9.0}], ["triton", "liger", "reference"], ["triton", "reference"]),
        ([SWIGLU, {"reference": 1.0, "triton": 100.0}], ["triton", "reference"], ["liger", "reference"]),
    ],
)
def test_the_order_follows_from_times(calls, before, order):
    assert best_order(as_calls(*map(call, calls)), before=before) == order


def test_a_route_that_rounds_wrongly_or_fails_on_one_call_has_no_place():
    before = ("triton", "reference")
    wrong = as_calls(call(SWIGLU), call(SWIGLU, wrong=("triton",)))
    assert best_order(wrong, before=before) == ["liger", "reference"]
    rest = {name: ms for name, ms in SWIGLU.items() if name != "triton"}
    failed = as_calls(call(SWIGLU), call(rest, failed=("triton",)))
    assert best_order(failed, before=before) == ["liger", "reference"]
    alone = as_calls(call({"reference": 1.0}, failed=("triton",)))
    assert best_orders(alone, before={"swiglu": before}) == {"swiglu": ["reference"]}


def test_a_call_on_which_the_reference_failed_keeps_another_route():
    large = call({"triton": 1.0, "liger": 2.0}, failed=("reference",))
    calls = as_calls(call({"reference": 1.0, "triton": 2.0}), large)
    assert best_order(calls, before=("triton", "reference"))[0] == "triton"


def test_an_operation_without_a_comparison_stays_as_it_was():
    calls = as_calls(call({"reference": 1.0}), call({"compile": 1.0}))
    assert best_orders(calls, before={"swiglu": ["triton"]}) == {}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([NORM, NORM], ["swiglu"]),
        ([SWIGLU, SWIGLU], []),
        ([NORM, {"reference": 4.0, "liger": 1.0}], []),  # not measured on one call
    ],
)
def test_the_compiled_reference_is_taken_where_it_is_faster_on_all_calls(calls, expected):
    made = as_calls(*map(call, calls))
    orders = best_orders(made, before={"swiglu": ["triton", "reference"]})
    assert compiled_operations(made, orders=orders) == expected
    wrong = as_calls(*(call(times, wrong=("compile",)) for times in calls))
    assert compiled_operations(wrong, orders=orders) == []


def test_renewed_defaults_keep_what_was_not_measured_and_complete_what_was():
    before = tomllib.loads(DEFAULTS)
    text = gpu_apply.renewed_defaults(
        DEFAULTS, architecture="sm90", orders={"swiglu": ["liger", "triton", "reference"]}, compiled=["swiglu"]
    )
    after = tomllib.loads(text)
    assert {name for name in after if after[name] != before[name]} == {"sm90"}
    changed = {"swiglu": ["liger", "triton", "reference"], "measured": ["swiglu"], "compiled": ["swiglu"]}
    assert after["sm90"] == before["sm90"] | changed
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in DEFAULTS.splitlines() if line.startswith("#")
    ]
    orders = {op: before["sm90"][op] for op in OPERATIONS}
    whole = tomllib.loads(gpu_apply.renewed_defaults(text, architecture="sm90", orders=orders, compiled=[]))["sm90"]
    assert whole == orders | {"basis": "measured"}
    assert "sm120" in tomllib.loads(gpu_apply.renewed_defaults(text, architecture="sm120", orders=orders, compiled=[]))


def test_the_page_has_rivals_predictions_losses_and_failures(tmp_path):
    path = tmp_path / "gpu.tar.gz"
    archive(path)
    done = run_script("--page", path, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"<[^>]+>", " ", (tmp_path / "page.html").read_text(encoding="utf-8"))
    words = (
        "Measured on Test GPU 80GB", "CUDA error: misaligned address", "2.00 (2.00 to 2.00)",
        "torchtitan beside native",
        "5.0e-04", "0.80", "Share of the roofline, of our default and its rivals", "Use of the device",
    )  # fmt: skip
    check_every(words, lambda word: word in text or pytest.fail(f"not on the page: {word}"))


def test_a_page_of_failures_alone_says_why(tmp_path):
    folder = archive(tmp_path / "gpu.tar.gz", has_results=False)
    gpu_page.write(read_results(folder), path=tmp_path / "page.html")
    assert "misaligned address" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_results_become_defaults_records_and_sentences_twice_the_same(tmp_path, checkout, run):
    path = tmp_path / "gpu.tar.gz"
    archive(path)
    done = run("--apply", path, "--root", checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rms_norm on sm90: liger, triton, reference" in done.stdout
    assert "compiled runs take the reference" in done.stdout
    assert "can be deleted" not in done.stdout
    table = tomllib.loads((checkout / gpu_apply.DEFAULTS).read_text(encoding="utf-8"))["sm90"]
    assert (table["swiglu"], table["compiled"]) == (["triton", "liger", "reference"], ["rms_norm"])
    assert "| liger, triton, reference |" in (checkout / "docs/reference/kernels.md").read_text(encoding="utf-8")
    kept = checkout / gpu_apply.RECORDS / "test-gpu-80gb-sm90"
    assert (kept / "step-8b" / "trainings" / "native" / "1" / "steps.jsonl").is_file()
    assert not (kept / "caches").exists()
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert "1 x Test GPU 80GB: 8B shapes in bf16 at 32,768 tokens/s/device, 50 % MFU" in readme
    assert gpu_apply.NONE not in readme
    assert "misaligned address" in (checkout / gpu_apply.PAGE).read_text(encoding="utf-8")
    first = {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and p.suffix in (".md", ".toml", ".json")}
    assert run("--apply", path, "--root", checkout).returncode == 0
    assert first == {p: p.read_bytes() for p in first}


def test_what_cannot_be_applied_is_refused_and_changes_nothing(tmp_path, checkout, run):
    dry, damaged, foreign = (tmp_path / f"{name}.tar.gz" for name in ("dry", "damaged", "foreign"))
    archive(dry, dry_run=True)
    damaged.write_bytes(dry.read_bytes()[:500])
    with tarfile.open(foreign, "w:gz") as file:
        file.add(ROOT / "pyproject.toml", "pyproject.toml")
    before = (checkout / gpu_apply.DEFAULTS).read_bytes()
    cases = {
        ("--apply", damaged): "cannot read",
        ("--apply", tmp_path / "absent.tar.gz"): "cannot read",
        ("--apply", foreign): "no gpu.json that can be read",
        ("--apply", dry): "dry run",
        ("--apply", dry, "--root", tmp_path): "no checkout",
        ("--page", dry, "--apply", dry): "one of them at a time",
        ("--page", dry, "--out", tmp_path / "absent" / "page.html"): "cannot be written",
        ("--page", dry, "--out", dry): "is the archive",
        ("--page", dry, "--total", 5, "--only", "doctor"): "leave out --only, --total",
        ("--apply", dry, "--out", tmp_path / "page.html"): "--out belongs to --page",
    }

    def check(arguments):
        done = run(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert cases[arguments] in done.stderr

    check_every(list(cases), check, name=str)
    assert (checkout / gpu_apply.DEFAULTS).read_bytes() == before


def change(folder, **values):
    """Change the last measurement of a folder."""
    document = json.loads((folder / "gpu.json").read_text())
    document["measurements"][-1] |= values
    (folder / "gpu.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": DEVICE | {"architecture": "sm90]"}}, "no gpu.json"),
        ({"device": DEVICE | {"architecture": "other"}}, "no gpu.json"),
        ({"device": DEVICE | {"name": "GPU <!-- :gpu -->"}}, "no gpu.json"),
        ({"device": DEVICE | {"name": "Another GPU"}}, "several devices"),
        ({"stderr": [None]}, "no gpu.json"),
        ({"wall_s": 1e400}, "no gpu.json"),
        ({"started": ""}, "no gpu.json"),
        ({"name": "../gemm"}, "no gpu.json"),
    ],
)  # fmt: skip
def test_damaged_results_are_refused_before_anything_is_read_from_them(tmp_path, values, message):
    folder = archive(tmp_path / "gpu.tar.gz")
    change(folder, **values)
    with pytest.raises(InputError, match=message):
        read_results(folder)


def test_records_of_another_device_than_the_archive_are_refused(tmp_path):
    folder = archive(tmp_path / "gpu.tar.gz")
    path = folder / "kernels-8b" / "kernels.json"
    path.write_text(path.read_text().replace(DEVICE["name"], "Another GPU"))
    with pytest.raises(InputError, match="of another device"):
        read_results(folder)


def test_results_without_an_architecture_are_not_applied(tmp_path, checkout):
    folder = archive(tmp_path / "gpu.tar.gz", has_results=False)
    change(folder, device={"name": "Test GPU 80GB", "type": "cuda"})
    with pytest.raises(InputError, match="architecture"):
        gpu_apply.apply(read_results(folder), root=checkout, is_own=False)


def test_a_later_archive_leaves_measurements_that_it_lacks(tmp_path, checkout):
    for has_results in (True, False):
        folder = archive(tmp_path / "gpu.tar.gz", has_results=has_results)
        done = gpu_apply.apply(read_results(folder), root=checkout, is_own=False)
    assert "2 of earlier archives stay" in done[0]
    joined = read_results(checkout / gpu_apply.RECORDS / "test-gpu-80gb-sm90")
    assert {row["name"] for row in joined.measurements} == {"kernels-8b", "step-8b", "gemm"}
    assert "50 % MFU" in (checkout / "README.md").read_text(encoding="utf-8")


def test_a_document_without_its_marks_or_a_damaged_record_stops_it_before_it_writes(tmp_path, checkout):
    found = read_results(archive(tmp_path / "gpu.tar.gz"))
    before = (checkout / gpu_apply.DEFAULTS).read_bytes()
    broken = checkout / gpu_apply.RECORDS / "old" / "gpu.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    with pytest.raises(InputError, match=r"no gpu\.json"):
        gpu_apply.apply(found, root=checkout, is_own=False)
    shutil.rmtree(broken.parent)
    readme = checkout / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("<!-- gpu: -->", ""))
    with pytest.raises(InputError, match="no place for the sentence"):
        gpu_apply.apply(found, root=checkout, is_own=False)
    assert (checkout / gpu_apply.DEFAULTS).read_bytes() == before
    assert not list((checkout / gpu_apply.RECORDS).glob("*"))


def test_what_a_command_printed_is_text_on_the_page(tmp_path, checkout):
    folder = archive(tmp_path / "gpu.tar.gz")
    change(folder, stderr=["a\r\n## b <script>c</script> `d` | e"])
    gpu_apply.apply(read_results(folder), root=checkout, is_own=False)
    text = (checkout / gpu_apply.PAGE).read_text(encoding="utf-8")
    assert "a ## b &lt;script&gt;c&lt;/script&gt; 'd' \\| e |" in text


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    archive(tmp_path / "gpu.tar.gz")
    monkeypatch.setattr(gpu, "UNPACKED_BYTES", 100)
    with pytest.raises(tarfile.TarError, match="more than"):
        gpu.unpack(tmp_path / "gpu.tar.gz", tmp_path / "out")


def test_kernels_that_no_architecture_chooses_any_more_can_be_deleted():
    before = {"sm90": {"adamw": ["triton"], "swiglu": ["triton"]}, "sm100": {}}
    after = {"sm90": {"adamw": ["reference"], "swiglu": ["triton"]}, "sm100": {}}
    assert gpu_results.never_chosen(before, after) == [("adamw", OPERATIONS["adamw"].kernels)]
    shared = {"sm90": {"permute": ["triton"], "unpermute": ["triton"]}}  # in one module
    assert gpu_results.never_chosen(shared, {"sm90": {"permute": ["triton"]}}) == []


def test_documents_say_what_the_records_say():
    """The page and the sentences of this checkout are those of its records."""
    found = [read_results(p.parent) for p in sorted((ROOT / gpu_apply.RECORDS).glob(f"*/{gpu_results.RECORD}"))]
    assert (ROOT / gpu_apply.PAGE).read_text(encoding="utf-8") == gpu_apply.page(found)
    for name, link in gpu_apply.SENTENCES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert gpu_apply.marked(gpu_apply.sentence(found, link=link)) in text
