"""Two runs that are estimated once, one without a pipeline and one with, and a browser for pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import vl_convert
from tests.browser import Browser, open_browser

from meshwright import runfile
from meshwright.report.run_estimate import RunEstimate, estimate_run

EXAMPLES = Path(__file__).parents[3] / "examples" / "runs"

PIPELINED = """
model: llama3-8b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
precision: bf16
cluster: h100-8x4
parallel: {tensor: 2, pipeline: 4, virtual_pipeline: 2}
engine: megatron
costs: {usd_per_device_hour: 2.0}
train: {tokens: 1e10}
"""


@pytest.fixture(autouse=True, scope="session")
def _equal_figures_are_drawn_once() -> Iterator[None]:
    """Pages of one training with other words have the same figures."""
    draw, drawn = vl_convert.vegalite_to_svg, {}

    def once(spec: Mapping[str, object]) -> str:
        key = json.dumps(spec, sort_keys=True, default=str)
        if key not in drawn:
            drawn[key] = draw(spec)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "vegalite_to_svg", once)
        yield


@pytest.fixture(scope="session")
def flat() -> RunEstimate:
    return estimate_run(runfile.load(EXAMPLES / "llama3.1-8b-pretrain.yaml"))


@pytest.fixture(scope="session")
def pipelined() -> RunEstimate:
    return estimate_run(runfile.loads(PIPELINED, file="pipelined.yaml"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found
