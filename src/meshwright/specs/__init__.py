"""Model, hardware, precision, plan, run, estimate and memory budget as frozen values without I/O."""
