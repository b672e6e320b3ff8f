"""Reports on folders of records: what is collected, refused, priced and written."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.record_folders import write_serving, write_training

from meshwright.answers.overview.collect import collect
from meshwright.answers.overview.cost import cost_rows, sensitivities, unpriced, usd_per_million
from meshwright.answers.serving_question import PriceTerms
from meshwright.errors import InputError
from meshwright.inference.price import Ownership
from meshwright.report import figures
from meshwright.report.figures import write_figures
from meshwright.report.overview.page import figures_of, markdown, record_page
from meshwright.report.overview.tables import cost_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("report")
    for devices in (8, 16):
        write_training(where / f"on-{devices}", speed=1.5 - devices / 16, statistics__num_devices=devices)
    write_serving(where / "server")
    return where


@pytest.fixture(scope="module")
def found(folder):
    return collect([str(folder)])


def test_every_record_below_a_folder_is_an_entry(found):
    assert [(e.name, e.side.kind) for e in found.entries] == [
        ("on-16", "training"), ("on-8", "training"), ("server", "serving"),
    ]  # fmt: skip
    assert found.summary() == "training: 2, serving: 1"
    rows = found.to_rows()
    assert {r["metric"] for r in rows} >= {"throughput", "MFU", "memory", "output rate", "time to first token"}
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_damaged_record_is_refused_with_file_and_field_where_it_is_named(folder, tmp_path):
    bad = write_training(tmp_path / "bad", statistics__steps="many")
    with pytest.raises(InputError, match=r"bad/record.json: statistics.steps"):
        collect([str(bad)])
    write_training(tmp_path / "good")
    several = collect([str(tmp_path)])
    assert len(several.entries) == 1
    assert "bad/record.json: statistics.steps" in several.unreadable[0]
    assert "bad/record.json" in record_page(several)


def test_what_stands_in_place_of_a_record_is_named_and_links_are_followed_once(tmp_path):
    records = tmp_path / "records"
    write_training(records / "good")
    write_training(tmp_path / "elsewhere")
    (records / "folder" / "record.json").mkdir(parents=True)
    (records / "broken").mkdir()
    (records / "broken" / "record.json").symlink_to(tmp_path / "nowhere")
    (records / "lost").symlink_to(tmp_path / "nowhere")
    (records / "linked").symlink_to(tmp_path / "elsewhere")
    (records / "again").symlink_to(tmp_path / "elsewhere")
    (records / "circle").symlink_to(records)
    (records / "good" / "latest").symlink_to(tmp_path / "nowhere")  # inside of a record: not a record's place
    found = collect([str(records)])
    assert [e.name for e in found.entries] == ["again", "good"]
    assert len(found.unreadable) == 3
    for name in ("folder", "broken", "lost"):
        assert sum(f"records/{name}" in text for text in found.unreadable) == 1
    with pytest.raises(InputError, match=r"record\.json"):
        collect([str(records / "folder")])


def test_a_set_of_logs_without_a_score_and_a_damaged_log_say_why(tmp_path):
    folder = tmp_path / "v5.1"
    folder.mkdir()
    line = ':::MLLOG {"time_ms": 1760000000000, "event_type": "POINT_IN_TIME", "key": "submission_benchmark", '
    line += '"value": "llama2_70b_lora", "metadata": {}}\n'
    (folder / "result_0.txt").write_text(line)
    with pytest.raises(InputError, match=r"no score: .*1 of 10 runs;"):
        collect([str(folder)])
    (folder / "result_0.txt").write_text(line + ":::MLLOG {broken\n")
    with pytest.raises(InputError, match=r"result_0\.txt:2: "):
        collect([str(folder)])
    (folder / "result_1.txt").mkdir()
    with pytest.raises(InputError, match=r"result_1\.txt"):
        collect([str(folder)])


@pytest.mark.when_touched  # test_a_page_is_one_file_with_a_note_for_each_record has the page
def test_the_error_of_an_even_number_of_trainings_is_between_the_two_middle_ones(tmp_path):
    for name, rate in (("near", 9638.0), ("far", 0.5 * 9638.0)):  # errors of 0 and 50 %
        spread = {"n": 17, "median": rate, "low": rate, "high": rate}
        write_training(tmp_path / name, statistics__throughput=spread)
    page = record_page(collect([str(tmp_path)]))
    assert "<b>25\N{NO-BREAK SPACE}%</b><span>median error of the prediction" in page


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="no record at or below"):
        collect([str(tmp_path)])


def test_a_page_is_one_file_with_a_note_for_each_record(found):
    page = record_page(found, command="meshwright report <records>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "meshwright report &lt;records&gt;" in page
    for title in ("Throughput", "Loss", "Memory", "Scaling", "Predicted and measured", "Serving", "Cost", "Endnotes"):
        assert f"<h2>{title}</h2>" in page
    assert page.count("meshwright train run.yaml") >= 2
    assert "for pipeline timeline: a run file" in page.lower()


def test_text_of_records_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    write_training(tmp_path / "one", run__plan_in_words=evil, command=["x", evil], notes=[evil])
    page = record_page(collect([str(tmp_path)]))
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.when_touched  # test_a_page_is_one_file_with_a_note_for_each_record has the figures
def test_markdown_and_figures(found, tmp_path):
    text = markdown(found)
    assert "| on-8 | training | llama3.1-8b, pretrain, 8,192 tokens | h100 | 8 |" in text
    assert text.count("\n## ") >= 8
    (path, *others) = write_figures(list(figures_of(found))[:2], folder=tmp_path / "svg", form="svg")
    assert path.name == "01-throughput-by-record.svg"
    assert len(others) == 1
    assert path.read_text().startswith("<svg")


@pytest.mark.parametrize("form", ["svg", "png"])
def test_names_that_no_xml_holds_are_drawn_as_escapes(tmp_path, form):
    script = f"""
