from itertools import pairwise

import pytest

from meshwright.answers.stages import after_pipeline, pipeline_s, step_timeline


@pytest.mark.parametrize("name", ["flat", "pipelined"])
def test_the_timeline_and_what_follows_end_with_the_step(request, name):
    estimate = request.getfixturevalue(name).estimate
    drawn = step_timeline(estimate)
    assert drawn.step_s == pytest.approx(pipeline_s(estimate))
    assert drawn.end_s.max() == pytest.approx(drawn.step_s)
    spans = [track.spans[0] for track in after_pipeline(estimate)]
    assert spans[0].start_s == pytest.approx(drawn.step_s)
    assert all(a.end_s == b.start_s for a, b in pairwise(spans))
    assert spans[-1].end_s == pytest.approx(estimate.step.step.value)


def test_a_step_without_a_pipeline_is_one_rank(flat):
    drawn = step_timeline(flat.estimate)
    assert drawn.graph.shape.num_ranks == 1
    assert drawn.bubble_ratio == pytest.approx(0)
