"""The choices of one request: from the engine's thread to text that a client can be sent.

    engine's thread     hear(News)  --call_soon_threadsafe-->  Choice.note     event loop
                                                                  text, stops, log-probabilities
                                                               Delta
    a client's task     changed.wait, Choice.take  <--------------'

News become text when they come, whether the client reads or not: a stop text ends its answer at
once, a slow client's parts grow together into one, and the engine waits for nobody.
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
from infer.openai.requests import GenerationRequest
from moa_jax.decode.engine import Closed, Engine, Full, News, Request, Ticket
from moa_jax.decode.logprobs import Likely
from moa_jax.decode.session import row_of
from moa_jax.decode.text import GrowingText
from moa_jax.errors import InputError


class ScoredToken(NamedTuple):
    """A token of an answer, or of the prompt before it, with its log-probability."""

    token: int
    likely: Likely | None  # None of the first token, which nothing precedes
    offset: int  # of its text


@dataclasses.dataclass
class Delta:
    """What is new of a choice."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    scored: list[ScoredToken] = dataclasses.field(default_factory=list)  # where that is wanted
    finish: str = ""  # "stop", "length" or nothing yet
    stop_reason: int | str | None = None  # the stop text or the id of `stop_token_ids`

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids or self.scored or self.finish)


class Choice:
    """One answer that grows."""

    def __init__(self, answering: RequestStream, index: int, prompt: int) -> None:
        """Choice `index` of a request, for the prompt with number `prompt`."""
        request = answering.request
        self.index, self.prompt = index, prompt
        self.finish, self.num_tokens = "", 0
        self.ticket: Ticket | None = None
        self._answering, self._request = answering, request
        self._echoed = request.prompts[prompt]
        self._text = GrowingText(
            answering.model.tokenizer,
            request.stops,
            keep_stop=request.fields.include_stop_str_in_output,
            skip_special=request.fields.skip_special_tokens,
            behind=() if request.chat else self._echoed.ids,
        )
        self._num_scored = self._num_shown = 0  # tokens and characters of the prompt
        self._part = Delta("" if request.prompt_logprobs else self._echoed.text)

    def hear(self, news: News) -> None:
        """Hears of the engine, in its thread."""
        try:
            self._answering.loop.call_soon_threadsafe(self._note, news)
        except RuntimeError:  # the loop has ended, and with it the server
            pass

    def take(self) -> Delta:
        """What is new since the last call."""
        part, self._part = self._part, Delta()
        return part

    def _note(self, news: News) -> None:
        """Turns news into text, or a fault of ours into the request's end.

        What comes after the end does not count.
        """
        if self.finish:
            return
        try:
            self._read(news)
        except Exception as error:  # nobody waits for an answer that will not come
            self._answering.failed(error)
        self._answering.changed.set()

    def _read(self, news: News) -> None:
        if news.prompt_logprobs:
            self._echo(news.prompt_logprobs)
        if news.token_ids:
            self._answering.timed(self, self._write(news))
        if self._text.stop is not None:
            self._end("stop", self._text.stop)
            self._answering.engine.cancel(self.ticket)  # it does not know texts
        elif news.finish in ("stop", "length"):
            self._part.text += self._text.end()
            own = self._answering.model.eos_ids
            last = self._part.token_ids[-1] if self._part.token_ids else None
            self._end(news.finish, last if news.finish == "stop" and last not in own else None)
        elif news.finish:
            self._end(news.finish, None)
            self._answering.fail(news)

    def _echo(self, likely: Sequence[Likely | None]) -> None:
        """Adds the next tokens of the prompt, with as much of its text as they make sure."""
        prompt, begin = self._echoed, self._num_scored
        end = begin + len(likely)
        shown = prompt.offsets[end] if end < len(prompt.ids) else len(prompt.text)
        self._part.text += prompt.text[self._num_shown : shown]
        self._part.scored += map(
            ScoredToken, prompt.ids[begin:end], likely, prompt.offsets[begin:end]
        )
        self._num_scored, self._num_shown = end, shown

    def _write(self, news: News) -> int:
        """Adds tokens to the part, one by one where each has a place in the text; their number."""
        tokens, part, text = list(news.token_ids), self._part, self._text
        hidden = (
            tokens[-1:]
            if news.finish == "stop" and not self._request.fields.include_stop_str_in_output
            else []
        )
        visible = tokens[: len(tokens) - len(hidden)]
        with_likely = self._request.top_logprobs is not None
        before, offsets = text.num_tokens, []
        for group in [[token] for token in visible] if with_likely else [visible]:
            if text.stop is not None:
                break
            part.text += text.add(group)
            offsets.append(text.begin)
        count = text.num_tokens - before
        if hidden and text.stop is None:  # it ends the answer and is no part of its text
            offsets.append(text.num_characters)
            count += 1
        part.token_ids += tokens[:count]
        if with_likely:
            places = (len(self._echoed.text) + offset for offset in offsets)
            part.scored += map(ScoredToken, tokens[:count], news.logprobs, places)
        self.num_tokens += count
        return count

    def _end(self, finish: str, reason: int | str | None) -> None:
        self.finish = self._part.finish = finish
        self._part.stop_reason = reason


