"""Parses request bodies and validates each field.

The fields are those of OpenAI and those that vLLM adds; msgspec checks types and ranges. An
unsupported field that would change the answer is rejected by name; other unknown fields are
ignored, as in vLLM, and their names are logged.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from infer.openai.errors import bad, shown
from infer.openai.fields import Unsupported, not_json, read_fields, reject_unsupported, wrong
from infer.openai.grammars import GrammarText, after_reasoning, grammar_of
from infer.openai.model import Model
from infer.openai.parsers import TOOL_PARSERS, OutputParser, reasoning_at
from infer.openai.tools import Tool, ToolCall, ToolUse, tool_grammar, tool_use_of
from moa_jax.config import Sampling
from moa_jax.config.checks import is_id, is_utf8
from moa_jax.data.records import (
    Message,
    ReadRecord,
    check_template_kwargs,
    text_of_part,
    unread_by,
)
from moa_jax.decode.banned import MOST_BAD_WORDS, MOST_WORD_TOKENS
from moa_jax.errors import InputError

MOST_CHOICES, MOST_LOGPROBS, MOST_TOOLS = 128, 20, 128
DEFAULT_TOKENS = 16  # of a completion, as in OpenAI and vLLM; a chat may fill the context
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
SAMPLING = "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty".split()
# Unsupported fields that would change the answer, with the values that have no effect.
UNSUPPORTED: Unsupported = dict.fromkeys(
    "functions audio suffix prediction web_search_options prompt_embeds "
    "guided_json guided_regex guided_choice guided_grammar "
    "allowed_token_ids logits_processors chat_template "
    "documents thinking_token_budget".split(),
    (),
) | {
    "function_call": ("none",),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "return_tokens_as_token_ids": (False,),
}
UNSUPPORTED_IN_MESSAGES: Unsupported = {"function_call": (), "audio": ()}
# Fields of one of the two APIs, which the other API would ignore.
OF_CHATS: Unsupported = dict.fromkeys(("messages", "top_logprobs", "tools"), ()) | {
    "tool_choice": ("none",),
    "chat_template_kwargs": (),
}
OF_COMPLETIONS: Unsupported = {"prompt": (), "add_special_tokens": (False,)}
# Fields without an effect, which are not logged.
SILENT = set(
    "model user metadata store service_tier safety_identifier prompt_cache_key parallel_tool_calls "
    "spaces_between_special_tokens request_id priority".split()
)

MaxTokens = Annotated[int, Meta(ge=0, le=1 << 31)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MOST_TOOLS)]


class SharedFields(msgspec.Struct, kw_only=True):
    """The fields of both APIs, with OpenAI's defaults."""

    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    echo: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = 0  # -1 and 0 keep all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = -1  # random, as in vLLM
    min_tokens: MaxTokens = 0
    bad_words: Annotated[list[StopText], Meta(max_length=MOST_BAD_WORDS)] = []
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: TopLogprobs | None = None
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0)], Bias], Meta(max_length=1024)] = {}
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[Any], Meta(max_length=32)] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionFields(SharedFields, kw_only=True):
    """The fields of /v1/completions."""

    prompt: str | list[Any] | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatFields(SharedFields, kw_only=True):
    """The fields of /v1/chat/completions."""

    messages: Annotated[list[Any], Meta(min_length=1)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Tools = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class StreamOptions(msgspec.Struct):
    """The field `stream_options`."""

    include_usage: bool = False


class MessageFields(msgspec.Struct):
    """The fields of a message in a chat."""

    role: str | None = None
    content: str | Annotated[list[Any], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of `reasoning`


class TokenFields(msgspec.Struct):
    """The fields of /tokenize and /detokenize."""

    prompt: str | None = None
    messages: Annotated[list[Any], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    tokens: list[Any] | None = None
    tools: Tools = []
    chat_template_kwargs: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, with its text if `echo` returns the text."""

    field: str  # of the body that has the prompt
    ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()  # of its tokens in `text`, for prompt log-probabilities


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A valid request: `fields.n` choices per prompt."""

    chat: bool
    fields: SharedFields  # as sent
    prompts: tuple[Prompt, ...]
    new_tokens: tuple[int, ...]  # at most, by prompt
    sampling: Sampling  # of choice 0; choice i adds i to the seed
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    top_logprobs: int | None
    include_usage: bool
    ignored: tuple[str, ...]  # names of unknown fields, and of fields that the template ignores
    grammar: GrammarText | None = None  # of every answer
    new_parser: Callable[[], OutputParser] = OutputParser  # of each answer
    tags: frozenset[str] = frozenset()  # special tokens that the parser must see
    finish_of_calls: str = "tool_calls"  # the finish reason of an answer with calls

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the answer's log-probabilities begin with those of the prompt's tokens."""
        return self.fields.echo and self.top_logprobs is not None


def object_of(data: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises APIError for anything else."""
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=not_json)
    except (ValueError, RecursionError) as error:
        raise bad("body", f"the body is not JSON: {error}; send a JSON object") from error
    if not isinstance(found, dict):
        raise bad(
            "body", "the body is not a JSON object; send {...} with the fields of the request"
        )
    return found


def completion_of(body: dict[str, Any], model: Model) -> GenerationRequest:
    """The request in a body for /v1/completions; raises APIError."""
    model.check_name(body.get("model"))
    fields = read_fields(CompletionFields, body)
    reject_unsupported(body, UNSUPPORTED | OF_CHATS)
    if fields.best_of not in (None, fields.n):
        raise wrong("best_of", fields.best_of, "give the same number as n: all are returned")
    value = fields.prompt
    if not isinstance(value, list) or not value or type(value[0]) is int:
        named = [("prompt", value)]
    elif len(value) > MOST_CHOICES:
        raise bad("prompt", f"prompt has {len(value)} prompts; give at most {MOST_CHOICES}")
    else:
        named = [(f"prompt[{i}]", each) for i, each in enumerate(value)]
    prompts = [_prompt(each, name, model, fields) for name, each in named]
    least = 0 if fields.echo and fields.logprobs is not None else 1
    new_tokens = _new_tokens(fields, prompts, model, least, default=DEFAULT_TOKENS)
    return _request(body, fields, model, prompts, new_tokens, fields.logprobs)


def chat_of(body: dict[str, Any], model: Model) -> GenerationRequest:
    """The request in a body for /v1/chat/completions; raises APIError."""
    model.check_name(body.get("model"))
    fields = read_fields(ChatFields, body)
    if fields.echo:
        raise wrong("echo", True, "a chat does not repeat its messages")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad("top_logprobs", "top_logprobs goes with logprobs; give logprobs true, or neither")
    reject_unsupported(body, UNSUPPORTED | OF_COMPLETIONS)  # before the template reads the messages
    use = tool_use_of(fields.tools, fields.tool_choice, model.tool_call_parser)
    messages, template_kwargs = _messages(fields.messages), _template_kwargs(fields, body)
    text, ids = model.rendered(messages, True, template_kwargs)
    ids = _truncated(ids, fields, model, default=1)
    model.check_length("messages", ids)
    prompts = [Prompt("messages", ids)]
    new_tokens = _new_tokens(fields, prompts, model, least=1, default=None)
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    request = _request(body, fields, model, prompts, new_tokens, top_logprobs)
    unread = unread_by(model.tokenizer.chat_template, ReadRecord(messages, (), template_kwargs))
    request = dataclasses.replace(request, ignored=request.ignored + unread)
    return _with_parts(request, fields, model, use, text)


def _with_parts(
    request: GenerationRequest, fields: ChatFields, model: Model, use: ToolUse, prompt: str
) -> GenerationRequest:
    """A chat's request with a parser of its answers, and a grammar for calls of forced tools."""
    grammar, reasoning = request.grammar, reasoning_at(model.reasoning_parser, prompt)
    parallel = fields.parallel_tool_calls and not use.named
    if use.forced:
        _reject_bans(fields)
        request = dataclasses.replace(request, stop_ids=_stop_ids_of(fields, model, ends=True))
        if grammar is not None:
            line = f"{grammar.field} goes with a tool_choice of none or auto; leave one of them out"
            raise bad(grammar.field, line)
        parser, special = model.tool_call_parser, model.special_tokens
        grammar_text = tool_grammar(parser, use.forced, parallel, special)
        grammar = GrammarText("tools", grammar_text)
    if grammar is not None and reasoning != "none":
        text = after_reasoning(grammar.text, reasoning, model.special_tokens)
        grammar = grammar._replace(text=text)
    parses = use.parsed and (use.forced or grammar is None)  # a grammar of its own holds no calls
    kind = TOOL_PARSERS[model.tool_call_parser if parses else "none"]
    schemas = {tool.function.name: tool.schema for tool in fields.tools}
    return dataclasses.replace(
        request,
        grammar=grammar,
        new_parser=functools.partial(kind, reasoning, schemas, parallel),
        tags=frozenset(kind.tags(reasoning)),
        # As in OpenAI's API; vLLM has followed since its PR 25054.
        finish_of_calls="stop" if use.named else "tool_calls",
    )


def _template_kwargs(fields: ChatFields | TokenFields, body: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a request for the chat template, with the tools as sent."""
    given = fields.chat_template_kwargs
    try:
        check_template_kwargs(given, "chat_template_kwargs")
    except InputError as error:
        raise bad("chat_template_kwargs", str(error)) from error
    return given | ({"tools": body["tools"]} if fields.tools else {})


def tokens_of(body: dict[str, Any], model: Model) -> tuple[int, ...]:
    """The token ids for a body of /tokenize: of `prompt`, or of `messages` in the template."""
    model.check_name(body.get("model"))
    fields = read_fields(TokenFields, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad("prompt", "prompt and messages; give one of them")
    if fields.messages is not None:
        messages, template_kwargs = _messages(fields.messages), _template_kwargs(fields, body)
        return model.rendered(messages, fields.add_generation_prompt, template_kwargs)[1]
    return model.ids_of(fields.prompt, "prompt", fields.add_special_tokens)


def text_of(body: dict[str, Any], model: Model) -> str:
    """The text for a body of /detokenize."""
    model.check_name(body.get("model"))
    fields = read_fields(TokenFields, body)
    ids = ids_of(fields.tokens, "tokens", model)
    if model.tokenizer is None:
        raise bad("tokens", "tokens: the model has no tokenizer, and no text")
    return model.text_of(ids)


def _messages(messages: list[Any] | None) -> list[Message]:
    """The messages of a chat, as chat templates take them; raises APIError."""
    if messages is None:
        raise wrong("messages", None, "give a list of messages, each with role and content")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(place, message, "give an object with a role and a content")
    fields = read_fields(MessageFields, message, f"{place}.")
    if fields.role not in ROLES:
        raise wrong(f"{place}.role", fields.role, "give system, user, assistant or tool")
    reject_unsupported(message, UNSUPPORTED_IN_MESSAGES, f"{place}.")
    content = fields.content
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    rest = {name: value for name in ("name", "tool_call_id") if (value := getattr(fields, name))}
    if fields.role == "assistant":
        if reasoning := fields.reasoning or fields.reasoning_content:
            rest["reasoning_content"] = reasoning
        if fields.tool_calls:
            rest["tool_calls"] = [call.for_template() for call in fields.tool_calls]
            content = content or ""
    if content is None or not is_utf8(content):
        raise wrong(f"{place}.content", content, "give text of Unicode characters")
    return {"role": ROLES[fields.role], "content": content, **rest}


def _part(part: Any, place: str) -> str:
    """The text of a part of a message; raises APIError for parts of other types."""
    try:
        return text_of_part(part)
    except InputError as error:
        raise bad(place, f"{place}: {error}") from error


def _prompt(value: Any, name: str, model: Model, fields: CompletionFields) -> Prompt:
    special, text = fields.add_special_tokens, None
    if isinstance(value, str) and is_utf8(value):
        ids, text = model.ids_of(value, name, special), value
    elif isinstance(value, list):
        ids = ids_of(value, name, model)
    else:
        raise wrong(name, value, "give a text or a list of token ids")
    kept = _truncated(ids, fields, model, DEFAULT_TOKENS)
    ids, text = kept, text if kept == ids else None
    model.check_length(name, ids)
    if not fields.echo:
        return Prompt(name, ids)
    text = model.text_of(ids) if text is None else text
    scored = fields.logprobs is not None
    return Prompt(name, ids, text, model.offsets_of(text, ids, special) if scored else ())


def _truncated(
    ids: tuple[int, ...], fields: SharedFields, model: Model, default: int
) -> tuple[int, ...]:
    """The first or last `truncate_prompt_tokens` tokens of a prompt; -1 keeps all that fit.

    `default` is the length of an answer without `max_tokens`. Raises APIError if that number of
    tokens does not fit before the answer.
    """
    size, new = fields.truncate_prompt_tokens, fields.max_tokens or fields.max_completion_tokens
    if size is None:
        return ids
    most = max(1, min(model.max_prompt, model.max_tokens - (new or default)))
    if size > most:
        raise wrong("truncate_prompt_tokens", size, f"{most} tokens fit before the answer")
    size = min(most if size == -1 else size, len(ids))
    return ids[:size] if fields.truncation_side == "right" else ids[len(ids) - size :]


def ids_of(value: list[Any] | None, name: str, model: Model) -> tuple[int, ...]:
    """A list of token ids; raises APIError for ids outside the vocabulary and for anything else."""
    if value is None:
        raise wrong(name, value, "give a list of token ids")
    for token in value:
        if not is_id(token, model.vocab_size):
            below = f"give token ids from 0 to below {model.vocab_size}"
            raise bad(name, f"{name} holds {shown(token)}; {below}")
    return tuple(value)


def _request(
    body: dict[str, Any],
    fields: SharedFields,
    model: Model,
    prompts: list[Prompt],
    new_tokens: tuple[int, ...],
    top_logprobs: int | None,
) -> GenerationRequest:
    """Builds a request from the fields that both APIs share; raises APIError."""
    chat = isinstance(fields, ChatFields)
    if len(prompts) * fields.n > MOST_CHOICES:
        message = f"n is {fields.n} for {len(prompts)} prompts; give at most {MOST_CHOICES} in all"
        raise bad("n", message)
    if (top_logprobs or 0) > model.vocab_size:
        name = "top_logprobs" if chat else "logprobs"
        raise wrong(name, top_logprobs, f"the vocabulary has {model.vocab_size} tokens")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad("prompt_logprobs", "prompt_logprobs does not go with stream; leave one out")
    if fields.min_tokens > min(new_tokens):
        most = f"an answer has at most {min(new_tokens)} tokens"
        raise wrong("min_tokens", fields.min_tokens, most)
    options = fields.stream_options or {}
    if fields.stream_options is not None and not fields.stream:
        raise bad("stream_options", "stream_options goes with stream; give stream true, or neither")
    grammar = grammar_of(fields.response_format, fields.structured_outputs)
    if grammar is not None:
        _reject_bans(fields)
    known = {*fields.__struct_fields__, *UNSUPPORTED, *OF_CHATS, *OF_COMPLETIONS, *SILENT}
    ignored = _unknown(body, known) + _unknown(options, {"include_usage"}, "stream_options.")
    return GenerationRequest(
        chat=chat,
        fields=fields,
        prompts=tuple(prompts),
        new_tokens=new_tokens,
        sampling=_sampling_of(fields, model),
        stops=_stops_of(fields, model),
        stop_ids=_stop_ids_of(fields, model, ends=grammar is not None),
        top_logprobs=top_logprobs,
        include_usage=read_fields(StreamOptions, options, "stream_options.").include_usage,
        ignored=ignored,
        grammar=grammar,
    )


def _reject_bans(fields: SharedFields) -> None:
    """Raises APIError for fields that could ban every token that a grammar allows."""
    for name in ("min_tokens", "bad_words"):
        if getattr(fields, name):
            raise bad(name, f"{name} does not go with a grammar or a forced tool; leave one out")


def _unknown(body: Mapping[str, Any], known: set[str], parent: str = "") -> tuple[str, ...]:
    """Names of unknown fields whose value is not null."""
    names = (name for name, value in body.items() if value is not None and name not in known)
    return tuple(f"{parent}{name}" for name in sorted(names))


def _new_tokens(
    fields: SharedFields, prompts: list[Prompt], model: Model, least: int, default: int | None
) -> tuple[int, ...]:
    """The most new tokens per prompt; `default` None is all that fit; raises APIError."""
    older, newer = fields.max_tokens, fields.max_completion_tokens
    if None not in (older, newer) and older != newer:
        raise bad("max_tokens", "max_tokens differs from max_completion_tokens; give one of them")
    name, asked = ("max_completion_tokens", newer) if older is None else ("max_tokens", older)
    if asked is not None and asked < least:
        raise wrong(name, asked, "give 1 or more; 0 goes with echo and logprobs alone")
    fits = [model.max_tokens - len(prompt.ids) for prompt in prompts]
    if (asked or 0) > min(fits):
        message = f"after a prompt of {model.max_tokens - min(fits)} tokens {min(fits)} fit"
        raise wrong(name, asked, message, "context_length_exceeded")
    if asked is None:
        return tuple(min(default or each, each) for each in fits)
    return (asked,) * len(prompts)


def _sampling_of(fields: SharedFields, model: Model) -> Sampling:
    for token in fields.logit_bias:
        if token >= model.vocab_size:
            raise bad("logit_bias", f"logit_bias names {token}: the ids end at {model.vocab_size}")
    settings: dict[str, Any] = {name: getattr(fields, name) for name in SAMPLING}
    settings["top_k"] = fields.top_k if 0 < fields.top_k < model.vocab_size else 0
    settings["seed"] = -1 if fields.seed == -1 else fields.seed % (1 << 32)
    settings["logit_bias"] = tuple(item for item in sorted(fields.logit_bias.items()) if item[1])
    settings["min_tokens"], settings["bad_words"] = fields.min_tokens, _bad_words_of(fields, model)
    try:
        return Sampling(**settings).seeded()
    except InputError as error:  # the message begins with the name
        raise bad(str(error).partition(" ")[0], str(error)) from error


def _bad_words_of(fields: SharedFields, model: Model) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `bad_words`: each word without and with a space before it.

    vLLM bans the second sequence only if it has as many tokens as the first.
    """
    if fields.bad_words and model.tokenizer is None:
        raise bad("bad_words", "bad_words: the model has no tokenizer, and no words; leave it out")
    found: list[tuple[int, ...]] = []
    for word in map(str.lstrip, fields.bad_words):
        if not word or not is_utf8(word):
            raise wrong("bad_words", fields.bad_words, "give words of Unicode characters")
        found += [model.ids_of(text, "bad_words", special=False) for text in (word, f" {word}")]
    found = list(dict.fromkeys(filter(None, found)))
    longest = max(map(len, found), default=0)
    if len(found) > MOST_BAD_WORDS or longest > MOST_WORD_TOKENS:
        message = f"bad_words are {len(found)} token sequences, the longest of {longest} tokens"
        most = f"{MOST_BAD_WORDS} of at most {MOST_WORD_TOKENS} tokens"
        raise bad("bad_words", f"{message}; give at most {most}")
    return tuple(found)


def _stops_of(fields: SharedFields, model: Model) -> tuple[str, ...]:
    texts = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if texts and model.tokenizer is None:
        raise bad("stop", "stop: the model has no tokenizer, and no text; give stop_token_ids")
    if not all(map(is_utf8, texts)):
        raise wrong("stop", texts, "give texts of Unicode characters")
    return tuple(dict.fromkeys(texts))


def _stop_ids_of(fields: SharedFields, model: Model, ends: bool) -> tuple[int, ...]:
    """Token ids that end an answer: the model's unless `ignore_eos`, and `stop_token_ids`.

    A grammar `ends` the answer whatever `ignore_eos` is.
    """
    own = () if fields.ignore_eos and not ends else model.eos_ids
    more = ids_of(fields.stop_token_ids, "stop_token_ids", model)
    return tuple(dict.fromkeys((*own, *more)))
