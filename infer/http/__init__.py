"""HTTP modules that `infer.server` and `infer.serve` share.

address.py   flags, a bound port, certificates, the ready file
auth.py      tokens and API keys: read from files, compared
log.py       the log: JSON lines on stderr
run.py       runs an application until a signal, and drains it
timeouts.py  closes HTTP connections that send no complete request
"""
