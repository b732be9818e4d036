"""The EAGLE-3 drafter (2503.01840): features of some layers, a wider layer, a separate head.

    tapped low, middle, high --> fc --> feature before (verified tokens)
                       own output --> feature before (drafted tokens)

    embedding      --> norm --+
                              +--> attention --> + --> norm --> MLP --> + --> feature
    feature before --> norm --+                  |                      |
          +--------------------------------------+                      +--> norm --> own head

Only the token loss trains the feature, over several passes, each fed with the features of the
previous pass (training-time test). The head scores a draft vocabulary; files store the vocabulary's
map as d2t and t2d. Tensor names and config.json are the official ones; the layout `speculators` has
those of the speculators library, which vLLM also reads. Files of NVIDIA and NeMo are read as well.
`Eagle3Config` states the norms that these add, as vLLM computes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import Eagle3Config, Objective, TargetConfig
from moa_jax.drafters import distill_loss, eagle_common
from moa_jax.drafters.api import Drafter, Params, Shared, TapSpec, TargetActivations
from moa_jax.errors import InputError
from moa_jax.files.config_keys import contradiction, flag
from moa_jax.files.copies import EMBEDDING
from moa_jax.files.hf_config import target_config_to_hf
from moa_jax.files.layer_files import (
    LAYER_IDS,
    block_of,
    flat_config,
    one_layer,
    read_sizes,
    write_sizes,
)
from moa_jax.files.registry import DrafterKind, FileLayout, Files, StoredDrafter, tensor_shape
from moa_jax.model import convert, quantize
from moa_jax.model.cache import KV
from moa_jax.model.convert import Table
from moa_jax.model.layers import INIT_STDDEV, Linear, RMSNorm

Array = jax.Array

PREFIX = "midlayer."
ARCHITECTURE = "LlamaForCausalLMEagle3"
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


class Eagle3Layer(eagle_common.EagleLayer):
    """A decoder layer whose attention reads embedding and feature, each with a separate norm."""

    norm_before_residual: bool = False

    def setup(self) -> None:
        super().setup()
        self.input_norm = RMSNorm(self.block.rms_norm_eps)  # of embeddings
        self.hidden_norm = RMSNorm(self.block.rms_norm_eps)  # of features

    def layer_inputs(self, embedding_BTD: Array, feature_BTD: Array) -> tuple[Array, Array]:
        both = (self.input_norm(embedding_BTD), self.hidden_norm(feature_BTD))
        start_BTD = both[1] if self.norm_before_residual else feature_BTD
        return start_BTD, jnp.concatenate(both, axis=-1)


def tapped_layers(cfg: Eagle3Config, target_cfg: TargetConfig) -> tuple[int, ...]:
    """The tapped streams, by the layer they enter; by default those of official files.

    Raises InputError unless all of `cfg.tapped_layers` are layers of the target.
    """
    layers = target_cfg.num_layers
    chosen = cfg.tapped_layers or _usual_layers(target_cfg)
    if not all(0 <= i < layers for i in chosen):
        raise InputError(
            f"tapped_layers {list(chosen)} of a target of {layers} layers; give layers from 0 to "
            f"{layers - 1}"
        )
    return chosen


def _usual_layers(target_cfg: TargetConfig) -> tuple[int, int, int]:
    return 2, target_cfg.num_layers // 2, target_cfg.num_layers - 3


def make(
    cfg: Eagle3Config, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """The drafter as pure functions; `objective` matters for training only."""
    return eagle_common.make(layer(cfg, target_cfg), objective or Objective())


def layer(cfg: Eagle3Config, target_cfg: TargetConfig) -> eagle_common.Layer:
    """The drafter's layer for a target."""
    block, guesses = block_of(cfg, target_cfg, plain=True), _num_guesses(cfg, target_cfg)
    module = Eagle3Layer(block, cfg.norm_before_residual)
    fc, norm = Linear((block.hidden_size,)), RMSNorm(block.rms_norm_eps)
    taps = tapped_layers(cfg, target_cfg)
    normed = lambda scale, x_BTX: norm.apply({"params": scale}, x_BTX)

    def init(key: Array) -> Params:
        layer_key, fc_key, head_key = jax.random.split(key, 3)
        streams_11C = jnp.zeros((1, 1, len(taps) * block.hidden_size))
        head_DU = jax.random.normal(head_key, (block.hidden_size, guesses))
        norms = {path: jnp.ones(x.shape) for path, x in _norms(cfg, target_cfg).items()}
        return {
            "layer": eagle_common.init_layer(module, layer_key),
            "fc": fc.init(fc_key, streams_11C)["params"],
            **convert.nest(norms),
            "head": INIT_STDDEV * head_DU,
        }

    def fuse(params: Params, tapped: TargetActivations) -> Array:
        streams: Sequence[Array] = tapped.streams
        if cfg.fc_norm:
            streams = [normed(params["fc_norm"][str(i)], x) for i, x in enumerate(streams)]
        joined_BTC = jnp.concatenate(streams, axis=-1)
        if cfg.norm_before_fc:
            joined_BTC = normed(params["input_norm"], joined_BTC)
        return fc.apply({"params": params["fc"]}, joined_BTC)

    def apply(params: Params, *inputs: Any) -> tuple[Array, KV, KV | None]:
        feature_BTD, rows, past = module.apply({"params": params["layer"]}, *inputs)
        return normed(params["norm"], feature_BTD) if cfg.norm_output else feature_BTD, rows, past

    def head(params: Params, shared: Shared, feature_BTD: Array) -> Array:
        read_BTD = feature_BTD if cfg.norm_output else normed(params["norm"], feature_BTD)
        return quantize.matmul(read_BTD, params["head"], jnp.float32)

    return eagle_common.Layer(
        block=block,
        taps=TapSpec(streams=taps),
        init=init,
        fuse=fuse,
        rows=lambda params, *x: module.apply({"params": params["layer"]}, *x, method="rows"),
        apply=apply,
        head=head,
        loss=partial(loss, cfg.draft_ids or None),
        own_head=True,
        draft_ids=cfg.draft_ids or None,
        fuse_only=("fc", "fc_norm", "input_norm"),
    )