import altair, pathlib
from meshwright.report.figures import write_figures
chart = altair.Chart(altair.Data(values=[{{"a": "n\\x1b[31m\\udcff\\uffff"}}])).mark_bar().encode(y="a:N")
(path,) = write_figures([("name", chart)], folder=pathlib.Path({str(tmp_path)!r}), form={form!r})
data = path.read_bytes()
assert {form!r} == "png" or all(text in data for text in (b"x1b", b"udcff", b"uffff")), data
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr  # a panic of the library would end the process


def test_without_the_package_that_draws_a_page_says_which_figures_are_left_out(found, monkeypatch, tmp_path):
    drawn = record_page(found).count("<svg")
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    page = record_page(found)
    assert drawn > 0
    assert "<svg" not in page
    assert "The figure “Throughput by record” is left out" in page
    with pytest.raises(InputError, match="vl-convert-python"):
        write_figures(figures_of(found), folder=tmp_path / "none", form="png")
    assert not (tmp_path / "none").exists()


def test_scaling_takes_the_best_record_of_each_size(found):
    text = markdown(found)
    assert "| 16 | 74,896 | 4,681 | 50.0% |" in text


def test_cost_by_hand(found):
    values = [v for v in found.costed if v.workload == "on-8"]
    (row,) = cost_rows(values, PriceTerms(usd_per_device_hour=2.0, utilization=0.5), tokens={"on-8": 1e9})
    # One device: 9,362 tokens/s for 2 USD an hour, half of the time.
    assert row.usd_per_million_tokens == pytest.approx(2.0 / (9362 * 3600 * 0.5) * 1e6)
    assert row.usd_per_run == pytest.approx(1000 * row.usd_per_million_tokens)
    assert row.low < row.usd_per_million_tokens < row.high


def test_the_catalogues_prices_have_region_date_and_source(found):
    values = [v for v in found.costed if v.workload == "on-8"]
    rows = cost_rows(values, PriceTerms())
    documents, market = rows[:2], rows[2:]
    assert [(r.usd_per_device_hour, r.date) for r in documents] == [(12.29, "2025-06-10"), (15.977, "2025-06-10")]
    assert all("Azure" in r.offer and "Signal65" in r.source for r in documents)
    # Today's market stands beside them, each offer with its date and source.
    assert len(market) == 6
    assert [r.usd_per_device_hour for r in market] == sorted(r.usd_per_device_hour for r in market)
    assert all(r.date > "2026-08" and r.source for r in market)
    (only,) = cost_rows(values, PriceTerms(region="West US"))
    assert only.usd_per_device_hour == 15.977


def test_a_region_without_prices_is_refused(found):
    with pytest.raises(InputError, match="no price is known in this region"):
        cost_rows(found.costed, PriceTerms(region="Mars"))


