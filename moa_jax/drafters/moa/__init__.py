"""The Mixture-of-Attentions drafter (arXiv 2410.03804).

    keys and values of all target layers -> LSA -> mean -> Ekv2E -> memory of verified tokens
                                                                          |
    embeddings of drafted tokens -> SA -> CA over the memory <------------+
                                          |
                                          +-> [last N target layers, final norm] -> head

N is `target_layer_inference`. With N = 0 the output of CA is the input of the head: training fits
the output of CA to the target's final-normed state.

Two ablations remove parts: `layer_mixing` "mean" or "last" replaces LSA by the mean over layers or
by the last layer, and without `has_self_attention` embeddings are the input of CA. Two options are
not in the paper: `hidden_in_memory` adds the target's final-normed state to memory, and `norms`
adds norms of queries and keys, and of the mean over layers.

    blocks.py   shapes, weights, memory      train.py   known tokens, training forward, loss
    decode.py   caches, extend, step         files.py   tensor names and config.json layouts
"""

from __future__ import annotations

from functools import partial

from moa_jax.config import MoaConfig, Objective, TargetConfig
from moa_jax.drafters.api import Drafter, TapSpec
from moa_jax.drafters.moa import decode, files, train
from moa_jax.drafters.moa.blocks import Moa, block_configs
from moa_jax.drafters.tree import by_level
from moa_jax.files.registry import DrafterKind


def make(cfg: MoaConfig, target_cfg: TargetConfig, objective: Objective | None = None) -> Drafter:
    """The drafter as pure functions; `objective` matters for training only."""
    reused, layers = cfg.target_layer_inference, target_cfg.num_layers
    moa = Moa(cfg, target_cfg, block_configs(cfg, target_cfg))
    propose, draft_one = by_level(partial(decode.step, moa))
    return Drafter(
        taps=TapSpec(True, (layers - reused,) if reused else (), cfg.hidden_in_memory),
        shared_params=moa.shared_params,
        init=moa.init,
        init_cache=partial(decode.init_cache, moa),
        extend=partial(decode.extend, moa),
        propose=propose,
        condense=partial(decode.condense, moa),
        condense_only=("layer_self_attention", "ekv2e", "memory_norm", "hidden2e"),
        draft_one=draft_one,
        loss=train.make_loss(moa, objective or Objective()),
        teacher_forced=partial(train.teacher_forced, moa),
    )


KIND = DrafterKind(
    MoaConfig, files.detect, files.read_config, files.table, files.write_config, make
)
