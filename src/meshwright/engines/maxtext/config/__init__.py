"""Models and keys of MaxText's configurations."""
