"""What a request for answers asks for, checked field by field.

Fields are OpenAI's, and those that vLLM adds to them. A field that would change the answer and has
no meaning here is refused by name; other unknown fields do nothing, as with vLLM, and their names
are logged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from infer.serving.errors import bad, shown
from infer.serving.fields import Fields, is_number, is_text
from infer.serving.model import Model
from moa_jax.config import Sampling
from moa_jax.data.records import Message, text_of_part
from moa_jax.errors import InputError

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_STOP_IDS = 128, 16, 256, 32
MOST_LOGPROBS, MOST_BIASES = 20, 1024
USUAL_TOKENS = 16  # of a completion, as with OpenAI and vLLM; a chat may fill the target
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SAMPLING = (  # fields and their defaults, which are OpenAI's
    ("temperature", 1.0),
    ("top_p", 1.0),
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
)
# Fields that would change the answer. Each has the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "bad_words": (),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "logits_processors": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": (),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (),
}
# Fields of one of the two paths, which would be ignored at the other.
OF_CHATS: dict[str, tuple[Any, ...]] = {"messages": (), "top_logprobs": ()}
OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"prompt": (), "add_special_tokens": (False,)}
# Fields that change nothing. The log does not name them.
SILENT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
SILENT += ("parallel_tool_calls", "spaces_between_special_tokens", "request_id", "priority")


class MostTokens(NamedTuple):
    """How many tokens an answer may have."""

    name: str  # of the field that says so
    asked: int | None  # None: it does not
    usual: int | None = None  # where nobody asks; None: as many as fit


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, with its text where the answer repeats it."""

    place: str  # the field that has it
    ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()  # of its tokens in the text, where their log-probabilities follow


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request that can be answered: `n` choices for each prompt."""

    chat: bool
    prompts: tuple[Prompt, ...]
    new_tokens: tuple[int, ...]  # at most, for each prompt
    n: int
    sampling: Sampling  # of the first choice; each next one adds 1 to the seed
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    keep_stop: bool
    skip_special: bool
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    echo: bool
    with_ids: bool
    ignored: tuple[str, ...]  # fields that nobody knows

    @property
    def prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted, too."""
        return self.echo and self.top_logprobs is not None


def completion_of(body: dict[str, Any], model: Model) -> Wanted:
    """What a body for /v1/completions asks for; raises Refusal."""
    fields = Fields(body)
    model.check_name(fields.text("model"))
    echo = fields.flag("echo")
    top_logprobs = fields.whole("logprobs", None, 0, min(MOST_LOGPROBS, model.vocab_size))
    scored = echo and top_logprobs is not None
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    if fields.whole("best_of", n, 1, MOST_CHOICES) != n:
        raise fields.wrong("best_of", "the same number as n: all choices are returned")
    most = _most_tokens(fields, 0)._replace(usual=USUAL_TOKENS)
    if most.asked == 0 and not scored:
        raise fields.wrong(most.name, "1 or more; 0 goes with echo and logprobs alone")
    fields.refuse(REFUSED | OF_CHATS)
    special = fields.flag("add_special_tokens", default=True)
    prompts = _prompts_of(fields, model, special, echo)
    wanted = _wanted(fields, model, prompts, n, most, top_logprobs, chat=False, echo=echo)
    if scored:
        prompts = [_with_offsets(prompt, model, special) for prompt in wanted.prompts]
        wanted = dataclasses.replace(wanted, prompts=tuple(prompts))
    return wanted


def chat_of(body: dict[str, Any], model: Model) -> Wanted:
    """What a body for /v1/chat/completions asks for; raises Refusal."""
    fields = Fields(body)
    model.check_name(fields.text("model"))
    if fields.flag("echo"):
        raise fields.wrong("echo", "false: a chat does not repeat its messages")
    with_logprobs = fields.flag("logprobs")
    top_logprobs = fields.whole("top_logprobs", None, 0, min(MOST_LOGPROBS, model.vocab_size))
    if top_logprobs is not None and not with_logprobs:
        raise bad("top_logprobs", "top_logprobs goes with logprobs: give logprobs true, or neither")
    if with_logprobs:
        top_logprobs = top_logprobs or 0
    most = _most_tokens(fields, 1)
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    fields.refuse(REFUSED | OF_COMPLETIONS)  # before a template sees what it does not know
    ids = model.ids_after(messages_of(fields), generation_prompt=True)
    prompt = Prompt("messages", ids)
    return _wanted(fields, model, [prompt], n, most, top_logprobs, chat=True, echo=False)


