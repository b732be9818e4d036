"""A second implementation of the paper: the MoA drafter in plain torch, as a reference.

    blocks.py        one decoder layer: norms, rotary embedding, grouped attention, SwiGLU
    moa.py           the drafter: memory, masks, the training forward
    eagle.py         EAGLE-3's loss
    learn.py         losses and gradients
    random_pair.py   random targets, drafters and batches for tests without recorded data

float32 on the CPU, transformers for the target, nothing of `moa_jax`. Slow and plain on purpose.
Names of tensors are those of checkpoints. Axes: B rows, T queries, S keys, L target layers,
D width, H heads, K key-value heads, E head size, M memory width, V vocabulary.
"""

import torch

torch.set_num_threads(1)  # the arrays are tiny: more threads only wait for each other