def _num_guesses(cfg: Eagle3Config, target_cfg: TargetConfig) -> int:
    return len(cfg.draft_ids) or target_cfg.vocab_size


def loss(
    draft_ids: tuple[int, ...] | None,
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array] | None,
    drafts: Sequence[distill_loss.Draft],
    goal_BTD: Array,
    progress: Array,
) -> tuple[Array, dict[str, Array]]:
    """The token loss of every pass, over answer tokens whose next token the head can score."""
    each = distill_loss.token_losses(objective, shared, head, goal_BTD, drafts, draft_ids)
    parts = eagle_common.mean_of_passes(each, objective.feedback.decay)
    return distill_loss.weighted(objective.loss, parts, None, progress)


# ---- files --------------------------------------------------------------------------------


def table(cfg: Eagle3Config, target_cfg: TargetConfig) -> Table:
    """The table of the drafter's stored tensors."""
    block, guesses = block_of(cfg, target_cfg, plain=True), _num_guesses(cfg, target_cfg)
    width = block.hidden_size
    inside = {
        **convert.norm_table(width, PREFIX),
        ("hidden_norm", "scale"): convert.vector(
            (None,), (f"{PREFIX}hidden_norm.weight",), (width,)
        ),
        **convert.attention_table(block, PREFIX, inputs=2 * width),
        **convert.mlp_table(width, block.intermediate_size, block.mlp_bias, PREFIX),
    }
    joined = len(tapped_layers(cfg, target_cfg)) * width
    return {
        **convert.under(("layer",), inside),
        ("fc", "kernel"): convert.kernel(("features", "embed"), ("fc.weight",), joined, (width,)),
        **_norms(cfg, target_cfg),
        ("head",): convert.kernel(("embed", "vocab"), ("lm_head.weight",), width, (guesses,)),
    }


def _norms(cfg: Eagle3Config, target_cfg: TargetConfig) -> Table:
    """The table of the norms outside of the layer."""
    width, count = target_cfg.block.hidden_size, len(tapped_layers(cfg, target_cfg))
    scale = lambda name, size: convert.vector((None,), (f"{name}.weight",), (size,))
    found = {("norm", "scale"): scale("norm", width)}
    if cfg.fc_norm:
        for i in map(str, range(count)):
            found["fc_norm", i, "scale"] = scale(f"fc_norm.{i}", width)
    if cfg.norm_before_fc:
        found["input_norm", "scale"] = scale("input_norm", count * width)
    return found


