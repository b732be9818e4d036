"""Distillation as pure steps, and the files of a run.

update.py        one optimiser update         distillation.py  a drafter's updates on a mesh
optim.py         AdamW and its schedule       checkpoint.py    checkpoints, verified on reading
fingerprint.py   settings that define a run   metrics.py       logs of a run
flops.py         FLOPs of matrix products     target_cache.py  a target's activations, on disk
"""
