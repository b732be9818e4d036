"""Unsupported tensor layouts that are recognised, so that an error can name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EAGLE3 = "use the official layout, with tensors midlayer.*"
_EAGLE = "use the official layout, with tensors fc.* and layers.0.*"
_OTHER_KIND = "use a drafter of another kind"
_RENAME = "save the model again without it"
# (pattern, layout, advice): the first pattern that matches the full name of a tensor applies.
_LAYOUTS = (
    (r"(model\.)?(fc_norm\.\d+|input_norm)\.weight", "EAGLE-3.1 (norms before fc)", _OTHER_KIND),
    (r"model\.(midlayer|layers\.0)\.hidden_norm\.weight", "EAGLE-3 below `model.`", _EAGLE3),
    (r"layers\.0\.hidden_norm\.weight", "speculators' EAGLE-3 (tensors layers.0.*)", _EAGLE3),
    (r"fusion_fc\.weight", "speculators' EAGLE-1 (tensors fusion_fc and transformer.*)", _EAGLE),
    (r"model\.fc\.weight", "EAGLE-1 below `model.`", _EAGLE),
    (r"(medusa_heads?\.)?\d+\.0\.linear\.weight", "Medusa heads", _OTHER_KIND),
    (r"hydra_head.*", "Hydra heads", _OTHER_KIND),
    (r"(speculator\.)?emb\.0\.weight", "an MLP speculator", _OTHER_KIND),
    (r"mtp\..*|mtp_layers\..*|.*\.eh_proj\.weight", "multi-token prediction (MTP)", _OTHER_KIND),
    (r"base_model\.model\..*|.*\.lora_[AB]\..*", "a LoRA adapter", "merge it into its model"),
    (r"tok_embeddings\.weight", "Meta's and Mistral's releases", "use the Hugging Face files"),
    (r"module\..*", "DistributedDataParallel (a prefix `module.`)", _RENAME),
    (r"_orig_mod\..*", "torch.compile (a prefix `_orig_mod.`)", _RENAME),
    (r"(language_model|text_model|thinker)\..*", "a multimodal model", "use a text model"),
)


def foreign_layout(names: Iterable[str]) -> str | None:
    """The end of an error message with the layout of these tensors; None for an unknown layout."""
    names = list(names)
    for pattern, layout, advice in _LAYOUTS:
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            return f"its tensors ({found}, ...) have the layout of {layout}, not read yet; {advice}"
    return None
