"""Distillation as pure steps, and what a run keeps.

update.py        one optimiser update         distillation.py  a drafter's updates on a mesh
optim.py         AdamW and its schedule       checkpoint.py    what survives kills and full disks
fingerprint.py   what makes two runs one      metrics.py       what a run writes down
flops.py         operations of products       target_cache.py  a target's pass, on disk
"""
