"""The choices of one request: the engine's output becomes deltas that are sent to the client.

    engine's thread    on_output(RequestOutput)
                          | call_soon_threadsafe
                          v
    event loop         Choice._on_output: text, stops, log-probabilities -> Delta
                                                                              |
    a client's task    changed.wait, Choice.take  <---------------------------'

Output is detokenized on arrival, whether the client reads or not. A stop string ends its answer at
once, the deltas of a slow client are merged into one, and the engine never waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from infer.openai.errors import FAULT, TOO_MANY, APIError, bad, stopping
from infer.openai.metrics import ServingMetrics
from infer.openai.model import Model
from infer.openai.parsers import DeltaMessage
from infer.openai.requests import GenerationRequest
from moa_jax.decode.detokenize import GrowingText
from moa_jax.decode.logprobs import TokenLogprob
from moa_jax.decode.session import row_of
from moa_jax.engine import Engine, EngineClosed, QueueFull, Request, RequestOutput
from moa_jax.errors import InputError
from moa_jax.grammar.masks import Grammar


class ScoredToken(NamedTuple):
    """A token of an answer, or of the prompt before it, with its log-probability."""

    token: int
    likely: TokenLogprob | None  # None for the first token of a prompt
    offset: int  # of the token in the text


@dataclasses.dataclass
class Delta(DeltaMessage):
    """The part of a choice that is not sent yet."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    scored: list[ScoredToken] = dataclasses.field(default_factory=list)  # if requested
    finish: str = ""  # "stop", "length", "tool_calls", or "" before the end
    stop_reason: int | str | None = None  # the stop string or the id of `stop_token_ids`

    def __bool__(self) -> bool:
        has_message = self.text or self.reasoning or self.tool_calls
        return bool(has_message or self.token_ids or self.scored or self.finish)


