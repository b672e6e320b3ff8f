from collections.abc import Callable

from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.rows import PublishedRun

ReadMany = Callable[..., list[PublishedRun]]

RESULT: dict[str, object] = {
    "source_key": "mlperf_v4.0", "task": "lora", "model": "Llama-2-70B", "gbs": 8, "grad_accum": 4,
    "tp": 4, "pp": 1, "cp": 1, "dp": 2,
}  # fmt: skip
SILENT = RESULT | {"tp": "", "pp": "", "cp": "", "dp": "", "mbs": ""}


def test_a_silent_result_gets_the_only_parallelism_of_its_duplicates(read_many: ReadMany) -> None:
    stated, silent = read_many(RESULT, SILENT)
    assert stated.conditions
    assert silent.conditions
    assert silent.conditions.plan == stated.conditions.plan
    assert any(note.startswith("parallelism TP4") for note in silent.assumed)


def test_duplicates_that_disagree_or_differ_in_batch_are_ignored(read_many: ReadMany) -> None:
    for others in ([RESULT, RESULT | {"tp": 2, "dp": 4}], [RESULT | {"gbs": 16}]):
        assert read_many(*others, SILENT)[-1].reason is Reason.NO_PARALLELISM


def test_only_benchmark_results_have_duplicates(read_many: ReadMany) -> None:
    elsewhere = {"source_key": "a_blog"}
    assert read_many(RESULT | elsewhere, SILENT | elsewhere)[1].reason is Reason.NO_PARALLELISM


RECIPE: dict[str, object] = {"source_key": "vendor", "tp": 1, "pp": 2, "cp": 1, "dp": 4, "vpp": 4}


def test_missing_virtual_stages_are_those_of_the_recipe(read_many: ReadMany) -> None:
    stated, silent = read_many(RECIPE, RECIPE | {"vpp": "", "num_gpus": 16, "dp": 8})
    assert stated.conditions
    assert silent.conditions
    assert silent.conditions.plan.virtual_pipeline == stated.conditions.plan.virtual_pipeline == 4
    assert "virtual stages VPP4, as its other rows state" in silent.assumed


def test_virtual_stages_of_another_recipe_or_source_say_nothing(read_many: ReadMany) -> None:
    for change in ({"mbs": 2}, {"source_key": "blog"}, {"task": "sft"}):
        silent = read_many(RECIPE, RECIPE | {"vpp": ""} | change)[1]
        assert silent.conditions
        assert silent.conditions.plan.virtual_pipeline == 1
        assert "no virtual stages" in silent.assumed
