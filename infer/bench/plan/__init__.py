"""Programs compiled ahead of time for hardware that is not attached: memory fit and cost.

decoding.py  the cost of decoding           training.py  the cost of a training step
hlo.py       parses compiled programs       lowering.py  decode and prefill programs
machines.py  accelerators by name           child.py     compiles in a child process
h200.txtpb   describes an H200 to XLA's compiler
"""
