"""TorchTitan 0.3.0 behind the contract of `engines.base`. No part of it is patched; what it lacks is refused.

    contract   what the command line sees
    check      what torchtitan 0.3.0 cannot do of a run
    lower      a run as a configuration module: `settings` around it, `models` in it, `source` writes it
    probe      what torchtitan finds on this machine, asked in a process of its own
    reading    what its processes leave behind; `engines.workers` starts them, `engines.outcome` makes the record
    importing  torchtitan's configurations back into run files: `described` evaluates them in a process of its own,
               `trees` and `model_trees` read what it prints, `contradictions` judges it; `toml_files` those up to 0.2

In torchtitan's processes:

    worker     starts its trainer on a configuration module
    parts      data in our order, our learning rates and our step log, through its own extension points
"""

VERSION = "0.3.0"
