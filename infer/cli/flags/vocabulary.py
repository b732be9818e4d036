"""The flag --draft-vocabulary, and the draft vocabulary that the flag selects."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from infer.cli.flags.auto import vocabulary_pays
from moa_jax.decode.draft_vocabulary import (
    FILE,
    MANY_TOKENS,
    DraftVocabulary,
    default_vocabulary,
    load_vocabulary,
    vocabulary_beside,
)
from moa_jax.pretrained import LoadedDrafter, Target

NONE = "none"  # draft from all tokens


def add_vocabulary_flag(group: Any) -> None:
    """Add --draft-vocabulary, from which `vocabulary_of` chooses."""
    group.add_argument(
        "--draft-vocabulary",
        metavar="FILE",
        help="draft from these tokens only (train.vocabulary), or from all with "
        f"{NONE}; default: {FILE} of the drafter's folder for targets of more than "
        f"{MANY_TOKENS} tokens and where infer.bench has found its rounds shorter, else {NONE}",
    )


def vocabulary_of(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter | None
) -> DraftVocabulary | None:
    """The vocabulary of --draft-vocabulary, else the default, which is reported on stderr.

    None is the target's whole vocabulary. Raises InputError like `load_vocabulary`.
    """
    asked = args.draft_vocabulary
    if asked == NONE:
        return None
    if asked is not None:
        return load_vocabulary(asked, target)
    found = drafter and default_of(target, drafter, args.weights)
    if found:
        print(
            f"drafts from {len(found.ids_U)} of {found.vocab_size} tokens, those of {found.file} "
            f"(--draft-vocabulary {NONE} drafts from all)",
            file=sys.stderr,
        )
    return found


def default_of(
    target: Target, drafter: LoadedDrafter, weights: str | None
) -> DraftVocabulary | None:
    """The drafter's vocabulary if the target's is large or rounds are measured shorter, else None.

    Raises InputError like `load_vocabulary`.
    """
    if found := default_vocabulary(target, drafter):
        return found
    found = vocabulary_beside(target, drafter)
    return found if found and vocabulary_pays(target, drafter, found, weights) else None


def source_of(vocabulary: DraftVocabulary | None) -> str | None:
    """The file of a draft vocabulary, ready for JSON; None is the target's whole vocabulary."""
    return vocabulary and str(vocabulary.file)
