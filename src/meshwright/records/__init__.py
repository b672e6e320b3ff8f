"""Files of measurements. They are written line by line and read back strictly.

training     one training: `record.json`
points       shapes that `bench device` measures: kernels, collectives and steps
steps        run and plan of a whole training step among these points
measurement  samples of one point: median, interval, outliers
device       `records.csv` of `bench device`
trainings    `trainings.csv` of `bench train`
sweep        run files and swept values that `bench train` trains
files        reading and writing of CSV files and their JSON sidecars
"""
