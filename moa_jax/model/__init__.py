"""The Llama family as pure functions.

axes.py       the key to array names       llama.py      a whole target: one pass over T tokens
layers.py     the parts of a layer         masks.py      attention masks, with pictures
cache.py      key-value caches             chunks.py     work along the token axis in chunks
sharding.py   arrays on a mesh             convert.py    stored names <-> parameter trees
pieces.py     top-k over a vocabulary      panels.py     weight layout for fast CPU matmuls
attention.py  over caches and passes; its kernels are attention_gpu.py, attention_tpu.py, and
              attention_intervals.py for training
rotary.py     rotary position embeddings   quantise.py   8-bit weights
"""
