"""Answers to questions: one frozen value of each kind, with its document, its rows and what makes it."""
