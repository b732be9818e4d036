"""Responses in OpenAI's two formats, completions and chats, whole or as stream events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from infer.openai.errors import as_json
from infer.openai.parsers import DeltaToolCall
from infer.openai.streams import Choice, Delta, RequestStream
from infer.openai.tokens import TokenTexts
from moa_jax.decode.logprobs import TokenLogprob
from moa_jax.version import __version__

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI and vLLM write this


SpecMetrics = Literal["none", "summary", "detailed"]


class Replies:
    """Builds the response to one request, whole or as events."""

    def __init__(
        self, stream: RequestStream, token_texts: TokenTexts, spec_metrics: SpecMetrics = "none"
    ) -> None:
        """`spec_metrics` is the level of detail of the field `metrics`."""
        self._spec_metrics = spec_metrics
        self._stream, self._request = stream, stream.request
        self._token_texts = token_texts
        self._begun: set[int] = set()  # choices of a chat whose role is sent
        self.id = f"{'chatcmpl' if self._request.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._same = {
            "id": self.id,
            "object": self._object(),
            "created": int(time.time()),
            "model": stream.model.name,
            "system_fingerprint": f"moa-jax-{__version__}",
            "seed": self._request.sampling.seed,  # reproduces the answer
        }

    async def whole(self, deltas: list[Delta]) -> bytes:
        """The response with all choices, as JSON.

        Serializing log-probabilities is slow, so other tasks run after each choice.
        """
        choices = []
        for choice, delta in zip(self._stream.choices, deltas, strict=True):
            choices.append(as_json(self._choice(choice, delta, "message")))
            await asyncio.sleep(0)
        rest = self._reply([{}]) | self._figures()
        del rest["choices"]
        if self._request.chat and self._request.fields.prompt_logprobs is not None:
            rest["prompt_logprobs"] = self._of_prompt(self._stream.choices[0])
        return b'%s,"choices":[%s]}' % (as_json(rest)[:-1], b",".join(choices))

    def events(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """The stream events for a delta of a choice."""
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        rest: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if self._request.chat and first:
            role = {"role": "assistant", "content": ""}
            opening = {"index": choice.index, "delta": role, "logprobs": None}
            yield event(self._reply([opening | {"finish_reason": None}]) | rest)
        found = self._choice(choice, delta, "delta")
        rest_of_delta = delta.finish or delta.scored or found.get("token_ids")
        if found.get("delta") == {} and not rest_of_delta:  # the text is held back
            return
        if self._request.fields.return_token_ids and not self._request.chat and not first:
            del found["prompt_token_ids"]
        yield event(self._reply([found], first=False) | rest)

    def last_events(self) -> Iterator[bytes]:
        """The last events of a stream: the usage, with `include_usage`, and [DONE]."""
        if self._request.include_usage:
            yield event(self._reply([]) | self._figures())
        yield DONE

    def _object(self) -> str:
        if not self._request.chat:
            return "text_completion"
        return "chat.completion.chunk" if self._request.fields.stream else "chat.completion"

    def _reply(self, choices: list[dict[str, Any]], first: bool = True) -> dict[str, Any]:
        reply = self._same | {"choices": choices}
        if self._request.chat and self._request.fields.return_token_ids and first and choices:
            reply["prompt_token_ids"] = list(self._request.prompts[0].ids)
        return reply

    def _choice(self, choice: Choice, delta: Delta, name: str) -> dict[str, Any]:
        """A choice as a JSON-ready dictionary; `name` is the field with the text of a chat."""
        found: dict[str, Any] = {"index": choice.index}
        if self._request.chat:
            found[name] = _message(delta) if name == "message" else _delta_message(delta)
        else:
            found["text"] = delta.text
        found["logprobs"] = None
        if self._request.top_logprobs is not None:
            found["logprobs"] = self._in_chat(delta) if self._request.chat else self._listed(delta)
        found["finish_reason"] = delta.finish or None
        found["stop_reason"] = delta.stop_reason
        if self._request.fields.return_token_ids:
            found["token_ids"] = delta.token_ids
            if not self._request.chat:
                found["prompt_token_ids"] = list(self._request.prompts[choice.prompt].ids)
        if self._request.fields.prompt_logprobs is not None and not self._request.chat:
            found["prompt_logprobs"] = self._of_prompt(choice)
        return found

    def _figures(self) -> dict[str, Any]:
        """The usage, and the metrics of the request if the server reports any."""
        prompt, generated = self._stream.num_prompt_tokens, self._stream.num_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._stream.num_cached_tokens},
        }
        if self._spec_metrics == "none":
            return {"usage": usage}
        num_spec_tokens = len(self._stream.engine.stats().accepted_by_position)
        if len(self._stream.choices) > 1 or not num_spec_tokens:  # as in vLLM
            return {"usage": usage, "metrics": None}
        found = _of_speculation(self._stream.choices[0].rounds, num_spec_tokens)
        if self._spec_metrics == "summary":
            del found["per_step_accepted"], found["per_step_drafted"]
        return {"usage": usage, "metrics": {"speculative_decoding": found}}

    def _of_prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """The field `prompt_logprobs`: None for the first token of the prompt."""
        likely = zip(self._request.prompts[choice.prompt].ids, choice.prompt_logprobs, strict=True)
        return [each and self._ranked(token, each) for token, each in likely]

    def _ranked(self, token: int, likely: TokenLogprob) -> dict[str, Any]:
        """Log-probabilities of a token and the top tokens; ranks below those are null."""
        ranks = {other: rank for rank, (other, _) in enumerate(likely.top, 1)}
        top = dict(likely.top[: self._request.fields.prompt_logprobs])
        return {
            str(other): {
                "logprob": _finite(logprob),
                "rank": ranks.get(other),
                "decoded_token": self._text_of(other),
            }
            for other, logprob in ({token: likely.logprob} | top).items()
        }

    def _in_chat(self, delta: Delta) -> dict[str, Any]:
        """Log-probabilities in the format of chats."""
        content = []
        for token, likely, _ in delta.scored:
            top = [self._entry(other, logprob) for other, logprob in self._top(likely)]
            content.append(self._entry(token, likely.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token_texts(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _listed(self, delta: Delta) -> dict[str, Any]:
        """Log-probabilities in the format of completions; None for a prompt's first token."""
        return {
            "tokens": [self._text_of(token) for token, _, _ in delta.scored],
            "token_logprobs": [likely and _finite(likely.logprob) for _, likely, _ in delta.scored],
            "top_logprobs": [
                likely and self._top_and_chosen(token, likely) for token, likely, _ in delta.scored
            ],
            "text_offset": [offset for _, _, offset in delta.scored],
        }

    def _top_and_chosen(self, token: int, likely: TokenLogprob) -> dict[str, float]:
        """Log-probabilities of the top tokens and the chosen token, by text."""
        pairs = (*self._top(likely), (token, likely.logprob))
        return {self._text_of(other): _finite(logprob) for other, logprob in pairs}

    def _text_of(self, token: int) -> str:
        return self._token_texts(token)[0]

    def _top(self, likely: TokenLogprob) -> list[tuple[int, float]]:
        return likely.top[: self._request.top_logprobs or 0]


