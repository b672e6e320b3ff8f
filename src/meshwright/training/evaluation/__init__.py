"""Evaluation of a trained model: losses of tokens, and choices by their likelihood.

losses    the loss of every token of a batch
text      loss, perplexity and bits per byte of a corpus
choices   multiple choice by likelihood
harness   the model as one of lm-evaluation-harness
"""
