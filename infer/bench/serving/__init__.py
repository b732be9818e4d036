"""`infer.bench --serve`: open and closed loops against servers of several variants.

run.py      plays all rates with all servers, in turns
flags.py    flags, and the variants that they describe
servers.py  server processes and their metrics
clients.py  requests, open and closed loops
results.py  rows, comparison with plain decoding, tables, figure
"""
