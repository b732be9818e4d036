"""Code for one kind of device; the rest of the model runs on any.

decode_gpu.py       attention over a cache on GPUs, in Pallas-Triton
decode_tpu.py       attention over a cache on TPUs, in Pallas
train_intervals.py  blockwise attention of training, forward and backward, on GPUs and TPUs
cpu.py              weights in panels of columns, for fast products on CPUs
"""
