"""Adapters of kernel libraries that are installed or not: Liger, NVIDIA's Transformer Engine, AMD's AITER.

An adapter has the signature of its operation's routes. A library is imported by the call, never by this package.
"""
