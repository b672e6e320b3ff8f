"""Fits of the cost model's parameters to measurements. Each ends in a calibration (`meshwright.calibration`).

published_runs        the shipped calibration: a maximum a posteriori fit to published runs
leave_one_source_out  predictions of each published source by a fit without it
ship                  `python -m meshwright.fitting.ship` writes the shipped calibration
device                the calibration of a device from the records of `bench device`, with
                      device_rates, device_kernels, device_fabric, errors
residual              parameters of whole steps: time that the kernels do not explain
kernel_times          the calibration of a training with `cluster: here`, from kernels timed just before it
advice                the measurement that would narrow a run's interval most
"""
