import re

import pytest

from meshwright.answers.stages import step_timeline
from meshwright.report import timeline_blocks
from meshwright.report.timeline import legend, timeline_svg, windows


def test_a_short_step_is_drawn_whole_and_a_long_one_at_both_ends(pipelined, monkeypatch):
    step = step_timeline(pipelined.estimate)
    assert windows(step) == [(0.0, step.step_s)]
    monkeypatch.setattr(timeline_blocks, "MAX_DRAWN_PER_RANK", 16)
    (start, first), (second, end) = windows(step)
    assert (start, end) == (0.0, step.step_s)
    assert first == pytest.approx(end - second)
    assert first / step.step_s == pytest.approx(16 / (step.graph.num_ops / 4) / 2)
    assert "⋯" in timeline_svg(step)


def test_every_operation_of_a_whole_step_is_a_block(pipelined):
    step = step_timeline(pipelined.estimate)
    wide, narrow = (f"<svg{part}" for part in timeline_svg(step).split("<svg")[1:])
    assert len(re.findall(r"M[\d.]+ ", wide)) == step.graph.num_ops == 4 * 2 * 2 * 16
    assert wide.count('text-anchor="end">rank') == 4
    for _, color in legend(step):
        assert color in wide
        assert color in narrow


def test_a_phone_has_the_same_time_on_several_lines(pipelined):
    step = step_timeline(pipelined.estimate)
    wide, narrow = timeline_svg(step).split("<svg")[1:]
    assert 'class="timeline for-wide"' in wide
    assert 'class="timeline for-narrow"' in narrow
    # 64 blocks of a rank: two lines, each with its ranks; the first ends where the second begins.
    assert narrow.count('text-anchor="end">rank') == 2 * 4
    begins = re.findall(r'text-anchor="start">([^<]+)<', narrow)
    ends = re.findall(r'text-anchor="end">([^r<][^<]*)<', narrow)
    assert ends[:-1] == begins[1:]
    assert begins[0] == "0"
    lengths = [sum(map(float, re.findall(r"h([\d.]+)v", svg))) for svg in (wide, narrow)]
    assert lengths[1] / (2 * (350 - 52)) == pytest.approx(lengths[0] / (960 - 64), rel=0.02)
