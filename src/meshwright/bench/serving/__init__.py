"""Measurement of online serving. No module here imports a tensor framework; `aiohttp` is the only client library.

endpoint  an OpenAI-compatible endpoint, and a request's body
events    server-sent events from bytes
client    one request, from sending to its last chunk
prompts   lengths and texts of requests
arrivals  when requests are sent
loads     one load: warm-up, ramp, requests, partial results
metrics   from requests to rates and latencies
bounds    best load under a bound of latency
ceiling   the client's own limit, measured against the mock server
mock      a server with known latencies and injected faults
bench     all loads and repeats, recorded
"""
