"""All static settings, as frozen dataclasses; `from moa_jax.config import DraftShape`.

model.py   sizes of targets and drafters
draft.py   draft shapes and sampling settings
train.py   training runs and grids of runs
checks.py  checks of settings, token ids and strings
"""

# ruff: noqa: F401 (re-exported names)

from moa_jax.config.draft import MAX_DEPTH, DraftShape, Sampling
from moa_jax.config.model import (
    BlockConfig,
    BorrowedConfig,
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    ExpertsConfig,
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
    output_of,
)
