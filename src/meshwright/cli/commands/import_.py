"""`meshwright import`: options and help."""

from __future__ import annotations

import click

from meshwright.api.configurations import CLUSTER
from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "import",
    question="meshwright.api.configurations:import_run",
    without=("cluster",),
    body="meshwright.cli.import_:run",
    examples=[
        "meshwright import llama3_8b.toml --cluster h100-8x1 --out run.yaml",
        "meshwright import llama3:llama3_8b --cluster h100-8x1 --out run.yaml",
        "meshwright import titan/meshwright_run.py --cluster h100-8x8",
        'meshwright import "train.sh --vocab-size 32000" --cluster h100-8x8',
        "meshwright import run_config.yaml --cluster h100-8x8",
        'meshwright import "axolotl.yml max_steps=500" --cluster h100-8x1',
        "meshwright import --survey torchtitan --json",
    ],
)
@click.option("--cluster", metavar=CLUSTER.metavar, help=CLUSTER.about)
@click.option("--survey", is_flag=True, help="Say of every configuration below the folder CONFIG whether it is read.")
@json_option
def command() -> None:
    """Read the configuration of another engine as a run file.

    The run file is printed, or written to --out. Without --engine, the content of the file shows whose it is.

    CONFIG for torchtitan: MODULE:FUNCTION of a configuration module (`llama3:llama3_8b`, `path/to/module.py:train`),
    which is evaluated in a process of its own and needs torchtitan; the JSON tree that this process prints; or a TOML
    file of versions up to 0.2.

    CONFIG for MaxText: a YAML file, or a shell script that runs it, with settings behind it in one argument
    (`"llama3_8b.yml steps=10"`).

    CONFIG for Megatron-LM: a shell script that calls pretrain_gpt.py, a file of its arguments (NAME.args), or the YAML
    of its tests, with options behind it (`"train.sh TP=4 --vocab-size 32000"`). For Megatron-Bridge: the YAML of its
    configurations, as in its checkpoints, with overrides in files and behind it
    (`"run_config.yaml more.yaml train.train_iters=100"`). For Primus: its YAML.

    CONFIG for a trainer on PyTorch's FSDP or DeepSpeed: YAML or JSON of TrainingArguments of Hugging Face transformers,
    TRL, axolotl, LLaMA-Factory, torchtune or litgpt, with files of accelerate and DeepSpeed and with settings behind it
    (`"train.yaml accelerate.yaml max_steps=100"`), or a folder with these files. The run is of the native engine, and
    its estimate of the trainer's software.

    --survey prints a table of all configurations below a folder, recognised by their content: read, read with notes,
    or refused with the first reason; --json has all reasons. Nothing of the folder is executed. Without --cluster,
    each file is read on 512 H100s, else on the first number of nodes that its degrees fill.

    Every setting that a run file cannot express is refused or noted. So is what `estimate` and the engine find
    wrong with the run: a batch that is not divisible, a plan that does not fit, flags that contradict each other.
    """
