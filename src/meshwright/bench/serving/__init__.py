"""Measurement of online serving. No module here imports a tensor framework; `aiohttp` is the only client library."""
