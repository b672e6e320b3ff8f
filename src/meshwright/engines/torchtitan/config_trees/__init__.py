"""Trees of torchtitan's configurations as run files. Imports no torch."""
