"""Pages of serving estimates and plans."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshwright as mw

ASKED = {"model": "llama3.1-70b", "precision": "fp8", "input_tokens": 1024, "output_tokens": 256}


def page_of(found, tmp_path) -> str:
    found.write_html(tmp_path / "page.html", command="meshwright inference ...")
    return (tmp_path / "page.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


def test_a_plan_draws_its_front_its_bound_and_every_layout(tmp_path):
    found = mw.inference_plan(**ASKED, cluster="h100-8x1", itl_s=0.05)
    page = page_of(found, tmp_path)
    assert page.count("<svg") >= 1
    assert "The bound of 50.00 ms is 20 tokens/s of one user." in page
    for verdict in found.search.verdicts:
        assert verdict.layout.describe() in page
    assert "Under arrivals" not in page
    assert "meshwright inference ..." in page


def test_under_a_rate_the_share_of_requests_is_drawn_with_its_percentiles(tmp_path):
    found = mw.inference_estimate(**ASKED, cluster="h100-8x1", layout={"tensor": 2}, requests_per_s=8, ttft_s=2)
    page = page_of(found, tmp_path)
    assert "Under arrivals" in page
    assert "share of requests within it" in page
    assert found.arrivals is not None
    assert f"{1e3 * float(np.percentile(found.arrivals.simulated.ttft_s, 99)):.1f} ms" in page


@pytest.mark.parametrize(("loads", "curves"), [((1, 8, 64), 1), ((8,), 0)])
def test_an_estimate_draws_a_curve_of_several_loads_alone(tmp_path, loads, curves):
    found = mw.inference_estimate(**ASKED, cluster="h100-8x1", layout={"tensor": 2}, concurrency=loads)
    page = page_of(found, tmp_path)
    assert len(re.findall("tokens/s of one user", page)) >= curves
    assert ("<svg" in page) == bool(curves)
    assert "per million output tokens" in page


def test_answers_of_one_token_have_no_speed_to_draw(tmp_path):
    found = mw.inference_plan(**(ASKED | {"output_tokens": 1}), cluster="h100-8x1")
    assert "<svg" not in page_of(found, tmp_path)
