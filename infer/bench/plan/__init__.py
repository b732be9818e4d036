"""Programs compiled ahead of time for hardware that is not attached: whether they fit, their cost.

decoding.py  the cost of decoding           training.py  the cost of a training step
hlo.py       compiled programs, as text     lowering.py  decode and prefill programs
machines.py  accelerators by name           child.py     compiles in a process of their own
h200.txtpb   an H200 for XLA's compiler
"""
