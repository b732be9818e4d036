"""The tokens that end an answer by a tokenizer's files: eos, and the chat template's end of a turn.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nANSWER<|im_end|>\\n
                                                                ^ the end of a turn

The first special token that the chat template writes after an answer ends a turn. This token often
differs from the eos token, and config.json often states neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moa_jax.files.token_ids import read_tokens
from moa_jax.files.whole_files import read_json

QUESTION, ANSWER = "question0", "answer0"  # strings that no template writes


class TokenizerEnds(NamedTuple):
    """Special token ids from a tokenizer's files; None for ids that the files do not state."""

    eos_id: int | None = None
    turn_id: int | None = None  # follows an answer in the chat template
    pad_id: int | None = None


def read_ends(folder: Path) -> TokenizerEnds:
    """Special token ids of a folder's tokenizer; raises InputError for damaged files."""
    if (tokenizer := read_tokens(folder)) is None:
        return TokenizerEnds()
    ids = tokenizer.ids
    settings = _json_of(folder / "special_tokens_map.json")
    settings |= _json_of(folder / "tokenizer_config.json")
    found = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    named = {key: token for key, token in found.items() if token}
    eos_id, pad_id = (ids.get(named.get(key)) for key in ("eos_token", "pad_token"))
    mark = _mark_after_answers(chat_template_of(folder, settings), named, tokenizer.added)
    return TokenizerEnds(eos_id, ids.get(mark), pad_id)


def _json_of(path: Path) -> dict[str, Any]:
    """The values of a JSON file that are not null; empty if the file does not exist."""
    found = read_json(path) if path.is_file() else {}
    return {key: value for key, value in found.items() if value is not None}


def _content(token: Any) -> str | None:
    """The text of a special token; some files hold an object with its properties."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def chat_template_of(
    folder: Path, settings: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """The default chat template, from the first location in transformers' search order.

    `settings` are those of tokenizer_config.json.
    """
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = settings.get("chat_template")
    found = found or _json_of(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several named templates
        named = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(named, {}).get("template")
    return found if isinstance(found, str) else None


def _mark_after_answers(
    template: str | None, named: dict[str, str], added: frozenset[str]
) -> str | None:
    """The added or eos token that follows an answer.

    None without a template, for a template that fails, and if no such token follows.
    """
    if template is None:
        return None
    # Without torch, transformers prints advice to install it on stderr.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = (("user", QUESTION), ("assistant", ANSWER))
    messages = [{"role": role, "content": text} for role, text in texts]
    try:
        rendered, _ = render_jinja_template([messages], chat_template=template, **named)
    except Exception:  # templates may raise anything; `data.chat.render` reports their errors
        return None
    _, answer, after = rendered[0].rpartition(ANSWER)
    marks = [*added, named.get("eos_token")] if answer else []
    follows = after.lstrip().startswith
    return max((mark for mark in marks if mark and follows(mark)), key=len, default=None)
