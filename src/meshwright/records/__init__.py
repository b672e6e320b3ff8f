"""Records: what was measured, as files. Written line by line, read back strictly.

training     one training: `record.json`
points       what `bench device` measures: kernels, collectives and steps by shape
steps        the run and the plan of a whole training step among these points
measurement  samples of one point: median, interval, outliers
device       `records.csv` of `bench device`
sweeps       `trainings.csv` of `bench train`
files        what all record files share
"""
