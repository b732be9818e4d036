"""Flags that several programs share, and what they load.

pair.py        a target and a drafter      vocabulary.py   which tokens may be drafted
prompts.py     prompts and stop texts      sampling.py     how tokens are chosen
mesh.py        a mesh of devices           auto.py         which draft comes next
cluster.py     several processes           config_file.py  configs as Python files
alike.py       files that all processes have
"""
