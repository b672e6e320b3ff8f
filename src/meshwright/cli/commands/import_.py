"""`meshwright import`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "import",
    question="meshwright.api.configurations:import_run",
    body="meshwright.cli.import_:run",
    examples=[
        "meshwright import llama3_8b.toml --cluster h100-8x1 --out run.yaml",
        "meshwright import llama3:llama3_8b --cluster h100-8x1 --out run.yaml",
        "meshwright import titan/meshwright_run.py --cluster h100-8x8",
        'meshwright import "train.sh --vocab-size 32000" --cluster h100-8x8',
        "meshwright import run_config.yaml --cluster h100-8x8",
    ],
)
@json_option
def command() -> None:
    """Read the configuration of another engine as a run file.

    The run file is printed, or written to --out.

    CONFIG for torchtitan: MODULE:FUNCTION of a configuration module (`llama3:llama3_8b`, `path/to/module.py:train`),
    which is evaluated in a process of its own and needs torchtitan; the JSON tree that this process prints; or a TOML
    file of versions up to 0.2.

    CONFIG for MaxText: a YAML file, with settings behind it in one argument (`"llama3_8b.yml steps=10"`).

    CONFIG for Megatron-LM: a shell script that calls pretrain_gpt.py, a file of its arguments (NAME.args), or the YAML
    of its tests, with options behind it (`"train.sh TP=4 --vocab-size 32000"`). For Megatron-Bridge: the YAML of its
    configurations, as in its checkpoints, with overrides in files and behind it
    (`"run_config.yaml more.yaml train.train_iters=100"`).

    Every setting that a run file cannot express is refused or noted. So is what `estimate` and the engine find
    wrong with the run: a batch that is not divisible, a plan that does not fit, flags that contradict each other.
    """
