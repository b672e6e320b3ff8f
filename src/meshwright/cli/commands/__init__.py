"""One file a verb: its options, help and examples, and its body. A body that imports much is in `cli`: `cli/plan.py`."""
