"""Values that rows do not state, where the usual ones would not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.feasible import with_what_fits
from meshwright.accuracy.layout import IN_NODES, OFFLOADED, WHOLE_BATCH
from meshwright.accuracy.recomputation import NO_RECOMPUTATION
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.catalog import lookup as catalog
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Plan, Recompute, Sharding

PLAN = Plan(data_shard=64, sharding=Sharding.PARAMETERS, micro_batch=1)


def conditions(*, model: str = "llama3-70b", batch: int = 64, plan: Plan = PLAN) -> RunConditions:
    return RunConditions(
        model=catalog.model(model), lora=None, accelerator=catalog.accelerator("h100"), devices_per_node=8,
        num_nodes=8, fabric_hint="", seq_len=8192, global_batch=batch, plan=plan, precision="bf16",
        stack=Stack(framework="torchtitan"),
    )  # fmt: skip


def test_what_cannot_fit_was_recomputed() -> None:
    ((found, notes),) = with_what_fits([(conditions(), (NO_RECOMPUTATION,))])
    assert found
    assert found.plan.recompute is Recompute.FULL
    assert "does not fit" in notes[0]
    assert memory_of([found], tables_of([found])).reserved_bytes < found.accelerator.memory_bytes


def test_a_batch_that_cannot_fit_was_accumulated() -> None:
    whole = conditions(model="llama3-8b", batch=512, plan=replace(PLAN, micro_batch=8))
    ((found, notes),) = with_what_fits([(whole, (WHOLE_BATCH, NO_RECOMPUTATION))])
    assert found
    assert (found.plan.micro_batch, found.plan.recompute) == (1, Recompute.NONE)
    assert notes == ("micro-batch 1: a replica's whole batch does not fit", NO_RECOMPUTATION)


COPIES = "sharding none, the default of TRL"


def test_a_model_of_which_no_copy_fits_was_sharded() -> None:
    copies = conditions(plan=replace(PLAN, sharding=Sharding.NONE, recompute=Recompute.FULL))
    trainer = replace(copies, stack=Stack(framework="other"))
    ((found, notes),) = with_what_fits([(trainer, (COPIES,))])
    assert found
    assert found.plan.sharding is Sharding.PARAMETERS
    assert notes == ("sharding parameters: with whole copies it does not fit",)
    assert with_what_fits([(copies, (COPIES,))]) == [(copies, (COPIES,))]  # its code shards nothing else


@pytest.mark.parametrize(
    ("changed", "notes"),
    [
        (conditions(), ()),  # the row states it
        (conditions(), (NO_RECOMPUTATION, OFFLOADED)),
        (conditions(model="llama3-8b"), (NO_RECOMPUTATION, WHOLE_BATCH)),  # it fits
        (conditions(model="mixtral-8x22b"), (NO_RECOMPUTATION,)),
        (None, (NO_RECOMPUTATION,)),
    ],
)
def test_the_rest_stays(changed: RunConditions | None, notes: tuple[str, ...]) -> None:
    assert with_what_fits([(changed, notes)]) == [(changed, notes)]


def test_rows_do_not_depend_on_each_other() -> None:
    rows = [(conditions(batch=64 * n), (NO_RECOMPUTATION,)) for n in (1, 2, 3)]
    apart = [with_what_fits([row])[0] for row in rows]
    assert with_what_fits(rows) == apart
    assert np.all([c is not None and c.plan.recompute is Recompute.FULL for c, _ in apart])


@pytest.mark.parametrize(("model", "shard", "replicate"), [("llama3-70b", 64, 1), ("llama3-8b", 8, 8)])
def test_a_node_that_cannot_hold_the_parameters_was_not_the_width(model: str, shard: int, replicate: int) -> None:
    in_nodes = replace(PLAN, data_shard=8, data_replicate=8, recompute=Recompute.FULL)
    ((found, _),) = with_what_fits([(conditions(model=model, plan=in_nodes), (f"{IN_NODES} 8 ranks of a node",))])
    assert found
    assert (found.plan.data_shard, found.plan.data_replicate) == (shard, replicate)