class Choice:
    """One choice of a request."""

    def __init__(self, stream: RequestStream, index: int, prompt: int) -> None:
        """Choice `index` of a request, for prompt `prompt`."""
        request = stream.request
        self.index, self.prompt = index, prompt
        self.finish, self.num_tokens, self.num_cached = "", 0, 0
        self.rounds: list[tuple[int, int]] = []  # tokens committed and drafted in each round
        self.prompt_logprobs: list[TokenLogprob | None] = []  # for the field `prompt_logprobs`
        self.handle: int | None = None
        self._stream, self._request = stream, request
        self._echoed = request.prompts[prompt]
        self._text = GrowingText(
            stream.model.tokenizer,
            request.stops,
            keep_stop=request.fields.include_stop_str_in_output,
            skip_special=request.fields.skip_special_tokens,
            tags=request.tags,
            preceding=() if request.chat else self._echoed.ids,
            min_tokens=request.fields.min_tokens,
        )
        self._parser = request.new_parser()
        self._num_scored = self._num_shown = 0  # echoed tokens and characters of the prompt
        self._delta = Delta("" if request.echoes_logprobs else self._echoed.text)

    def on_output(self, output: RequestOutput) -> None:
        """Receives output in the engine's thread."""
        try:
            self._stream.loop.call_soon_threadsafe(self._on_output, output)
        except RuntimeError:  # the event loop has ended
            pass

    def take(self) -> Delta:
        """Returns the delta since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _on_output(self, output: RequestOutput) -> None:
        """Adds output to the delta, unless the choice has ended; an exception ends the request."""
        if self.finish:
            return
        try:
            self._read(output)
        except Exception as error:
            self._stream.failed(error)
        self._stream.changed.set()

    def _read(self, output: RequestOutput) -> None:
        self.num_cached = max(self.num_cached, output.num_cached)
        self.rounds += output.rounds
        if self._request.fields.prompt_logprobs is not None:
            self.prompt_logprobs += output.prompt_logprobs
        if self._request.echoes_logprobs and output.prompt_logprobs:
            self._echo(output.prompt_logprobs)
        if output.token_ids:
            self._stream.timed(self, self._write(output))
        if self._text.stop is not None:
            self._end("stop", self._text.stop)
            self._stream.engine.cancel(self.handle)  # the engine does not check stop strings
        elif output.finish_reason in ("stop", "length"):
            self._parser.feed(self._text.end(), self._delta)
            own = self._stream.model.eos_ids
            last = self._delta.token_ids[-1] if self._delta.token_ids else None
            self._end(
                output.finish_reason,
                last if output.finish_reason == "stop" and last not in own else None,
            )
        elif output.finish_reason:
            self._end(output.finish_reason, None)
            self._stream.fail(output)

    def _echo(self, likely: Sequence[TokenLogprob | None]) -> None:
        """Adds the next tokens of the prompt, their log-probabilities and their text."""
        prompt, begin = self._echoed, self._num_scored
        end = begin + len(likely)
        shown = prompt.offsets[end] if end < len(prompt.ids) else len(prompt.text)
        self._delta.text += prompt.text[self._num_shown : shown]
        tokens = prompt.ids[begin:end], likely, prompt.offsets[begin:end]
        self._delta.scored += map(ScoredToken, *tokens)
        self._num_scored, self._num_shown = end, shown

    def _write(self, output: RequestOutput) -> int:
        """Adds tokens to the delta, one by one with log-probabilities; returns the number added."""
        tokens, delta, text = list(output.token_ids), self._delta, self._text
        keep_stop = self._request.fields.include_stop_str_in_output
        hidden = tokens[-1:] if output.finish_reason == "stop" and not keep_stop else []
        visible = tokens[: len(tokens) - len(hidden)]
        with_likely = self._request.top_logprobs is not None
        before, offsets = text.num_tokens, []
        for group in [[token] for token in visible] if with_likely else [visible]:
            if text.stop is not None:
                break
            self._parser.feed(text.add(group), delta)
            offsets.append(text.begin)
        count = text.num_tokens - before
        if hidden and text.stop is None:  # the stop token has no text
            offsets.append(text.num_characters)
            count += 1
        delta.token_ids += tokens[:count]
        if with_likely:
            places = (len(self._echoed.text) + offset for offset in offsets)
            delta.scored += map(ScoredToken, tokens[:count], output.logprobs, places)
        self.num_tokens += count
        return count

    def _end(self, finish: str, reason: int | str | None) -> None:
        self._parser.end(self._delta)
        calls = finish == "stop" and self._parser.num_calls
        self.finish = finish
        self._delta.finish = self._request.finish_of_calls if calls else finish
        self._delta.stop_reason = reason


class RequestStream:
    """All choices of a request; the engine decodes them from `submit` to their end or `cancel`."""

    def __init__(
        self,
        request: GenerationRequest,
        engine: Engine,
        model: Model,
        metrics: ServingMetrics,
        began: float,
        grammar: Grammar | None = None,
    ) -> None:
        """`began` is the time of arrival, by `time.monotonic`; `grammar` is that of the request."""
        self._grammar = grammar
        self.request, self.engine, self.model, self.metrics = request, engine, model, metrics
        self.began = began
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.choices = [
            Choice(self, prompt * request.fields.n + i, prompt)
            for prompt in range(len(request.prompts))
            for i in range(request.fields.n)
        ]
        self._seen = [0.0] * len(self.choices)  # time of the last tokens, by choice
        self._failure: Exception | None = None

    def submit(self) -> None:
        """Submits all choices to the engine, or none; raises APIError."""
        request, of_prompt = self.request, self.request.fields.prompt_logprobs
        top_logprobs = request.top_logprobs
        if top_logprobs is not None:
            top_logprobs = max(top_logprobs, of_prompt or 0)
        most = self.engine.stats().slots + self.engine.max_waiting
        if len(self.choices) > most:  # more than the queue can ever hold
            name = "n" if request.fields.n > 1 else "prompt"
            raise bad(name, f"{name}: {len(self.choices)} choices; ask for {most} at most")
        try:
            for choice in self.choices:
                engine_request = Request(
                    prompt_ids=request.prompts[choice.prompt].ids,
                    max_new_tokens=request.new_tokens[choice.prompt],
                    stop_ids=request.stop_ids,
                    sampling=row_of(request.sampling, choice.index),
                    top_logprobs=top_logprobs,
                    prompt_logprobs=request.echoes_logprobs or of_prompt is not None,
                    grammar=self._grammar,
                )
                others = len(self.choices) - 1 - choice.index
                choice.handle = self.engine.submit(engine_request, choice.on_output, others)
        except QueueFull as error:
            self.cancel()
            wait = {"Retry-After": str(self.metrics.seconds_until_room(self.engine.stats()))}
            code = "rate_limit_exceeded"
            raise APIError(TOO_MANY, str(error), code=code, headers=wait) from error
        except EngineClosed as error:
            self.cancel()
            raise stopping() from error
        except InputError as error:
            self.cancel()
            raise bad("messages" if request.chat else "prompt", str(error)) from error

    async def parts(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Yields deltas of the choices until all have ended; raises the request's failure."""
        async for _ in self._changes():
            for choice in self.choices:
                if delta := choice.take():
                    yield choice, delta

    async def whole(self) -> list[Delta]:
        """One delta per choice, after all have ended; raises the request's failure."""
        async for _ in self._changes():
            pass
        return [choice.take() for choice in self.choices]

    async def _changes(self) -> AsyncIterator[None]:
        """Yields at once and after each change, the last time when all choices have ended."""
        while True:
            if self._failure is not None:
                raise self._failure
            done = self.done
            yield
            if done:
                return
            await self.changed.wait()
            self.changed.clear()

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.request.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts that the prefix cache had for the first choice of each prompt."""
        return sum(choice.num_cached for choice in self.choices[:: self.request.fields.n])

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def cancel(self) -> None:
        """Cancels the choices that have not ended."""
        for choice in self.choices:
            if choice.handle is not None and not choice.finish:
                choice.finish = "cancelled"
                self.engine.cancel(choice.handle)

    def stop(self) -> None:
        """Ends the request because the server shuts down."""
        self._failure = stopping()
        self.changed.set()

    def fail(self, output: RequestOutput) -> None:
        """Ends the request with the failure of one of its choices."""
        if output.finish_reason == "cancelled":  # by a closing engine
            self.stop()
        else:
            self._failure = APIError(FAULT, output.error or "the engine failed")

    def failed(self, error: Exception) -> None:
        """Ends the request with an exception, which the client's task raises."""
        self._failure = error

    def timed(self, choice: Choice, count: int) -> None:
        """Records a choice's new tokens, and the time since its previous tokens, in the metrics."""
        self.metrics.gave(count)
        now, before = time.monotonic(), self._seen[choice.index]
        self._seen[choice.index] = now
        if before:
            self.metrics.took(now - before, count)
        else:
            self.metrics.first_token.observe(now - self.began)
