"""A benchmark of the shape of a proxy, with an easy target: a run takes seconds."""

from __future__ import annotations

from pathlib import Path

from meshwright.mlperf.benchmarks import PROXIES

SMOKE = {  # of proxy_pretrain_xs
    'value = 1.6': 'value = 4.5',
    'interval = "ceil(128 /': 'interval = "ceil(32 /',
    "samples = 128": "samples = 16",
    "(ceil(128 / global_batch_size) * ": "(ceil(32 / global_batch_size) * ",
    "* ceil(128 / global_batch_size)\"": "* ceil(32 / global_batch_size)\"",
    'rcp = "proxy_pretrain_xs_rcp.json"\nruleset_file = "proxy_pretrain_xs_ruleset.yaml"': "",
}  # fmt: skip


def write_smoke(path: Path) -> None:
    """Write the file of the benchmark."""
    text = (PROXIES / "proxy_pretrain_xs.toml").read_text()
    for old, new in SMOKE.items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
