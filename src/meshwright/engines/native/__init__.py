"""Meshwright's own engine, on PyTorch's distributed parts. It runs on one CPU, one GPU, or many.

Parts that other engines share (data, models, weights, checkpoints, optimizer, telemetry, processes) are in `training`.
Here are the trainer, the assembly of a model and its parallelism.
"""
