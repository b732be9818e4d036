"""Programs compiled ahead of time for hardware that is not attached: memory fit and cost.

decoding.py  the cost of decoding           training.py  the cost of a training step
hlo.py       parses compiled programs       lowering.py  compiles programs, prices products
machines.py  accelerators by name           gpu.txtpb    describes a GPU to XLA's compiler
"""
