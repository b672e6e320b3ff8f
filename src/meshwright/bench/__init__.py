"""Measurements on this machine. `meshwright.records` has their files, `meshwright.fitting` the calibration from them.

harness           seconds of a callable: warm-up, repetitions until the median is known
kernels           a point as PyTorch calls on one device
collectives       collectives and training steps of several local processes
steps             one whole training step of a point
sensors           clock and temperature
device            `bench device`: all points within a time budget, resumable
training          `bench train`: whole trainings, each in a process of its own
training_summary  their summary, and the error of the predictions
gemm              `tune gemm`
dataloader        `tune dataloader`
"""
