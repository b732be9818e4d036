"""`infer.bench --serve`: Poisson arrivals at one server per mode.

run.py      runs all rates with all servers, in rotation
flags.py    flags of the program and of its servers
servers.py  server processes and their metrics
clients.py  requests, and their streams
results.py  rows, comparison with plain decoding, tables, figure
"""
