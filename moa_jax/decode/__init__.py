"""Speculative decoding as compiled programs of fixed shapes.

session.py    prompts in, tokens out       step.py        one round, and the loop of rounds
programs.py   compiled programs            verify.py      which drafted nodes are accepted
sample.py     laws, noise, rejection       vocabulary.py  which tokens may be drafted
text.py       tokens as text, stop texts   room.py        what fits a cache and a target
exactness.py  where two answers differ
"""
