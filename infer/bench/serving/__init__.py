"""`infer.bench --serve`: open-loop and closed-loop load on servers of several variants.

run.py      runs all rates with all servers, in rotation
flags.py    flags, and the variants that they select
servers.py  server processes and their metrics
clients.py  requests, open and closed loops
results.py  rows, comparison with plain decoding, tables, figure
"""
