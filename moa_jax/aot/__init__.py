"""Programs that are compiled ahead of time for hardware that is not there.

machines.py  accelerators by name          lowering.py  the decode program, and what it moves
hlo.py       compiled programs, as text    planning.py  the training step: does it fit?
"""
