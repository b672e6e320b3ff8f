"""Stands where `python` does in `python -m meshwright train`: leaves what a training leaves, at once.

`behaviour.json` in the working folder says what goes wrong: {"WORD@NUMBER": WHAT} for trainings whose arguments hold
WORD and that are the NUMBER-th of their configuration; without @NUMBER all of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WARM_UP = [10.0] * 3  # seconds of the first steps, which must not count


def main(arguments: list[str]) -> None:
    assert arguments[:3] == ["-m", "meshwright", "train"], arguments
    assert {"--only-steps", "--json"} <= set(arguments)
    folder = Path(arguments[arguments.index("--out") + 1])
    overrides = dict(a.removeprefix("--set=").split("=", 1) for a in arguments if a.startswith("--set="))
    micro, steps = int(overrides.get("batch.micro", 1)), int(overrides["train.steps"])
    asked = {what for key, what in behaviour().items() if is_meant(key, arguments, int(folder.name))}
    for what in asked:
        go_wrong(what)
    if "leave nothing" in asked:
        return
    step_s = 0.1 / micro * (1 + 0.01 * int(folder.name)) * (3 if "slow" in asked else 1)
    times = (WARM_UP + [step_s] * steps)[:steps]
    (folder / "steps.jsonl").write_text("".join(json.dumps({"step_s": s}) + "\n" for s in times))
    record = record_of(micro) | ({"predicted": None} if "unpredicted" in asked else {})
    record["device"]["name"] = "another device" if "elsewhere" in asked else "a device"
    (folder / "record.json").write_text(json.dumps(record))


def behaviour() -> dict[str, str]:
    path = Path("behaviour.json")
    return json.loads(path.read_text()) if path.exists() else {}


def is_meant(key: str, arguments: list[str], number: int) -> bool:
    word, _, at = key.partition("@")
    return any(word in argument for argument in arguments) and at in ("", str(number))


def go_wrong(what: str) -> None:
    match what:
        case "out of memory":
            leave("internal error: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 70)
        case "refuse":
            leave("the native engine cannot do this run: precision: no fp8 here", 2)
        case "diverge":
            leave("step 2: the loss is not a number", 1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path("pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)


def leave(message: str, exit_code: int) -> None:
    print(json.dumps({"error": {"message": message, "hint": None, "exit_code": exit_code}}))
    sys.exit(exit_code)


def record_of(micro: int) -> dict:
    step = {"value": 0.1 / micro, "low": 0.09 / micro, "high": 0.12 / micro, "unit": "s", "tier": "measured"}
    mfu = {"value": 0.4, "low": 0.3, "high": 0.5, "unit": "ratio", "tier": "measured"}
    return {
        "run": {
            "model": {"name": "tiny"}, "precision": {"name": "bf16"}, "plan": {"micro_batch": micro},
            "plan_in_words": f"DP1 ddp mbs{micro}", "global_batch": 4, "sequence_length": 16,
        },
        "statistics": {
            "num_devices": 1, "model_flops_per_token": 1e6, "peak_flops_per_s": 1e9,
            "mfu_convention": "model FLOPs", "peak_memory_bytes": 2**29, "first_loss": 4.0, "last_loss": 3.5,
        },
        "device": {
            "accelerator": None, "type": "cpu", "count_on_this_machine": 1, "memory_bytes": 2**34,
            "threads": 2, "system": "a system",
        },
        "software": {"torch": "2.13.0"},
        "predicted": {"step": step, "mfu": mfu, "memory_bytes": 2**30},
        "git_commit": "abc",
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
