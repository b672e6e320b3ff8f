"""Engines: the programs that run training steps. `base` is the contract; each sub-package is one engine.

    base              the functions of an engine, required and optional
    choice            the planner's best plan that an engine supports
    refusals          reasons for refusal that several engines have
    exporting         checkpoints as Hugging Face weights
    local             processes of a launch on this machine
    external_workers  trainings by processes of another program
    external_record   the record of such a training
    torchrun          torchrun with the exit code of the run

An engine imports its tensor framework only when it is used.
"""