class RequestStream:
    """All choices of a request, in the engine from `submit` until they have ended or `cancel`."""

    def __init__(
        self,
        request: GenerationRequest,
        engine: Engine,
        model: Model,
        metrics: ServingMetrics,
        began: float,
    ) -> None:
        """`began` is when the request came, by `time.monotonic`."""
        self.request, self.engine, self.model, self.metrics = request, engine, model, metrics
        self.began = began
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.choices = [
            Choice(self, prompt * request.fields.n + i, prompt)
            for prompt in range(len(request.prompts))
            for i in range(request.fields.n)
        ]
        self._seen = [0.0] * len(self.choices)  # when each had its last tokens
        self._failure: Exception | None = None

    def submit(self) -> None:
        """Hands all choices to the engine, or none; raises APIError."""
        asked = self.request
        most = self.engine.load().slots + self.engine.max_waiting
        if len(self.choices) > most:  # there would never be room
            name = "n" if asked.fields.n > 1 else "prompt"
            raise bad(name, f"{name}: {len(self.choices)} choices: ask for {most} at most")
        try:
            for choice in self.choices:
                request = Request(
                    prompt_ids=asked.prompts[choice.prompt].ids,
                    max_new_tokens=asked.new_tokens[choice.prompt],
                    stop_ids=asked.stop_ids,
                    sampling=row_of(asked.sampling, choice.index),
                    top_logprobs=asked.top_logprobs,
                    prompt_logprobs=asked.prompt_logprobs,
                )
                others = len(self.choices) - 1 - choice.index
                choice.ticket = self.engine.submit(request, choice.hear, others)
        except Full as error:
            self.cancel()
            seconds = self.metrics.seconds_until_room(self.engine.load())
            raise APIError(
                TOO_MANY,
                str(error),
                code="rate_limit_exceeded",
                headers={"Retry-After": str(seconds)},
            ) from error
        except Closed as error:
            self.cancel()
            raise stopping() from error
        except InputError as error:
            self.cancel()
            raise bad("messages" if asked.chat else "prompt", str(error)) from error

    async def parts(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Yields what is new of each choice until all have ended; raises what one failed of."""
        while True:
            if self._failure is not None:
                raise self._failure
            done = self.done
            for choice in self.choices:
                if part := choice.take():
                    yield choice, part
            if done:
                return
            await self.changed.wait()
            self.changed.clear()

    async def whole(self) -> list[Delta]:
        """All choices, once they have ended; raises what one failed of."""
        while self._failure is None and not self.done:
            await self.changed.wait()
            self.changed.clear()
        if self._failure is not None:
            raise self._failure
        return [choice.take() for choice in self.choices]

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.request.prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def cancel(self) -> None:
        """Frees what the choices hold in the engine; those that have ended hold nothing."""
        for choice in self.choices:
            if choice.ticket is not None and not choice.finish:
                choice.finish = "cancelled"
                self.engine.cancel(choice.ticket)

    def stop(self) -> None:
        """Ends the request because the server ends."""
        self._failure = stopping()
        self.changed.set()

    def fail(self, news: News) -> None:
        """Ends the request with what happened to one of its choices."""
        if news.finish == "cancelled":  # by an engine that closes: `cancel` hears no news
            self.stop()
        else:
            self._failure = APIError(FAULT, news.error or "the engine failed")

    def failed(self, error: Exception) -> None:
        """Ends the request with a fault of ours, which its own task raises."""
        self._failure = error

    def timed(self, choice: Choice, count: int) -> None:
        """Counts a choice's new tokens, and the time that they took."""
        self.metrics.gave(count)
        now, before = time.monotonic(), self._seen[choice.index]
        self._seen[choice.index] = now
        if before:
            self.metrics.took(now - before, count)
        else:
            self.metrics.first_token.observe(now - self.began)
