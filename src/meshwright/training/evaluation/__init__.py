"""Evaluation of a trained model: losses of tokens, and choices by their likelihood."""
