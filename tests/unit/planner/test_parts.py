"""Plans on clusters of two generations."""

import pytest

from meshwright import catalog, runfile
from meshwright.errors import InputError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.neighbours import neighbours
from meshwright.planner.objective import goal_for
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.scaling.sizes import resized
from meshwright.planner.search import search
from meshwright.specs.plan import Plan
from meshwright.specs.run import Objective


def request(cluster: str, model: str = "llama3.1-70b") -> PlanRequest:
    return request_for(
        runfile.from_options(model=model, cluster=cluster, global_batch=512, sequence_length=8192)
    )


PLAN = Plan(tensor=4, pipeline=4, data_shard=8)


def test_the_slowest_part_sets_the_pace():
    both, slow, fast = (request(name) for name in ("h100-8x8+h200-8x8", "h100-8x16", "h200-8x16"))
    steps = [estimate_plan(r, PLAN).step.step.value for r in (both, slow, fast)]
    assert steps[0] == pytest.approx(steps[1])
    assert steps[0] > steps[2]


def test_memory_is_that_of_the_smallest_part():
    assert request("h100-8x8+h200-8x8").usable_bytes == request("h100-8x16").usable_bytes
    best = search(request("h100-8x8+h200-8x8"), top=1).best
    assert best is not None
    assert best.reserved_bytes <= request("h100-8x16").usable_bytes


def test_notes_name_the_part_that_binds():
    binding, *alone = notes_on_parts(request("h200-8x8+h100-8x8"), PLAN)
    assert "h100-8x8 sets the pace" in binding
    assert "79.6 GiB of h100-8x8" in binding
    assert [line.split()[1] for line in alone] == ["h200-8x16", "h100-8x16"]
    assert notes_on_parts(request("h100-8x16"), PLAN) == ()


def test_what_is_not_costed_is_refused():
    joint = catalog.joint_cluster("h100-8x1+h200-8x1")
    with pytest.raises(InputError, match="several prices"):
        goal_for(Objective.COST, cluster=joint)
    with pytest.raises(InputError, match="one size"):
        resized(joint, 32)
    assert resized(joint, 16) is joint
    with pytest.raises(InputError, match="for training runs"):
        runfile.named_cluster(joint.name)


def test_no_other_size_is_suggested():
    small = request("h100-8x1+h200-8x1", "llama3.1-405b")
    lacking = explain_infeasible(search(small, top=1))
    assert not any("devices" in text for text in lacking.suggestions)
    enough = request("h100-8x1+h200-8x2", "llama3.1-8b")
    best = search(enough, top=1).best
    assert all(n.num_idle == 0 for n in neighbours(enough, best=best))
