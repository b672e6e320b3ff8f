"""The torchtitan engine: TorchTitan 0.3.0, unpatched. Runs that it does not support are refused.

contract       the functions that `engines.base` requires
facts          the facts that the planner uses
check          the parts of a run that torchtitan 0.3.0 does not support
lower          a run as a configuration module
exporting      checkpoints as Hugging Face weights
worker         a process of a training: starts torchtitan's trainer on a configuration module
probe          devices and versions, detected in a separate process
results        names of the files and checkpoints that the processes write

config_module           the model of a configuration module, and the Python source of it
config_text, config_trees    configurations of 0.3.0 for importing: programs, read as text, and their trees
toml_files              configurations of versions up to 0.2 for importing
in_torchtitan_process   code that imports torchtitan: data, learning rates and step log through its extension points
"""

VERSION = "0.3.0"
