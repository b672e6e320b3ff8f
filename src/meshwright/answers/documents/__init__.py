"""The JSON document of each command, one module a verb: what `--json` writes and `to_dict()` returns."""
