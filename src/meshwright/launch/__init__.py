"""Turn a run into the files and commands that start it on many hosts.

Imports no tensor framework: engines only describe how they are started.
"""