def constants(cfg: Eagle3Config, target_cfg: TargetConfig) -> dict[str, np.ndarray]:
    """The map of the head: d2t = target id - draft id, and t2d, the mask of scored target ids."""
    ids_U = np.array(cfg.draft_ids or range(target_cfg.vocab_size), np.int64)
    t2d_V = np.zeros(target_cfg.vocab_size, bool)
    t2d_V[ids_U] = True
    return {"d2t": ids_U - np.arange(len(ids_U)), "t2d": t2d_V}


def detect(config: dict[str, Any], names: set[str]) -> bool:
    """Whether the files hold an EAGLE-3 drafter."""
    stated = ARCHITECTURE in (config.get("architectures") or ())
    return stated or any(name.startswith(PREFIX) for name in names)


def read_config(
    files: Files, target_cfg: TargetConfig, reused: int | None
) -> tuple[Eagle3Config, tuple[str, ...]]:
    """Read sizes from the tensors, the head's map from d2t, norms from config.json.

    Raises InputError if the files contradict themselves or the target.
    """
    files = files._replace(config=flat_config(files.config))
    usual, stated = _usual_layers(target_cfg), _stated_layers(files.config)
    count = len(stated) or len(usual)
    own = {**dict.fromkeys(NORMS, (True, False)), "num_aux_hidden_states": (count,)}
    sizes = read_sizes(files, target_cfg, PREFIX, plain=True, own=own)
    _check_count(files, count, target_cfg.block.hidden_size)
    ids_U = _ids(files, target_cfg)
    whole = np.array_equal(ids_U, np.arange(target_cfg.vocab_size))
    draft_ids = () if whole else tuple(ids_U.tolist())
    layers = () if stated == usual else stated
    cfg = Eagle3Config(**sizes, draft_ids=draft_ids, tapped_layers=layers, **_flags(files.config))
    tapped_layers(cfg, target_cfg)  # raises InputError for layers that the target does not have
    if not layers or "method" in files.config:
        return cfg, ()
    notice = f"the drafter reads what enters layers {list(layers)}, not {list(usual)} as is usual"
    return cfg, (f"{notice}: so its config.json says",)


def _flags(config: dict[str, Any]) -> dict[str, bool]:
    """The norms of a config.json, at its top level or, in NVIDIA's files, in `eagle_config`."""
    nested = config.get("eagle_config") or {}
    for key in NORMS:
        if None not in (config.get(key), nested.get(key)) and config[key] != nested[key]:
            raise contradiction("config.json", key, config[key], f"eagle_config.{key}", nested[key])
    stated = {**nested, **{key: value for key, value in config.items() if value is not None}}
    return {key: flag(stated, key, "config.json") for key in NORMS}


def _check_count(files: Files, count: int, width: int) -> None:
    """Raise InputError unless `fc` reads `count` streams."""
    columns = tensor_shape(files.shapes, "fc.weight")[-1]
    if columns != count * width:
        raise InputError(
            f"fc.weight reads {columns / width:g} streams of the target, not {count}; list the "
            f"layers that they enter in {LAYER_IDS} of config.json"
        )


def _stated_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """The streams that a config.json lists, by the layer they enter; () if it lists none.

    vLLM and speculators list at the top level the layers that streams enter. SpecForge and SGLang
    list in `eagle_config` the layers that output the streams. Our early files, which also have a
    key `method`, list in `eagle_config` the layers that streams enter.
    """
    top, nested = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    ids = top or nested or []
    if type(ids) is not list or any(type(i) is not int for i in ids):
        raise InputError(f"{LAYER_IDS} is {ids!r}; give layers of the target by number")
    come_out = not top and "method" not in config
    return tuple(i + come_out for i in ids)  # the output of a layer enters the next layer


