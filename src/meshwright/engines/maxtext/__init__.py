"""MaxText as an engine: a run becomes its configuration, and its processes take the steps.

environment   the Python environment that MaxText lives in, and the command that makes it
models        a model as MaxText's configuration keys
check         what MaxText cannot do of a run, with reasons
lower         a run as a configuration file
data          the run's batches as token files that MaxText's input pipeline reads in order
adapters      the first adapters, and the weights that they belong to
contract      check, lower, prepare, launch and read, as `engines.base` has them
worker        one process of a launch: becomes MaxText's
inside        what runs in MaxText's environment: weights in and out, the start of a training, a loop of its parts
reading       its metrics as a record
"""

VERSION = "0.2.5"
"""The version whose configuration is written. Keys and their meaning change between versions."""
