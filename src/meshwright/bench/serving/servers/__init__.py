"""Servers that `bench serve --server NAME` starts and stops."""
