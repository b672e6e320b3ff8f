import pytest

from meshwright.errors import InputError, UnknownNameError
from meshwright.planner.fixed import fixed_fields
from meshwright.specs.plan import Offload, Recompute, Sharding


def test_every_kind_of_value():
    words = ["tensor=8,pipeline=1_6", "sequence_parallel=false", "offload=optimizer", "recompute=full"]
    assert fixed_fields(words) == {
        "tensor": 8,
        "pipeline": 16,
        "sequence_parallel": False,
        "offload": Offload.OPTIMIZER,
        "recompute": Recompute.FULL,
    }


def test_a_list_goes_on_after_a_comma():
    found = fixed_fields(["recompute_modules=norm,mlp,sharding=gradients"])
    assert found == {"recompute_modules": ("norm", "mlp"), "sharding": Sharding.GRADIENTS}


@pytest.mark.parametrize(
    ("word", "modules"),
    [
        ("norm,feed_forward", ("feed_forward", "norm")),
        ("feed_forward+norm", ("feed_forward", "norm")),
        ("none", ()),
    ],
)
def test_stored_activations(word, modules):
    assert fixed_fields([f"stored_activations={word},weight_cache=OFF"]) == {
        "stored_activations": modules,
        "weight_cache": "off",
    }


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("stored_activations=mlp", UnknownNameError, "feed_forward, none, norm"),
        ("stored_activations=", UnknownNameError, "module with stored activations"),
        ("weight_cache=auto", InputError, "on, off"),
        ("tensor", InputError, "not an assignment"),
        ("tensr=8", UnknownNameError, "did you mean 'tensor'"),
        ("tensor=0", InputError, "whole number, 1 or more"),
        ("tensor=-2", InputError, "whole number"),
        ("tensor=²", InputError, "whole number"),
        ("tensor=", InputError, "whole number"),
        ("schedule=1f2b", InputError, "1f1b"),
        ("sharding=3", InputError, "none, optimizer, gradients, parameters"),
        ("sequence_parallel=yes", InputError, "true, false"),
        ("recompute_modules=norms", UnknownNameError, "did you mean 'norm'"),
        ("layers_per_stage=4,x", InputError, "7,8x14,7"),
        ("layers_per_stage=4,-1", InputError, "7,8x14,7"),
        ("layers_per_stage=8x99999999", InputError, "7,8x14,7"),
    ],
)
def test_what_cannot_be_fixed(word, error, message):
    with pytest.raises(error, match=message) as caught:
        fixed_fields([word])
    assert type(caught.value) is error


def test_a_field_is_fixed_once():
    assert fixed_fields(["tp=8", "tensor=8"]) == {"tensor": 8}
    with pytest.raises(InputError, match="tensor is given twice"):
        fixed_fields(["tp=8,tensor=4"])


def test_what_the_field_calls_the_data_width():
    assert fixed_fields(["dp=4"]) == fixed_fields(["data_shard=4"])
