"""Options of Megatron-LM, configurations of Megatron-Bridge and Primus, as run files. Imports no torch.

train.sh, megatron_lm.args, model_config.yaml    read by `megatron_lm`, scripts by `shell_scripts`
run_config.yaml                                  read by `megatron_bridge`
primus.yaml                                      read by `primus`
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.megatron.megatron_bridge.files import is_bridge_yaml, refuse_recipe
from meshwright.engines.megatron.megatron_bridge.run_content import import_configuration
from meshwright.engines.megatron.megatron_lm.options import split_source
from meshwright.engines.megatron.megatron_lm.run_content import import_arguments
from meshwright.engines.megatron.primus.files import is_primus_yaml
from meshwright.engines.megatron.primus.run_content import import_primus
from meshwright.engines.software_line import with_stated_software


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that options or a configuration describe, without the keys of `ignore`.

    Raises InputError for what cannot be read or has no place in a run file.
    """
    refuse_recipe(source)
    read = import_configuration if is_bridge_yaml(source) else import_arguments
    read = import_primus if is_primus_yaml(source) else read
    found, path = read(source, cluster=cluster, ignore=ignore), Path(split_source(source)[0])
    return with_stated_software(found, path.read_text(encoding="utf-8"), file=str(path))
