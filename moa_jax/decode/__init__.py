"""Speculative decoding as compiled programs of fixed shapes.

session.py      prompts in, tokens out       step.py        one round, and the loop of rounds
generation.py   a batch under way            verify.py      which drafted nodes are accepted
auto.py         which draft comes next       heard.py       what rounds told of drafts
programs.py     compiled programs            costs.py       what a round of each draft takes
sample.py       laws, noise, rejection       vocabulary.py  which tokens may be drafted
text.py         tokens as text, stop texts   room.py        what fits a cache and a target
exactness.py    where two answers differ     logprobs.py    what the target thought of them
order.py        answers and prompts in turn  mappings.py    how many programs a process may have
calls.py        what senders of calls know   state.py       what a round reads and replaces
background.py   work beside decoding         finite.py      errors for NaN and infinity

engine/         many answers at once
"""
