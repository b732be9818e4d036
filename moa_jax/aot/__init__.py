"""Programs that are compiled ahead of time for hardware that is not there.

machines.py  accelerators by name         child.py     compiles in a process of their own
hlo.py       compiled programs, as text   products.py  the matrix products in them
accesses.py  what they read and write     declared.py  what Pallas kernels say they cost
kernels.py   what runs in a round         decoding.py  what decoding costs, does it fit?
lowering.py  decode and prefill programs  planning.py  the training step: does it fit?
schedule.py  how long a program takes
"""
