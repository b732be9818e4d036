"""The Llama family as pure functions.

axes.py       the key to array names       llama.py      a whole target: one pass over T tokens
layers.py     the parts of a layer         masks.py      who may attend to whom, in pictures
cache.py      keys and values, by rows     chunks.py     work along the token axis in pieces
sharding.py   arrays on a mesh             convert.py    stored names <-> parameter trees
precision.py  what float32 means           panels.py     weights as CPUs multiply them fast
memory.py     free bytes of a device
attention.py  over caches and passes; its kernels are attention_gpu.py, attention_tpu.py, and
              attention_intervals.py for training
rotary.py     heads turned by positions    quantise.py   weights in eight bits
processes.py  what several agree on        devices.py    what a program is traced for
pieces.py     vocabularies in pieces       meeting.py    how processes find each other
"""
