"""The served model: its name, its limits and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from infer.openai.errors import NO_SUCH, APIError, bad, shown
from moa_jax.config.checks import is_utf8
from moa_jax.data import chat
from moa_jax.data.records import Message
from moa_jax.decode.detokenize import GrowingText, detokenizer_of, special_ids
from moa_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Model:
    """The served model; without a tokenizer, prompts and answers are token ids."""

    name: str
    tokenizer: Any | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_tokens: int  # of a sequence: prompt and answer
    max_prompt: int
    created: int  # seconds since 1970
    reasoning_parser: str = "none"  # one of REASONING_PARSERS
    tool_call_parser: str = "none"  # one of TOOL_PARSERS
    # Arguments of the chat template, unless a request has others.
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check_name(self, name: Any) -> None:
        """Raises APIError for the field `model` of another model; None is any model."""
        if name is not None and not (isinstance(name, str) and is_utf8(name)):
            raise bad("model", f"model is {shown(name)}; give a name")
        if name not in (None, self.name):
            raise APIError(
                NO_SUCH,
                f"model {shown(name)} is not served here; ask for {self.name}",
                param="model",
                code="model_not_found",
            )

    def ids_of(self, text: str, param: str, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text; with `special`, the tokenizer adds special tokens at the ends.

        Raises APIError for a text that is much too long, and without a tokenizer.
        """
        if self.tokenizer is None:
            raise bad(param, f"{param}: the model has no tokenizer; give token ids")
        self.check_characters(len(text), param)
        found = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return tuple(found["input_ids"])

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids; without a tokenizer the ids themselves."""
        return detokenizer_of(self.tokenizer, skip_special=False).decode(ids)

    def offsets_of(self, text: str, ids: Sequence[int], special: bool = True) -> tuple[int, ...]:
        """Offsets by token in a prompt's text; special tokens have the offset of a neighbour."""
        if self.tokenizer is not None and self.tokenizer.is_fast:
            options = {"return_offsets_mapping": True, "verbose": False}
            found = self.tokenizer(text, add_special_tokens=special, **options)
            if tuple(found["input_ids"]) == tuple(ids):
                begins, ends = zip(*found["offset_mapping"], strict=True)
                # Some tokenizers exclude the space before a token from the token's span.
                tiled = map(min, begins, (0, *ends))
                return tuple(itertools.accumulate(tiled, max))
        written, begins = GrowingText(self.tokenizer, skip_special=False), []
        for token in ids:  # ids without a text, or a tokenizer without offsets
            written.add([token])
            begins.append(min(written.begin, len(text)))
        return tuple(begins)

    def rendered(
        self, messages: list[Message], generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[int, ...]]:
        """The text and the token ids of a conversation in the chat template.

        `template_kwargs` holds arguments of the template. Raises APIError for a model without a
        template, and for messages and arguments that the template refuses.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise bad(
                "messages",
                f"messages: {self.name} has no chat template, as base models have none; "
                "ask /v1/completions",
                "no_chat_template",
            )
        self.check_characters(sum(len(message["content"]) for message in messages), "messages")
        template_kwargs = {**self.template_kwargs, **template_kwargs}
        try:
            text = chat.render(self.tokenizer, messages, generation_prompt, template_kwargs)
        except InputError as error:
            raise bad("messages", f"messages: {error}") from error
        return text, self.ids_of(text, "messages", special=False)

    def check_characters(self, count: int, param: str) -> None:
        """Raises APIError for a text with too many characters for `max_prompt` tokens."""
        if count > self.max_prompt * self._longest_token:
            raise self._too_long(param, f"more than {self.max_prompt}")

    def check_length(self, param: str, ids: Sequence[int]) -> None:
        """Raises APIError for a prompt without tokens, or with more than `max_prompt`."""
        if not ids:
            raise bad(param, f"{param}: the prompt is empty; give at least one token")
        if len(ids) > self.max_prompt:
            raise self._too_long(param, str(len(ids)))

    def _too_long(self, param: str, tokens: str) -> APIError:
        most = f"{self.max_prompt} are the most; shorten it"
        message = f"{param}: the prompt has {tokens} tokens, and {most}"
        return bad(param, message, "context_length_exceeded")

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "moa-jax",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_tokens,
        }

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens, by text."""
        return special_ids(self.tokenizer)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)
