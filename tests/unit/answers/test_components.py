import pytest

from meshwright.answers.components import COMPONENTS, ComponentFamily, bound_by, by_family, shown_components


def test_every_component_of_a_step_has_a_name(flat, pipelined):
    named = flat.estimate.step.components_s | pipelined.estimate.step.components_s
    assert set(named) - set(COMPONENTS) == set()


def test_what_is_told_is_all_but_the_negligible(pipelined):
    components = pipelined.estimate.step.components_s
    shown = shown_components(components)
    assert sum(shown.values()) == pytest.approx(sum(components.values()), rel=0.01)
    assert list(shown) == [name for name in COMPONENTS if name in shown]
    assert "context_parallel" not in shown


def test_families_add_up_to_the_step():
    families = by_family({"ffn": 2.0, "attention_core": 1.0, "bubble": 4.0, "tensor_parallel": 0.5})
    assert list(families.items())[:2] == [(ComponentFamily.WAITING, 4.0), (ComponentFamily.MATRIX, 3.0)]
    assert sum(families.values()) == 7.5


def test_a_step_that_waits_is_bound_by_waiting():
    assert bound_by({"ffn": 1.0, "bubble": 3.0}) == "waiting 75 %, bubble 75 %"