def _of_speculation(rounds: list[tuple[int, int]], num_spec_tokens: int) -> dict[str, Any]:
    """The field `metrics.speculative_decoding`, under vLLM's names.

    `rounds` has the tokens committed and drafted in each round; plain rounds do not count.
    `num_spec_tokens` is the number of tokens of the longest path of a draft. A stop or the limit
    may truncate the last round.
    """
    accepted = [committed - 1 for committed, drafted in rounds if drafted]
    drafted = [drafted for _, drafted in rounds if drafted]
    histogram = Counter(accepted)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": [histogram[count] for count in range(num_spec_tokens + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def _message(delta: Delta) -> dict[str, Any]:
    """A whole message; without content, a message with reasoning or calls has content null."""
    called = [_tool_call(call) for call in delta.tool_calls]
    for call in called:
        del call["index"]
    content = delta.text or (None if called or delta.reasoning else "")
    message = {"role": "assistant", "content": content, "refusal": None}
    message |= {"reasoning": delta.reasoning} if delta.reasoning else {}
    return message | ({"tool_calls": called} if called else {})


def _delta_message(delta: Delta) -> dict[str, Any]:
    """The parts of a message that a stream event adds."""
    calls = [_tool_call(call) for call in delta.tool_calls]
    parts = {"reasoning": delta.reasoning, "content": delta.text, "tool_calls": calls}
    return {name: part for name, part in parts.items() if part}


def _tool_call(call: DeltaToolCall) -> dict[str, Any]:
    """A piece of a call; the first piece has an id and the name of the function."""
    function = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    begin = {"index": call.index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return begin | {"function": {"name": call.name, **function}}


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(content) + b"\n\n"


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
