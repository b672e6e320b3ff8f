"""`meshwright import`: the configuration of another engine as a run file."""

from __future__ import annotations

from typing import Any

import click

from meshwright.api.configurations import CLUSTER, import_run, survey_configurations
from meshwright.api.question import ask
from meshwright.cli.output import emit, emit_text, emitted_json, exit_unless, note, print_line, print_text_tables
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.targets import load

OF_SURVEYS = ("cluster", "ignore")


@verb("import", question="meshwright.api.configurations:import_run", without=("cluster",))
@click.option("--cluster", metavar=CLUSTER.metavar, help=CLUSTER.about)
@click.option("--survey", is_flag=True, help="Say of every configuration below the folder CONFIG whether it is read.")
@click.option("--lint", is_flag=True, help="Review the run in place of printing it.")
def command(*, asked: dict[str, Any], survey: bool, lint: bool) -> None:
    """Read the configuration of another engine as a run file.

    The run file is printed, or written to --out. Without --engine, the content of the file shows whose it is.

    CONFIG for torchtitan: MODULE:FUNCTION of a configuration module (`llama3:llama3_8b`, `path/to/module.py:train`),
    which is read as text and not run, with the modules of its project and of torchtitan; or a TOML file of versions up
    to 0.2.

    CONFIG for MaxText: a YAML file, or a shell script that runs it, with settings behind it in one argument
    (`"llama3_8b.yml steps=10"`).

    CONFIG for Megatron-LM: a shell script that calls pretrain_gpt.py, a file of its arguments (NAME.args), or the YAML
    of its tests, with options behind it (`"train.sh TP=4 --vocab-size 32000"`). For Megatron-Bridge: the YAML of its
    configurations, as in its checkpoints, with overrides in files and behind it
    (`"run_config.yaml more.yaml train.train_iters=100"`). For Primus: its YAML.

    CONFIG for a trainer on PyTorch's FSDP or DeepSpeed: YAML or JSON of TrainingArguments of Hugging Face transformers,
    TRL, axolotl, LLaMA-Factory, torchtune or litgpt, or a program in Python that calls TRL or Unsloth, with files of
    accelerate and DeepSpeed and with settings behind it (`"train.yaml accelerate.yaml max_steps=100"`), or a folder
    with these files. The run is of the native engine, and its estimate of the trainer's software.

    --survey prints a table of all configurations below a folder, recognised by their content: read, read with notes,
    or refused with the first reason; --json has all reasons. Nothing of the folder is executed. Without --cluster,
    each file is read on 512 H100s, else on the first number of nodes that its degrees fill.

    --lint says what a reviewer would: what stops the run, values that are assumed, deprecated keys, options that do
    nothing, and the plan that `plan` takes, with its gain. Exits with 1 when the run cannot start so.

    Every setting that a run file cannot express is refused or noted. So is what `estimate` and the engine find
    wrong with the run: a batch that is not divisible, a plan that does not fit, flags that contradict each other.
    """
    if survey:
        _survey(asked | {"lint": lint})
        return
    if asked["cluster"] is None:
        raise InputError("missing option '--cluster'", hint="see `meshwright import --help`")
    found = ask(import_run, asked)
    if lint:
        findings = load("meshwright.answers.run_lint:review")(found)
        rows = [{"level": level, "text": text} for level, text in findings]
        emit({"findings": rows}, lambda _: print_line("\n".join(map(": ".join, findings))))
        exit_unless(all(level != "error" for level, _ in findings))
        return
    if emitted_json(found):
        return
    if found.file is None:
        emit_text(found.text)
    note(*found.notes)


def _survey(asked: dict[str, Any]) -> None:
    """Print what `import` reads of every configuration below a folder."""
    folder, given = asked.pop("source"), {key: asked.pop(key) for key in OF_SURVEYS}
    if others := [f"--{'out' if key == 'file' else key.replace('_', '-')}" for key, value in asked.items() if value]:
        raise InputError("--survey does not go with", got=", ".join(others), allowed="--cluster, --ignore, --json")
    found = ask(survey_configurations, {"folder": folder, **given})
    if emitted_json(found):
        return
    if found.files:
        print_text_tables(found.tables())
        print_line()
    print_line(found.summary())
