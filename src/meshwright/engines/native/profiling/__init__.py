"""Profiles of some training steps: a trace, and its time by category of kernel."""
