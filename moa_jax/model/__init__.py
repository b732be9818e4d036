"""The Llama family as pure functions.

axes.py       the key to array names       llama.py      a whole target: one pass over T tokens
layers.py     the parts of a layer         masks.py      attention masks, with pictures
cache.py      key-value caches             chunks.py     work along the token axis in chunks
sharding.py   arrays on a mesh             convert.py    stored names <-> parameter trees
topk.py       top-k over a vocabulary      quantize.py   8-bit weights
attention.py  over caches and passes       rotary.py     rotary position embeddings
experts.py    a feed-forward of experts
kernels/      Pallas kernels of attention, and the CPU's layout of weights
"""
