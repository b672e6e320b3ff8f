"""Meshwright's own engine, on PyTorch's distributed parts. It runs on one CPU, one GPU, or many.

Parts that other engines share (data, models, weights, checkpoints, optimizer, telemetry, processes) are in `training`.
Here are the trainer, the assembly of a model and its parallelism. Read in this order:

    contract              interface for the commands (imports no torch); check: unsupported settings; facts: for the
                          planner
    engine                prepare and launch a run; prepared: the run that every process receives
    trainer               the training loop of one process
    loop_checkpoints      its resume, saves and roll-backs
    run_output            its progress, logs, trackers, profiler and record; progress: lines on stderr
    fault_detector        loss spikes, non-finite numbers, skipped batches
    batch_loader          batches of one process
    assembly              modules, shards and optimizer of one process
    step                  passes of one optimizer step; `parallel.pipeline` is the pipelined variant
    fp8, compiling        linear layers in 8 bits, torch.compile
    recompute             activation recomputation; output_recomputation: outputs of cheap functions
    parallel/             mesh, FSDP, tensor, context, expert and pipeline parallelism, one technique a file
    expectation           prediction of a run on this machine; layer_timing: its measurements
    closing               the text sample and the adapters of a complete training
    rehearsal             a plan on local processes, compared with one process
"""
