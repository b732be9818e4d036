"""Speculative decoding as compiled programs of fixed shapes.

session.py      prompts in, tokens out       step.py        one round, and the loop of rounds
generation.py   a batch being decoded        verify.py      which drafted nodes are accepted
auto.py         choice of the draft shape    heard.py       acceptance rates of drafts
programs.py     compiled programs            costs.py       cost of a round per draft shape
sample.py       sampling, noise, rejection   vocabulary.py  draft vocabularies
text.py         detokenizer, stop strings    room.py        limits of a cache and a target
exactness.py    where two answers differ     logprobs.py    log-probabilities of answers
order.py        turns of decode and prefill  mappings.py    how many programs a process may have
calls.py        complete rounds of a call    state.py       the state of a round
background.py   a worker thread              finite.py      errors for NaN and infinity

engine/         continuous batching
"""
