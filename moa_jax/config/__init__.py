"""Every static choice, as frozen dataclasses; `from moa_jax.config import DraftShape`.

model.py   sizes of targets and drafters
draft.py   what a round drafts, how tokens are chosen
train.py   training runs and grids of runs
checks.py  checks of settings, token ids and texts
"""

# ruff: noqa: F401 (the names are for importers)

from moa_jax.config.draft import MAX_DEPTH, DraftShape, Sampling
from moa_jax.config.model import (
    BlockConfig,
    BorrowedConfig,
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    Family,
    GlideConfig,
    IndependentConfig,
    LookupConfig,
    MoaConfig,
    RopeScaling,
    TargetConfig,
)
from moa_jax.config.train import (
    ChunkConfig,
    DataConfig,
    DistillConfig,
    FeedbackConfig,
    GridConfig,
    LossConfig,
    MaskConfig,
    MeshConfig,
    Objective,
    OptimConfig,
    PretrainConfig,
    RunConfig,
)
