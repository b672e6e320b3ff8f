"""Scripts that run in MaxText's environment, with its Python and without Meshwright."""
