"""Many answers at once: continuous batching, with speculation that suits the load.

engine.py     requests in, news out           shelf.py      compiled programs, by size
requests.py   what these are                  wanted.py     which of them are made next
reading.py    prompts, a chunk at a time      making.py     has them made in the background
prefixes.py   texts that begin alike          rows.py       what they do on the device
seats.py      who sits in a batch, its calls  group.py      the same over several processes
pace.py       how long a call is, which way   load.py       what is done and was, in figures
"""

from moa_jax.decode.engine.engine import Engine
from moa_jax.decode.engine.load import Load
from moa_jax.decode.engine.requests import Closed, Full, News, Request, Ticket

__all__ = ["Closed", "Engine", "Full", "Load", "News", "Request", "Ticket"]
