"""Answers to questions: one frozen value of each kind, with its document and rows, and the functions that make it."""
