"""Speculative decoding as compiled programs of fixed shapes.

session.py      prompts in, tokens out       step.py        one round, and the loop of rounds
generation.py   a batch being decoded        verify.py      which drafted nodes are accepted
auto.py         the engine's choice of shapes   heard.py    its acceptance rates
programs.py     compiled programs            costs.py       its cost table
sampling.py     sampling, noise, rejection   logprobs.py    log-probabilities of answers
detokenize.py   detokenizer, stop strings    limits.py      limits of a cache and a target
exactness.py    where two answers differ     finite.py      errors for NaN and infinity
order.py        turns of decode and prefill  state.py       the state of a round
calls.py        complete rounds of a call    background.py  a worker thread, limit on programs
draft_vocabulary.py   which tokens are drafted

engine/         continuous batching
"""
