"""Read configurations of torchtitan 0.3.0, which are programs, as the trees that they evaluate to. Imports no torch."""