def _most_tokens(fields: Fields, least: int) -> MostTokens:
    """The most tokens of an answer, by the older or the newer name."""
    older = fields.whole("max_tokens", None, least, 1 << 31)
    newer = fields.whole("max_completion_tokens", None, least, 1 << 31)
    if None not in (older, newer) and older != newer:
        raise bad("max_tokens", "max_tokens differs from max_completion_tokens: give one of them")
    if newer is None:
        return MostTokens("max_tokens", older)
    return MostTokens("max_completion_tokens" if older is None else "max_tokens", newer)


def messages_of(fields: Fields) -> list[Message]:
    """The messages of a chat: texts of system, user and assistant; raises Refusal."""
    messages = fields.value("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of messages, each with role and content")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise bad(place, f"{place} is no object: give it a role and a content")
    fields = Fields(message, f"{place}.")
    role = fields.text("role")
    if role not in ROLES:
        raise fields.wrong("role", "system, user or assistant")
    fields.refuse({"tool_calls": (), "function_call": (), "audio": ()})
    content = fields.value("content")
    if isinstance(content, list) and content:
        content = "\n".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    if not is_text(content):
        raise fields.wrong("content", "a text of Unicode characters")
    return {"role": ROLES[role], "content": content}


def _part(part: Any, place: str) -> str:
    """The text of a part of a message, which must be text."""
    try:
        return text_of_part(part)
    except InputError as error:
        raise bad(place, f"{place}: {error}") from error


def _prompts_of(fields: Fields, model: Model, special: bool, echo: bool) -> list[Prompt]:
    """The prompts of a completion: a text, ids, or a list of either."""
    value = fields.value("prompt")
    if isinstance(value, list) and value and type(value[0]) is not int:
        if len(value) > MOST_CHOICES:
            raise bad("prompt", f"prompt has {len(value)} prompts: give at most {MOST_CHOICES}")
        places = [(f"prompt[{i}]", each) for i, each in enumerate(value)]
    else:
        places = [("prompt", value)]
    return [_prompt(each, place, model, special, echo) for place, each in places]


def _prompt(value: Any, place: str, model: Model, special: bool, echo: bool) -> Prompt:
    if is_text(value):
        return Prompt(place, model.ids_of(value, place, special), value if echo else "")
    if not isinstance(value, list):
        raise bad(place, f"{place} is {shown(value)}: give a text or a list of token ids")
    ids = ids_of(value, place, model)
    return Prompt(place, ids, model.text_of(ids) if echo else "")


def _with_offsets(prompt: Prompt, model: Model, special: bool) -> Prompt:
    offsets = model.offsets_of(prompt.text, prompt.ids, special)
    return dataclasses.replace(prompt, offsets=offsets)


def ids_of(value: Any, place: str, model: Model) -> tuple[int, ...]:
    """A list of token ids; raises Refusal for ids outside the vocabulary and for anything else."""
    if not isinstance(value, list):
        raise bad(place, f"{place} is {shown(value)}: give a list of token ids")
    for token in value:
        if type(token) is not int:
            raise bad(place, f"{place} holds {shown(token)}: give token ids, which are numbers")
        if not 0 <= token < model.vocab_size:
            raise bad(
                place,
                f"{place} has the id {shown(token)}, outside the vocabulary of "
                f"{model.vocab_size}: use the model's own tokenizer",
            )
    return tuple(value)


def _wanted(
    fields: Fields,
    model: Model,
    prompts: list[Prompt],
    n: int,
    most: MostTokens,
    top_logprobs: int | None,
    *,
    chat: bool,
    echo: bool,
) -> Wanted:
    """The part of a request that both APIs share."""
    if len(prompts) * n > MOST_CHOICES:
        raise bad("n", f"n is {n} for {len(prompts)} prompts: {MOST_CHOICES} choices are the most")
    stream, options = fields.flag("stream"), fields.within("stream_options")
    if not stream and fields.value("stream_options") is not None:
        raise bad("stream_options", "stream_options goes with stream: give stream true, or neither")
    include_usage = options.flag("include_usage")
    wanted = Wanted(
        chat=chat,
        prompts=tuple(prompts),
        new_tokens=tuple(_new_tokens(prompt, most, model) for prompt in prompts),
        n=n,
        sampling=_sampling_of(fields, model),
        stops=_stops_of(fields, model),
        stop_ids=_stop_ids_of(fields, model),
        keep_stop=fields.flag("include_stop_str_in_output"),
        skip_special=fields.flag("skip_special_tokens", default=True),
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=include_usage,
        echo=echo,
        with_ids=fields.flag("return_token_ids"),
        ignored=(),
    )
    for name in SILENT:
        fields.value(name)
    return dataclasses.replace(wanted, ignored=(*fields.unread(), *options.unread()))


