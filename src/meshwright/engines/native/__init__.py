"""Meshwright's own engine, on PyTorch's distributed parts. It runs on one CPU, one GPU, or many.

Read it in this order:

    check        what this engine cannot do (imports no torch)
    engine       from a run to a record: device, plan, processes
    processes    one process a device, on this machine or under torchrun
    trainer      the training loop of one process
    step         one optimizer step: micro-batches, pipeline or not
    parallel/    mesh, fully sharded, tensor and pipeline parallelism
    optimize     AdamW on fp32 master weights, learning rate, clipping
    checkpoint   states on disk: atomic, checked, resumable under another plan
    metrics, telemetry, progress   what is measured, where it is written, what is shown
"""
