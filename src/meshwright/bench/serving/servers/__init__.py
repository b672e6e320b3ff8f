"""Servers that `bench serve --server NAME` starts and stops.

table        command line, model and health check of each server
running      a started server: port, log, health check, end
supervise    process between Meshwright and a server: it ends the server when Meshwright is gone, even when killed
llamacpp     process that serves a GGUF file through xllamacpp
gguf_file    GGUF file from a Hugging Face folder
"""