def _new_tokens(prompt: Prompt, most: MostTokens, model: Model) -> int:
    """How many tokens may follow a prompt; raises Refusal where that is less than was asked for."""
    place, length = prompt.place, len(prompt.ids)
    if not length:
        raise bad(place, f"{place}: the prompt is empty: give at least one token")
    if length > model.max_prompt:
        raise model.too_long(place, length)
    fits = model.max_tokens - length
    if most.asked is None:
        return fits if most.usual is None else min(most.usual, fits)
    if most.asked > fits:
        raise bad(
            most.name,
            f"{most.name} is {most.asked}, and after a prompt of {length} tokens {fits} fit: ask "
            "for less",
            "context_length_exceeded",
        )
    return most.asked


def _sampling_of(fields: Fields, model: Model) -> Sampling:
    settings: dict[str, Any] = {name: fields.number(name, usual) for name, usual in SAMPLING}
    top_k = fields.whole("top_k", 0, -1, 1 << 31)
    settings["top_k"] = top_k if 0 < top_k < model.vocab_size else 0  # -1 and 0 keep all
    seed = fields.whole("seed", None, -(1 << 63), (1 << 63) - 1)
    settings["seed"] = -1 if seed in (None, -1) else seed % (1 << 32)  # -1 draws one, as with vLLM
    settings["logit_bias"] = _biases_of(fields, model)
    try:
        return Sampling(**settings).seeded()
    except InputError as error:  # its line begins with the name
        raise bad(str(error).partition(" ")[0], str(error)) from error


def _biases_of(fields: Fields, model: Model) -> tuple[tuple[int, float], ...]:
    value = fields.value("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise fields.wrong("logit_bias", f"an object of at most {MOST_BIASES} ids and biases")
    found: dict[int, float] = {}
    for name, bias in value.items():
        is_id = name.isascii() and name.isdecimal() and len(name) < 10
        if not is_id or int(name) >= model.vocab_size:
            raise bad(
                "logit_bias",
                f"logit_bias names {name[:20]!r}: give ids of the vocabulary of {model.vocab_size}",
            )
        if not is_number(bias) or not -100 <= bias <= 100:
            raise bad("logit_bias", f"logit_bias of {name}: give a number from -100 to 100")
        found[int(name)] = float(bias)
    return tuple((token, bias) for token, bias in sorted(found.items()) if bias)


def _stops_of(fields: Fields, model: Model) -> tuple[str, ...]:
    value = fields.value("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if texts and model.tokenizer is None:
        raise bad("stop", "stop: the model has no tokenizer, and no text: give stop_token_ids")
    if not isinstance(texts, list) or len(texts) > MOST_STOPS:
        raise fields.wrong("stop", f"a text or a list of at most {MOST_STOPS} texts")
    if not all(is_text(text) and 0 < len(text) <= LONGEST_STOP for text in texts):
        raise bad("stop", f"stop: give texts of 1 to {LONGEST_STOP} Unicode characters")
    return tuple(dict.fromkeys(texts))


def _stop_ids_of(fields: Fields, model: Model) -> tuple[int, ...]:
    """The ids that end an answer: the model's own, unless they are to be ignored, and more."""
    own = () if fields.flag("ignore_eos") else model.eos_ids
    value = fields.value("stop_token_ids")
    if value is None:
        return own
    if not isinstance(value, list) or len(value) > MOST_STOP_IDS:
        raise fields.wrong("stop_token_ids", f"a list of at most {MOST_STOP_IDS} ids")
    more = ids_of(value, "stop_token_ids", model)
    return tuple(dict.fromkeys((*own, *more)))
