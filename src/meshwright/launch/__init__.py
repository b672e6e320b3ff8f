"""From a run to what starts it on many hosts: files and commands, shown first, started on request.

Read it in this order:

    request       what is to be started: the engine's command, nodes, devices, environment
    environment   variables by accelerator and engine, each with a reason and a source
    site          what a place has of its own: partition, network interface, image
    local, slurm, kubernetes     the same request for torchrun, sbatch and kubectl: pure text
    start         runs the commands;  follow: watches a job of Slurm to its end

Imports no tensor framework: the engines that it asks only describe how they are started.
"""
