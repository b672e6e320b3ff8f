"""`meshwright inference`: a group of commands; each projects serving or offline inference."""

from __future__ import annotations

from meshwright.cli.verbs import Verb, verb_group

SECTION = "What to project"

command = verb_group(
    "inference",
    about="""Project serving and offline inference: memory, rates, layouts, price.

Nothing is run, and no tensor framework is needed. `capacity` is arithmetic; the others state an interval.""",
    verbs={
        "capacity": Verb(
            target="meshwright.cli.commands.inference_capacity:command",
            section=SECTION,
            help="Compute the sessions and tokens that fit into memory.",
        ),
        "estimate": Verb(
            target="meshwright.cli.commands.inference_estimate:command",
            section=SECTION,
            help="Estimate latencies, rates, memory and price of a server.",
        ),
        "plan": Verb(
            target="meshwright.cli.commands.inference_plan:command",
            section=SECTION,
            help="Find the serving layout with most tokens/s under bounds of TTFT and ITL.",
        ),
        "calibrate": Verb(
            target="meshwright.cli.commands.inference_calibrate:command",
            section=SECTION,
            help="Fit the constants of one server to records of `meshwright bench serve`.",
        ),
        "accuracy": Verb(
            target="meshwright.cli.commands.inference_accuracy:command",
            section=SECTION,
            help="Predict published inference points and report the errors.",
        ),
    },
    examples=[
        "meshwright inference capacity --model llama3.1-405b --cluster mi355x-1x1 --precision fp4",
        "meshwright inference accuracy --leave-one-source-out",
    ],
)
