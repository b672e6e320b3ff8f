"""The `optimizer` section: keys of other optimizers are refused, and the named optimizer gives the defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.runfile import schema
from meshwright.runfile.inline import same_fields
from meshwright.specs import run as specs
from meshwright.specs.optimizers import OPTIMIZERS, OWN_KEYS
from meshwright.specs.precision import OPTIMIZER_STATE_BYTES, Precision


def foreign_keys(section: schema.OptimizerSection) -> Iterator[tuple[str, str]]:
    """Keys that the section gives and its optimizer does not have, each with a hint."""
    own = OPTIMIZERS[section.name].keys
    for key in OWN_KEYS:
        if key in section.model_fields_set and key not in own:
            having = ", ".join(name for name, traits in OPTIMIZERS.items() if key in traits.keys)
            yield (
                key,
                f"leave it out; only {having} has it" if "," not in having else f"leave it out; {having} have it",
            )


def resolve_optimizer(section: schema.OptimizerSection) -> specs.Optimizer:
    """The optimizer with its own defaults."""
    defaults = OPTIMIZERS[section.name].defaults
    own = {key: value for key, value in defaults.items() if key not in section.model_fields_set}
    return same_fields(specs.Optimizer, section.model_copy(update=own))


def state_bytes(section: schema.OptimizerSection) -> dict[str, float]:
    """Fields of `Precision` that follow from the optimizer."""
    traits = OPTIMIZERS[section.name]
    states = section.states.value
    is_narrow = states != specs.StateFormat.FP32.value
    return {
        "optimizer_state_bytes": OPTIMIZER_STATE_BYTES[states] if is_narrow else traits.state_bytes,
        "adamw_state_bytes": traits.adamw_bytes,
        "update_bytes": traits.update_bytes,
        "newton_schulz_steps": float(section.newton_schulz_steps) if section.name == "muon" else 0.0,
    }


def precision_with(precision: Precision, name: str) -> Precision:
    """Return `precision` with the bytes of the optimizer `name` as a run file that names it alone has them."""
    return replace(precision, **state_bytes(schema.OptimizerSection.model_validate({"name": name})))
