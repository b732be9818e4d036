"""How a program listens: what `infer.server` and `infer.serve` share around their applications.

address.py      flags, a bound port, certificates, the ready file
patience.py     HTTP connections; closes those that send no request
until.py        runs an application until a signal comes, and lets it drain
credentials.py  tokens and keys of clients: read from files, compared
events.py       the log
child.py        such a program in a process of its own, for those that measure it
"""
