"""Flags that several programs share, and what they load.

pair.py        a target and a drafter      vocabulary.py   which tokens may be drafted
prompts.py     prompts and stop texts      sampling.py     how tokens are chosen
batches.py     prompts side by side        auto.py         which draft comes next
mesh.py        a mesh of devices           cluster.py      several processes
bench.py       what infer.bench takes      config_file.py  configs as Python files
alike.py       files that all processes have
thresholds.py  the limits of infer.check
"""
