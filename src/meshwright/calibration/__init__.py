"""Measured values that the cost model reads: parameters with their priors, and corrections of one device."""
