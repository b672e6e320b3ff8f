"""Where the time of a step goes on the device: a trace of some steps, and its time by kind of kernel."""
