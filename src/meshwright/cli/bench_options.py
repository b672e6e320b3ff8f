"""Options that the commands of `meshwright bench` share."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import Decorator, count_option, seconds_option


def server_option(*, help: str) -> Decorator:
    """--server: a server that the command starts."""
    return click.option("--server", type=click.Choice(["llamacpp", "vllm", "sglang", "mock"]), help=help)


def settings_option(name: str, destination: str, *, help: str) -> Decorator:
    """KEY=VALUE of the program that is measured."""
    about = f"{help} May be repeated."
    return click.option(name, destination, multiple=True, metavar="KEY=VALUE", help=about)


def start_timeout_option(*, server: str) -> Decorator:
    """--start-timeout of `server`."""
    about = f"Time in which {server} must answer."
    return seconds_option("--start-timeout", "start_timeout_s", low=1, default=600.0, help=about)


def request_timeout_option(*, default: float) -> Decorator:
    """--timeout of one request."""
    about = "Time after which one request is given up."
    return seconds_option("--timeout", "timeout_s", low=0.1, default=default, help=about)


def tokenizer_option(*, help: str) -> Decorator:
    """--tokenizer: tokenizer.json, or its folder."""
    kind = click.Path(path_type=Path)
    return click.option("--tokenizer", "tokenizer_path", type=kind, metavar="PATH", help=help)


def seed_option(*, of: str) -> Decorator:
    """--seed, 0 unless given."""
    return count_option("--seed", low=0, default=0, help=f"Seed of {of}.")


def repeats_option(*, of: str) -> Decorator:
    """--repeats, 1 unless given."""
    about = f"Measurements of {of}. Six or more have a 95 % interval."
    return count_option("--repeats", high=1000, default=1, help=about)
