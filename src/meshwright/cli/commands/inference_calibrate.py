"""`meshwright inference calibrate`: options and help."""

from __future__ import annotations

from meshwright.cli.options import file_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "calibrate",
    question="meshwright.api.inference:inference_calibrate",
    body="meshwright.cli.inference_calibrate:run",
    examples=[
        "meshwright inference calibrate bench-serve --cluster cpu-1x1 --out llamacpp.json",
        "meshwright inference calibrate a100/* --cluster a100-1x1 --model llama3.1-8b --precision bf16 --engine vllm",
    ],
)
@file_option("--out", help="Calibration file to write.  [default: ENGINE-ACCELERATOR.json]")
@json_option
def command() -> None:
    """Fit the constants of one server to records of `meshwright bench serve`.

    RECORDS are folders of closed loops on one kind of server: other models, lengths and loads are predicted best from
    several of each. Equal loads of several folders are repeats. `estimate`, `plan` and `accuracy` read the file with
    --calibration.

    The error of each quantity is printed twice: fitted, and held out, where each model with its lengths is predicted
    from the others.
    """
