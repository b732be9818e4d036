"""The flag --draft-vocabulary, and the draft vocabulary that the flag selects."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moa_jax.decode.draft_vocabulary import (
    FILE,
    DraftVocabulary,
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
        help=f"draft from these tokens only (train.vocabulary), or from all with {NONE}; default: "
        f"{FILE} of the drafter's folder, else {NONE}",
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
    found = drafter and vocabulary_beside(target, drafter)
    if found:
        print(
            f"drafts from {len(found.ids_U)} of {found.vocab_size} tokens, those of {found.file} "
            f"(--draft-vocabulary {NONE} drafts from all)",
            file=sys.stderr,
        )
    return found


def source_of(vocabulary: DraftVocabulary | None) -> str | None:
    """The file of a draft vocabulary, ready for JSON; None is the target's whole vocabulary."""
    return vocabulary and str(vocabulary.file)
