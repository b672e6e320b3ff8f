"""Messages of usage errors, and hints that lead from the names of other tools to ours."""

from __future__ import annotations

import click

from meshwright.targets import load

COMMANDS = {
    "benchmark": "bench",
    "convert": "checkpoint",
    "diagnose": "doctor",
    "finetune": "train",
    "fine-tune": "train",
    "list": "catalog",
    "measure": "bench",
    "models": "catalog models",
    "optimize": "plan",
    "predict": "estimate",
    "pretrain": "train",
    "profile": "train --profile",
    "run": "train",
    "search": "plan",
    "simulate": "estimate",
    "start": "launch",
    "submit": "launch",
    "sweep": "bench train",
    "test": "rehearse",
}
"""Commands by names that other tools give them, for the hint of an unknown command."""

KEYS = ("task", "objective", "kernels", "train", "optimizer")
"""Keys of the run file without a name elsewhere that are tried as options."""

ADVICE = {
    "budget": "cost and days of several sizes: meshwright scale --devices 64,128,256 --tokens N",
    "gpus": "the cluster has the devices: --cluster ACCELERATOR-DEVICES_PER_NODExNODES, as in h100-8x2",
}
"""Options that nothing has by that name -> the way to an answer."""


def usage_message(error: click.ClickException) -> str:
    """The message of a usage error, in our form."""
    if isinstance(error, click.NoSuchOption):
        return f"unknown option: got {error.option_name!r}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def usage_hint(error: click.ClickException) -> str | None:
    """The option that was meant, or where to look."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption):
        if ctx is not None and (hint := _run_file_hint(error.option_name, ctx.command)):
            return hint
        if error.possibilities:
            return f"did you mean {error.possibilities[0]!r}?"
    return f"see `{ctx.command_path} --help`" if ctx else None


def _run_file_hint(option: str, command: click.Command) -> str | None:
    """Return the option that sets the run-file key which other tools call `option`; None if there is none."""
    name = option.lstrip("-")
    key = load("meshwright.runfile.synonyms:key_for")(name) or (name if name in KEYS else None)
    options = {flag for parameter in command.params for flag in parameter.opts}
    if name in ADVICE and "--cluster" in options:
        return ADVICE[name]
    if key is None:
        return None
    flags = {p.key: p.option(name) for name, p in load("meshwright.api.runs:KEYS").items()}
    if flags.get(key) in options:
        return f"the option is `{flags[key]}`"
    section, _, field = key.partition(".")
    if "--fix" in options and section == "parallel" and field:
        return f"fix a field of the plan: --fix {field}=VALUE"
    if "--set" in options:
        return f"set the key of the run file: --set {key}=VALUE"
    return None
