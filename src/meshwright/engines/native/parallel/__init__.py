"""Parallelism of one training step over processes: one technique a file."""
