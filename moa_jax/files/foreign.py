"""Tensor names of other software: EAGLE's and those of models with a vision tower are renamed.

Unsupported layouts are named in errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moa_jax.errors import InputError

_EAGLE = "use the official layout, with tensors fc.* and layers.0.*"
_OTHER_KIND = "use a drafter of another kind"
_RENAME = "save the model again without it"
# (pattern, layout, advice): the first pattern that matches the full name of a tensor applies.
_LAYOUTS = (
    (r"fusion_fc\.weight", "speculators' EAGLE-1 (tensors fusion_fc and transformer.*)", _EAGLE),
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


_TOWERS = r"(model\.)?(vision_tower|multi_modal_projector)\."
_TEXT = r"(model\.language_model|language_model\.model)\."


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a text model's tensors among those of a model with a vision tower.

    Keys are names in the files. transformers 4 and 5 write different prefixes of both parts. Names
    of a text model alone are unchanged.
    """
    found = {name: name for name in names if not re.match(_TOWERS, name)}
    if any(re.match(_TEXT, name) for name in found):
        found = {
            name: re.sub(_TEXT, "model.", name).removeprefix("language_model.") for name in found
        }
    return found


def official_names(names: Iterable[str]) -> dict[str, str]:
    """The official names of a drafter's tensors, by the names in its files.

    NeMo and others put all tensors of an EAGLE drafter but the head below `model.`, and the layer
    of EAGLE-3 is `layers.0` in files of speculators, NVIDIA and NeMo. Other drafters keep their
    names. Raises InputError for two tensors with one official name.
    """
    official = {name: name for name in names}
    if "model.fc.weight" in official:
        official = {name: name.removeprefix("model.") for name in official}
    if "layers.0.hidden_norm.weight" in official.values():
        official = {
            name: re.sub(r"^layers\.0\.", "midlayer.", new) for name, new in official.items()
        }
    stored: dict[str, str] = {}
    for name, new in official.items():
        if stored.setdefault(new, name) != name:
            raise InputError(
                f"{stored[new]} and {name} are one tensor under two names; remove the tensor that "
                "does not belong to this drafter"
            )
    return official
