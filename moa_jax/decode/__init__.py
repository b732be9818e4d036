"""Speculative decoding as compiled programs of fixed shapes.

session.py      prompts in, tokens out       step.py        one round, and the loop of rounds
generation.py   a batch being decoded        verify.py      which drafted nodes are accepted
programs.py     compiled programs            state.py       the state of a round
sampling.py     sampling, noise, rejection   logprobs.py    log-probabilities of answers
detokenize.py   detokenizer, stop strings    limits.py      limits of a cache and a target
exactness.py    where two answers differ     finite.py      errors for NaN and infinity
background.py   a worker thread, limit on programs
row_settings.py   settings of a request as arrays
banned.py         min_tokens and bad_words
slots.py          the state of all slots of an engine, and the rows of a batch
draft_vocabulary.py   which tokens are drafted
"""
