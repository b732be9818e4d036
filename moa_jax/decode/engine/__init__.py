"""Many answers at once: continuous batching, with speculation that suits the load.

engine.py   requests in, news out            seats.py      who sits in a batch, and its calls
shelf.py    compiled programs, by size       rows.py       what these do on the device
wanted.py   which of them are made next      prefixes.py   texts kept for prompts that begin alike
pace.py     how long a call is, which way     group.py      the same over several processes
"""

from moa_jax.decode.engine.engine import Closed, Engine, Full, Load, News, Request, Ticket

__all__ = ["Closed", "Engine", "Full", "Load", "News", "Request", "Ticket"]