def test_owning_holds_power_and_the_licence(found):
    values = [v for v in found.costed if v.workload == "on-8"]
    own = Ownership(capital_usd=40_000.0)
    (free,) = cost_rows(values, PriceTerms(ownership=own))
    (paid,) = cost_rows(values, PriceTerms(ownership=own, licence_usd_per_device_year=4000.0))
    assert paid.usd_per_device_hour - free.usd_per_device_hour == pytest.approx(4000 / 8766, rel=1e-3)
    dearer = Ownership(capital_usd=40_000.0, usd_per_kwh=own.usd_per_kwh * 2)
    assert cost_rows(values, PriceTerms(ownership=dearer))[0].usd_per_device_hour > free.usd_per_device_hour
    names = {s.what for s in sensitivities(values[0], PriceTerms(ownership=own))}
    assert names == {
        "utilisation",
        "licence per device and year",
        "tokens/s of a device",
        "electricity",
        "years of life",
    }


def test_each_sensitivity_spans_the_base_case(found):
    value = next(v for v in found.costed if v.workload == "on-8")
    base = usd_per_million(*_first(value))
    rows = sensitivities(value, PriceTerms())
    assert {r.what for r in rows} == {"offer", "utilisation", "licence per device and year", "tokens/s of a device"}
    assert all(r.low <= base * 1.0001 and base <= r.high * 1.0001 for r in rows)
    widths = [r.high - r.low for r in rows]
    assert widths == sorted(widths, reverse=True)


def _first(value):
    from meshwright.answers.overview.cost import hour_prices

    return hour_prices(value.conditions["accelerator"], PriceTerms())[0][0], value.value


@pytest.mark.when_touched  # test_a_page_is_one_file_with_a_note_for_each_record has the page
def test_a_device_without_a_price_has_no_cost(tmp_path):
    write_training(tmp_path / "one", device__accelerator=None, device__name="AMD EPYC")
    found = collect([str(tmp_path)])
    assert cost_rows(found.costed, PriceTerms()) == []
    assert "for cost: a throughput" in record_page(found)


def test_served_tokens_have_a_price_where_the_record_names_devices(tmp_path):
    device = {"name": "h200", "accelerator": "h200", "count": 8, "source": "given with --device"}
    write_serving(tmp_path / "named", device=device)
    write_serving(tmp_path / "unnamed")
    terms = PriceTerms(usd_per_device_hour=3.6)
    named, unnamed = (collect([str(tmp_path / n)], terms=terms) for n in ("named", "unnamed"))
    rows = cost_rows(named.costed, terms)
    assert [r.accelerator for r in rows] == ["h200", "h200"]  # one for each load
    # 8 in flight: the middle of three repeats is 408 tokens/s of eight devices.
    assert rows[1].usd_per_million_tokens == pytest.approx(1e6 * 3.6 / (3600 * 408 / 8))
    assert cost_rows(unnamed.costed, terms) == []
    assert "Cost" in record_page(named)
    assert {r.date for r in cost_rows(named.costed, PriceTerms())} >= {"2025-06-10", "2026-10-24"}


@pytest.mark.parametrize(
    ("device", "field"),
    [("h200", "device"), ({"accelerator": ["h200"]}, "device.accelerator"), ({"count": "many"}, "device.count")],
    ids=["text", "list", "count"],
)
def test_a_damaged_device_of_a_server_is_named(tmp_path, device, field):
    folder = write_serving(tmp_path / "server", device=device)
    with pytest.raises(InputError) as refused:
        collect([str(folder)])
    assert "serving.json" in refused.value.message
    assert field in refused.value.message


def test_an_accelerator_without_a_price_is_named(found):
    (value,) = (v for v in found.costed if v.workload == "on-8")
    without = replace(value, conditions={**value.conditions, "accelerator": "mi355x"})
    values = [value, without]
    assert unpriced(values, cost_rows(values, PriceTerms())).startswith("No price of mi355x is known: --price")
    assert unpriced(values, cost_rows(values, PriceTerms(usd_per_device_hour=2.0))) == ""
    table = cost_table(cost_rows([value], PriceTerms()), missing="")
    assert "USD per run" not in table.headings


def test_records_of_equal_folder_names_stay_apart(tmp_path):
    for parent in ("a", "b"):
        write_training(tmp_path / parent / "tuned")
    names = [entry.name for entry in collect([str(tmp_path / "a" / "tuned"), str(tmp_path / "b" / "tuned")]).entries]
    assert names == ["tuned", str(tmp_path / "b" / "tuned")]
