"""Flags that several programs share, and the objects that they load.

pair.py        target and drafter          vocabulary.py   draft vocabulary
prompts.py     prompts                     sampling.py     sampling, stop strings and stop ids
mesh.py        mesh of devices             auto.py         candidate shapes and costs of mode auto
cluster.py     several processes           config_file.py  configs as Python files
hub.py         upload to the hub           alike.py        compares the files of all processes
"""
