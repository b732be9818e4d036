"""Structured output: grammars, and masks of the tokens that they allow.

compile.py   text of a grammar -> Grammar, within limits of size and time
trial.py     compiles a grammar in a process of its own, which may be ended
masks.py     the masks of a call, after every node of its drafts

llguidance follows the grammars on the host; its bitmasks are arguments of the engine's programs.
The package is imported when a grammar arrives, so programs run without it until then.
"""
