"""Write a run as a configuration module of torchtitan 0.3.0. Imports no torch."""
