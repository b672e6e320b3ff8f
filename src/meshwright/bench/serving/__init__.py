"""Measurement of online serving. No module here imports a tensor framework; `aiohttp` is the only client library.

endpoint  an OpenAI-compatible endpoint, and a request's body
events    server-sent events from bytes
client    one request, from sending to its last chunk
prompts   lengths and texts of requests
arrivals  when requests are sent
loads     one load: warm-up, ramp, requests, partial results
metrics   from requests to rates and latencies
ceiling   the client's own limit, measured against the mock server
mock      a server with known latencies
bench     all loads and repeats, recorded
summary   loads over their repeats, and the best one under a bound
offline   batch throughput of replicas, measured together
importers results of other clients
aiperf    AIPerf as the client
servers   servers that are started by name
"""
