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

arguments = sys.argv[1:]
assert arguments[:3] == ["-m", "meshwright", "train"], arguments
assert {"--only-steps", "--json"} <= set(arguments)
folder = Path(arguments[arguments.index("--out") + 1])
overrides = dict(a.removeprefix("--set=").split("=", 1) for a in arguments if a.startswith("--set="))
micro, steps = int(overrides.get("batch.micro", 1)), int(overrides["train.steps"])
number = int(folder.name)


def leave(message: str, exit_code: int) -> None:
    print(json.dumps({"error": {"message": message, "hint": None, "exit_code": exit_code}}))
    sys.exit(exit_code)


step_s, device, rest = 0.1 / micro * (1 + 0.01 * number), "a device", []
behaviour = json.loads(Path("behaviour.json").read_text()) if Path("behaviour.json").exists() else {}
for key, what in behaviour.items():
    word, _, at = key.partition("@")
    if not any(word in a for a in arguments) or (at and int(at) != number):
        continue
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
        case "leave nothing":
            sys.exit(0)
        case "unpredicted":
            rest.append("unpredicted")
        case "slow":
            step_s *= 3
        case "elsewhere":
            device = "another device"
predicted = {
    "step": {
        "value": 0.1 / micro,
        "low": 0.09 / micro,
        "high": 0.12 / micro,
        "unit": "s",
        "tier": "measured",
    },
    "mfu": {"value": 0.4, "low": 0.3, "high": 0.5, "unit": "ratio", "tier": "measured"},
    "memory_bytes": 2**30,
}
record = {
    "run": {
        "model": {"name": "tiny"}, "precision": {"name": "bf16"}, "plan": {"micro_batch": micro},
        "plan_in_words": f"DP1 ddp mbs{micro}", "global_batch": 4, "sequence_length": 16,
    },
    "statistics": {
        "num_devices": 1, "model_flops_per_token": 1e6, "peak_flops_per_s": 1e9, "mfu_convention": "model FLOPs",
        "peak_memory_bytes": 2**29, "first_loss": 4.0, "last_loss": 3.5,
    },
    "device": {
        "accelerator": None, "type": "cpu", "name": device, "count_on_this_machine": 1, "memory_bytes": 2**34,
        "threads": 2, "system": "a system",
    },
    "software": {"torch": "2.13.0"},
    "predicted": None if rest else predicted,
    "git_commit": "abc",
}  # fmt: skip
warm_up = 3  # slow ones, which must not count
times = [10.0] * min(warm_up, steps) + [step_s] * (steps - warm_up)
(folder / "steps.jsonl").write_text("".join(json.dumps({"step_s": s}) + "\n" for s in times))
(folder / "record.json").write_text(json.dumps(record))
