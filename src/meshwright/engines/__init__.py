"""The doing half: programs that run a training step. `base` is the contract, each folder one engine.

Only what is below this package may import a tensor framework, and each engine imports its own when it is used.
"""
