"""AdamW with clipping and the paper's learning-rate schedule."""

from __future__ import annotations

import itertools

import numpy as np
import optax

from moa_jax.config import OptimConfig


def schedule(cfg: OptimConfig) -> optax.Schedule:
    """Learning rate by update: 0 up to the peak, down to the constant rate, then flat.

        peak     /\\
                /  \\____ learning_rate
        0      /
               | w | d |

    The very first update has rate 0. References: paper appendix; authors' utils.py.
    """
    ends, rates = _points(cfg)
    sides = zip(itertools.pairwise(ends), itertools.pairwise(rates), strict=True)
    lines = [optax.linear_schedule(*pair, end - begin) for (begin, end), pair in sides]
    return optax.join_schedules([*lines, optax.constant_schedule(rates[-1])], ends[1:])


def rate_of_update(cfg: OptimConfig, step: int) -> float:
    """The learning rate of `schedule` on the host, where no mesh of processes takes part."""
    return float(np.interp(step, *_points(cfg)))


def _points(cfg: OptimConfig) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The updates and the rates between which the learning rate is linear."""
    ends = (0, cfg.warmup_steps, cfg.warmup_steps + cfg.decay_steps)
    return ends, (0.0, cfg.peak * cfg.learning_rate, cfg.learning_rate)


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW (epsilon 1e-8, outside the square root)."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(schedule(cfg), cfg.b1, cfg.b2, eps=1e-8, weight_decay=cfg.weight_decay),
    )
