"""Predicted beside measured, over published runs."""