def _ids(files: Files, target_cfg: TargetConfig) -> np.ndarray:
    """Target ids of the head's rows; t2d, if stored, must be the mask of these ids."""
    guesses = files.shapes.get("lm_head.weight", (0,))[0]
    if "d2t" not in files.shapes:
        own_size = files.config.get("vocab_size", target_cfg.vocab_size)
        if guesses == own_size <= target_cfg.vocab_size:  # the target may have more unused rows
            return _checked_ids(np.arange(guesses), files, target_cfg)
        raise InputError(
            f"the drafter's head scores {guesses} tokens and no d2t says which of the target's "
            f"{target_cfg.vocab_size} they are; use files that hold d2t"
        )
    ids_U = files.read("d2t").astype(np.int64) + np.arange(files.shapes["d2t"][0])
    inside = ((ids_U >= 0) & (ids_U < target_cfg.vocab_size)).all()
    if len(ids_U) != guesses or not inside or len(np.unique(ids_U)) != guesses:
        raise InputError(
            f"d2t names {len(ids_U)} tokens for a head of {guesses}, some of them twice or "
            f"outside the target's vocabulary of {target_cfg.vocab_size}; use the files of one "
            "drafter for this target"
        )
    return _checked_ids(ids_U, files, target_cfg)


def _checked_ids(ids_U: np.ndarray, files: Files, target_cfg: TargetConfig) -> np.ndarray:
    """Returns `ids_U`; raises InputError if t2d or draft_vocab_size contradicts these ids."""
    stated = files.config.get("draft_vocab_size")
    if stated not in (None, len(ids_U)):
        raise InputError(
            f"config.json says draft_vocab_size is {stated!r} and lm_head.weight scores "
            f"{len(ids_U)} tokens; use the config.json of these weights"
        )
    if "t2d" in files.shapes:
        t2d_V = files.read("t2d").astype(bool)
        if not np.array_equal(np.flatnonzero(t2d_V), np.sort(ids_U)):
            raise InputError(
                f"t2d marks {t2d_V.sum()} tokens of the target that are not the {len(ids_U)} "
                "tokens of d2t; use the files of one drafter"
            )
    return ids_U


def write_config(
    cfg: Eagle3Config, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of a drafter, in the format that serving engines read."""
    config = write_sizes(cfg, target_cfg, layout, "eagle3", plain=True)
    layers = list(tapped_layers(cfg, target_cfg))
    return config | {
        "architectures": [ARCHITECTURE],
        "tie_word_embeddings": False,
        "draft_vocab_size": _num_guesses(cfg, target_cfg),
        LAYER_IDS: layers,
        **{key: getattr(cfg, key) for key in NORMS},
        "eagle_config": {LAYER_IDS: [i - 1 for i in layers]},  # see `_stated_layers`
    }


def speculators(cfg: Eagle3Config, target_cfg: TargetConfig) -> StoredDrafter:
    """The drafter's files for the speculators library: the layer is a nested Llama config.

    The files have no embedding, since readers use the target's, and a head over all tokens has no
    d2t and t2d. Raises InputError for ids that do not ascend: t2d is a mask, and vLLM's target
    returns each tapped stream once, in the order of layers. References: speculators 0.9,
    models/eagle3/config.py and core.py (names, keys); vLLM,
    transformers_utils/configs/speculators/algos.py (`norm_before_residual` is true if missing).
    """
    layers = tapped_layers(cfg, target_cfg)
    for key, ids in (("d2t", cfg.draft_ids), (LAYER_IDS, layers)):
        if list(ids) != sorted(set(ids)):
            raise InputError(
                f"{key}: layout speculators cannot have {list(ids[:9])}, ids that do not ascend; "
                "choose ours or authors"
            )
    layer_cfg = dataclasses.replace(
        one_layer(cfg, target_cfg, plain=True), tie_word_embeddings=False
    )
    config = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": target_config_to_hf(layer_cfg),
        "tie_word_embeddings": False,
        "draft_vocab_size": _num_guesses(cfg, target_cfg),
        "target_hidden_size": target_cfg.block.hidden_size,
        LAYER_IDS: list(layers),
        **{key: getattr(cfg, key) for key in NORMS},
    }
    renamed = {
        path: packing._replace(
            names=tuple(name.replace(PREFIX, "layers.0.", 1) for name in packing.names)
        )
        for path, packing in table(cfg, target_cfg).items()
    }
    return StoredDrafter(config, renamed, constants(cfg, target_cfg) if cfg.draft_ids else {})


KIND = DrafterKind(
    Eagle3Config,
    detect,
    read_config,
    table,
    write_config,
    make,
    constants=constants,
    copies={"embed_tokens.weight": EMBEDDING},
    speculators=speculators,
)
