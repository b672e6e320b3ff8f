"""From measurements to calibrations of the cost model.

published_runs            the shipped calibration: a maximum a posteriori fit to published runs
leave_one_source_out      its errors on sources that the fit has not seen
ship                      `python -m meshwright.fitting.ship` writes it
kernel_times              parameters that give the seconds measured on one device
device                    the calibration of a device from the records of `bench device`
residual                  what whole steps take besides their kernels
published_tables          kernel tables that others measured (`aiconfigurator`)
advice                    which measurement would narrow a run's interval most
"""
