"""The maxtext engine: MaxText 0.2.5 in a Python environment of its own, unpatched. Unsupported runs are refused."""

VERSION = "0.2.5"
"""The version for which configurations are written. Keys and their meaning change between versions."""
