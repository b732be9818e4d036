"""Random targets, drafters and batches with varied logits, and their folders on disk.

Weights are scaled as in the recorded cases: linear N(0, 1/sqrt(fan in)), queries and keys 1.5
times that, the head twice; norms 1 + 0.1 N(0, 1); biases 0.1 N(0, 1); embeddings N(0, 1), or
1.5/sqrt(D) if the head is tied to them. Such a pair accepts hardly any draft. A `calm` below 1
scales the outputs that each layer adds to its input, in target and drafter alike: the last token
then weighs more than all others, and most drafts are accepted.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from .moa import head_dim_of, memory_width

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8)
_MINISTRAL3 = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_BY_KIND = {"full_attention": _GLOBAL, "sliding_attention": _ROPE | {"rope_theta": 1e4}}
_GEMMA3 = dict(head_dim=16, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=24)
_GEMMA3 |= dict(tie_word_embeddings=True, rope_parameters=_BY_KIND)


def _heads(hidden: int, heads: int, kv_heads: int, **rest: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (hidden, heads, kv_heads), strict=True)) | rest


# Small, uneven sizes. M / heads is 40 / 6 for llama: the LSA then has 6 heads of 6 in width 40.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _heads(60, 6, 2),
    "llama31": _heads(48, 4, 1, rope_parameters=_LLAMA3_ROPE),
    "qwen2": _heads(56, 7, 7, tie_word_embeddings=True, rope_parameters=_ROPE),
    "qwen3": _heads(40, 4, 2, head_dim=16, rope_parameters=_ROPE),
    "mistral": _heads(36, 3, 1, sliding_window=6),
    "ministral": _heads(32, 4, 2, head_dim=12, sliding_window=5),
    "ministral3": _heads(40, 4, 2, head_dim=12, rope_parameters=_MINISTRAL3),
    "gemma3_text": _heads(48, 4, 2, **_GEMMA3),
}
FAMILIES["qwen3_moe"] = FAMILIES["qwen3"] | dict(num_experts=8, num_experts_per_tok=3)
FAMILIES["qwen3_moe"] |= dict(moe_intermediate_size=28, norm_topk_prob=True)
_COMMON = dict(vocab_size=101, num_hidden_layers=5, intermediate_size=52, rms_norm_eps=1e-5)
_COMMON |= dict(max_position_embeddings=256, bos_token_id=1, eos_token_id=2)
_COMMON["tie_word_embeddings"] = False


def random_weight(
    name: str, shape: Sequence[int], generator: torch.Generator, calm: float, tied: bool = False
) -> Tensor:
    """Returns one tensor; its name determines its scale."""
    noise = torch.randn(*shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise * 1.5 / math.sqrt(shape[1]) if tied else noise
    scales = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 2.0, "o_proj": calm, "down_proj": calm}
    scale = next((value for part, value in scales.items() if part in name), 1.0)
    return scale * noise / math.sqrt(shape[1])


def random_target(family: str, seed: int, calm: float = 1.0, **sizes: Any) -> tuple[Any, Any]:
    """Returns a transformers config and float32 causal LM; `sizes` are config keys.

    `family` is a key of FAMILIES: a model type, or llama31, llama with its RoPE scaling.
    """
    kind = "llama" if family == "llama31" else family
    sizes = copy.deepcopy({**_COMMON, **FAMILIES[family], **sizes})  # a config changes its values
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator, calm, tied)
        if family == "gemma3_text" and "norm" in name:
            parameter.data -= 1  # its norms add 1
    return config, model.requires_grad_(False)


def draft_sizes(config: Any, num_reused: int = 0) -> dict[str, int]:
    """Returns sizes of a small drafter for this target, as different as its heads allow."""
    heads = config.num_attention_heads
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return dict(
        self_attention_num_key_value_heads=divisors[-2],
        self_attention_intermediate_size=44,
        cross_attention_num_key_value_heads=divisors[1],
        cross_attention_intermediate_size=36,
        layer_self_attention_num_key_value_heads=divisors[len(divisors) // 2],
        layer_self_attention_intermediate_size=28,
        target_layer_inference=num_reused,
    )


def draft_shapes(config: Any, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns shapes of a drafter's tensors under the authors' names (reference 1.8, 1.9).

    Biases: SA has the target's; LSA has those of q, k and v for Qwen2 alone; CA has none. Only SA
    for Qwen3 and Gemma 3 has norms of queries and keys.
    """
    hidden, width = config.hidden_size, memory_width(config)
    heads, family = config.num_attention_heads, config.model_type
    always = family == "qwen2"
    everywhere = getattr(config, "attention_bias", False)
    qkv = ("q", "k", "v")
    sa_biases = [f"self_attn.{x}_proj" for x in qkv if always or everywhere]
    sa_biases += ["self_attn.o_proj"] if everywhere else []
    if getattr(config, "mlp_bias", False):
        sa_biases += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    lsa_biases = [f"self_attn.{x}_proj" for x in qkv if always]
    head_dim, lsa_dim = head_dim_of(config), width // heads
    parts = {
        "self_attention": (
            *(hidden, head_dim, sa_biases),
            family in ("qwen3", "qwen3_moe", "gemma3_text"),
        ),
        "cross_attention": (hidden, head_dim, [], False),
        "layer_self_attention": (width, lsa_dim, lsa_biases, False),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for part, (inner, dim, biases, norms) in parts.items():
        kv_heads = sizes[f"{part}_num_key_value_heads"]
        ffn = sizes[f"{part}_intermediate_size"]
        block = block_shapes(inner, heads * dim, kv_heads * dim, ffn)
        block |= {f"{x}.bias": block[f"{x}.weight"][:1] for x in biases}
        block |= {f"self_attn.{x}_norm.weight": (dim,) for x in ("q", "k") if norms}
        shapes |= {f"{part}.{name}": shape for name, shape in block.items()}
    return shapes | {"Ekv2E.weight": (hidden, width), "Ekv2E.bias": (hidden,)}


def block_shapes(hidden: int, q: int, kv: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def random_drafter(
    config: Any, sizes: Mapping[str, int], seed: int, calm: float = 1.0
) -> dict[str, Tensor]:
    """Returns a drafter's float32 tensors under the authors' names; `sizes` is of `draft_sizes`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = draft_shapes(config, sizes)
    return {name: random_weight(name, shape, generator, calm) for name, shape in shapes.items()}


class RandomBatch(NamedTuple):
    """Right-padded rows, int64 (B, T); each row has several answers between questions."""

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor


def random_batch(vocab_size: int, lengths: Sequence[int], seed: int) -> RandomBatch:
    """Returns one conversation per row, `lengths[b]` tokens long, in turns of 2 to 8 tokens.

    The first turn is a question, so a row of 9 or more has an answer. Ids start at 3.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    real_BT = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    response_BT = torch.zeros(shape, dtype=torch.int64)
    for row in response_BT:
        turns = torch.randint(2, 9, shape[1:], generator=generator)
        speaker = torch.arange(len(turns)).remainder(2).repeat_interleave(turns)
        row[:] = speaker[: shape[1]]
    tokens_BT = torch.randint(3, vocab_size, shape, generator=generator)
    return RandomBatch(tokens_BT * real_BT, real_BT.long(), response_BT * real_BT)


def save_pair(
    target_folder: Path, draft_folder: Path, model: Any, draft: Mapping[str, Tensor]
) -> None:
    """Writes both folders as Hugging Face and as the authors' code do (reference 1.9).

    The drafter's config.json is the target's in the spelling of transformers 4, with another
    architecture and without the drafter's own sizes or N.
    """
    model.save_pretrained(target_folder)
    draft_folder.mkdir(parents=True, exist_ok=True)
    written = json.loads((target_folder / "config.json").read_text())
    rope = written.pop("rope_parameters")
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    written["rope_theta"] = rope.pop("rope_theta")
    written["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if local:
        written["rope_local_base_freq"] = local["rope_theta"]
    written["torch_dtype"] = written.pop("dtype")
    written |= {"architectures": ["MOASpec"], "transformers_version": "4.45.2"}
    (draft_folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    save_file(dict(draft), draft_folder / "model.safetensors", metadata={"format": "pt"})
