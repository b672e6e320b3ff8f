"""Meshwright's own engine, on PyTorch's distributed parts. It runs on one CPU, one GPU, or many.

Read it in this order:

    contract     what the command line sees (imports no torch), check: what this engine cannot do
    engine       from a run to a record: device, plan, what to expect
    processes    one process a device, on this machine or under torchrun
    trainer      the training loop of one process
    assembly     what a process trains: model, shards, optimizer
    step         the passes of one optimizer step; `parallel.pipeline` is the other way to take it
    fp8          linear layers that multiply in 8 bits
    parallel/    mesh, fully sharded, tensor, context, expert and pipeline parallelism, one a file
    optimize     AdamW on fp32 master weights, learning rate, clipping; `moments`: its states in 16 or 8 bits
    models/, weights/, data/, feed     what is trained, and on what
    checkpoint, faults                 states on disk; signals
    device, measured, clock, telemetry, trackers, progress, sample      what is measured, kept and shown
    profiling/   where the time of a step goes on the device
    rehearsal    a plan on local processes, compared with one process
"""
