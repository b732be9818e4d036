"""The paper's drafter for Llama-3-8B-Instruct, trained as in the paper: one conversation per row.

    python -m train.distill --config configs/moa_llama3_8b_paper.py

A batch has 32 conversations, as in the authors' code; padding is a little under half of its tokens.
The schedule is the authors' too: warm-up of 50 updates to 20 times the constant rate, then one
epoch of linear decay (207,865 conversations in batches of 32), 40 epochs in all.
configs/moa_llama3_8b.py packs several conversations into a row.
"""

import dataclasses

from configs import moa_llama3_8b
from moa_jax.config import ChunkConfig

_PACKED = moa_llama3_8b.config

EPOCH = 207_865 // 32

config = dataclasses.replace(
    _PACKED,
    data=dataclasses.replace(
        _PACKED.data, row_length=2048, rows_per_batch=32, pack=False, longest_first=False
    ),
    optim=dataclasses.replace(
        _PACKED.optim,
        decay_steps=EPOCH,
        total_steps=40 * EPOCH,
        accumulate=2,  # the authors use 8; 2 works on 1 to 16 devices and fits one H200
    ),
    chunks=ChunkConfig(),  # sixteen rows without chunks would not fit one H200
    run=dataclasses.replace(_PACKED.run, directory="runs/moa_llama3_8b_paper"),
)
