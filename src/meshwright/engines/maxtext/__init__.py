"""The maxtext engine: MaxText 0.2.5 in a Python environment of its own, unpatched. Unsupported runs are refused.

contract       the functions that `engines.base` requires
facts          the facts that the planner uses
check          the parts of a run that MaxText does not support
lower          a run as a configuration file
importing      configurations of MaxText as run files
exporting      checkpoints as Hugging Face weights
worker         a process of a training: writes the batches, then starts a process of MaxText's environment
probe          devices, detected in MaxText's environment
results        the metrics and checkpoints that MaxText writes
environment    the Python environment of MaxText, and the command that creates it

config                    the model as configuration keys, written and read
parameters                the arrays of MaxText's parameters, and the matrices that each is made of
worker_inputs             batches and initial adapters of a training
in_maxtext_environment    scripts that import MaxText and JAX: start of a training, training loop, weights
"""

VERSION = "0.2.5"
"""The version for which configurations are written. Keys and their meaning change between versions."""
