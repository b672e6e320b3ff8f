"""What things are: model, hardware, precision, plan, run, estimate. Frozen values without I/O."""
