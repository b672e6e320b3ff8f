"""One file a verb: options, help, examples and the body. A body that imports much stands in `cli`, as `plan.py`."""
