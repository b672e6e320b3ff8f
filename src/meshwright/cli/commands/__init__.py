"""One declaration a verb: its options, help and examples. The body of `commands/plan.py` is `cli/plan.py`."""
