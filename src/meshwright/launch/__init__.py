"""Turn a run into the files and commands that start it on many hosts.

Read it in this order:

    request       the engine's command, nodes, devices, environment
    environment   variables by accelerator and engine, each with a reason and a source
    site          settings of a cluster: partition, network interface, image
    local, slurm, kubernetes     the same request for torchrun, sbatch and kubectl: pure text
    serving       the servers of a serving plan
    start         runs the commands;  follow: watches a job of Slurm to its end

Imports no tensor framework: engines only describe how they are started.
"""
