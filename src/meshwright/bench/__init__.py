"""Measure a device: kernels, memory, collectives; and turn the records into a calibration of the planner.

harness      seconds of a callable: warm-up, repetitions until the median is known, outliers
points       what is measured: families, kernels, shapes of a model and of a grid
records      the file that measurements are kept in, read back strictly
kernels      a point as PyTorch calls on one device
collectives  exchanges between local processes
device       all of it within a time budget, resumable
"""
