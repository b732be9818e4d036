"""The Llama family as pure functions.

axes.py       the key to array names       llama.py      a whole target: one pass over T tokens
layers.py     the parts of a layer         masks.py      who may attend to whom, in pictures
cache.py      keys and values, by rows     chunks.py     work along the token axis in pieces
sharding.py   arrays on a mesh             convert.py    stored names <-> parameter trees
pieces.py     vocabularies in pieces       panels.py     weights as CPUs multiply them fast
attention.py  over caches and passes; its kernels are attention_gpu.py, attention_tpu.py, and
              attention_intervals.py for training
rotary.py     heads turned by positions    quantise.py   weights in eight bits
"""
