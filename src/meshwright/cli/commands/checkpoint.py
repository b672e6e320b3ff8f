"""`meshwright checkpoint`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import StepType, json_option
from meshwright.cli.verbs import verb


@verb(
    "checkpoint",
    body="meshwright.cli.checkpoint:run",
    examples=[
        "meshwright checkpoint show run.yaml",
        "meshwright checkpoint verify checkpoints/llama",
        "meshwright checkpoint to-hf checkpoints/llama exported/llama --step 1000 --dtype bf16",
        "meshwright checkpoint to-hf checkpoints/tuned exported/tuned --merge",
        "meshwright checkpoint from-hf run.yaml downloads/llama",
    ],
)
@click.argument("kind", metavar="ACTION", type=click.Choice(["show", "verify", "to-hf", "from-hf"]))
@click.argument("where", type=click.Path(path_type=Path))
@click.argument("weights", metavar="[DIR]", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--step", type=StepType(), metavar="N", help="Step of the checkpoint, or `best`.  [default: the newest]")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]),
    help="to-hf: number format of the weights.  [default: bf16; fp32 for adapters]",
)  # fmt: skip
@click.option("--merge", is_flag=True, help="to-hf of adapters: merge them into the base weights.")
@json_option
def command() -> None:
    """List, verify and convert checkpoints; Hugging Face weights in and out.

    \b
    show WHERE            list step, tokens, plan, model, size and date
    verify WHERE          read every file again; exits with 1 if one is damaged
    to-hf WHERE DIR       write the weights to DIR as Hugging Face safetensors
    from-hf RUN.yaml DIR  import the Hugging Face weights of DIR as step 0

    WHERE is a run file, a folder of checkpoints, or one checkpoint. --step best is the one with the lowest validation
    loss, which runs with train.checkpoint.keep_best have.

    verify names the last good checkpoint. to-hf writes the config.json and the tokenizer too, and LoRA adapters in the
    PEFT format, or with --merge merged into the base weights. from-hf also takes adapters; `meshwright train RUN.yaml
    --resume` starts from step 0.
    """
