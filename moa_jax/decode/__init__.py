"""Speculative decoding: propose, verify, commit, extend, with fixed shapes and no host."""
