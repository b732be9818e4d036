"""`infer.bench --serve`: Poisson arrivals at one server per mode.

run.py      flags; runs all rates with all servers, in rotation
servers.py  server processes and their metrics
clients.py  requests at their times, and their streams
results.py  rows, comparison with plain decoding, tables, figure
"""
