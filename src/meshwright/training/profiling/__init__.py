"""Profiles of some training steps, alike for every engine: a trace, and its time by category of kernel."""
