"""Kernels of mixtures of experts: rows sorted by expert and back, GEMMs of groups of rows."""
