"""Drafted text equals plain text: one table over drivers, drafters, draft shapes and sampling.

A case is DRIVER:DRAFTER:SHAPE. Its requests are greedy, sampled with a seed, penalized and biased,
side by side; a case that ends with :greedy samples none, and in one that ends with :grammar most
requests have a grammar. A DRAFTER may have quantized weights, as in moa-1+int8, a draft vocabulary,
as in moa-1+words, or a target with experts or with windows in some layers, as in moa-2+gemma, whose
answers are longer and whose caches drop rows. Plain decoding keeps all rows. The SHAPE `lagging`
alternates chains, trees and plain rounds, so that the drafter's caches lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax.sharding import Mesh

from infer.split_client.answering import SplitClient
from infer.split_client.state import ClientOptions
from moa_jax import Result, Session
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.engine import Engine, Request
from moa_jax.engine.program_cache import GREEDY, SAMPLED, ProgramName
from moa_jax.grammar import masks
from moa_jax.grammar.compile import json_schema, text_of
from moa_jax.model.quantize import FORMATS
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.speculation.controller import NO_DRAFT, ShapeChoice
from moa_jax.speculation.cost_table import CostTable
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.server_target import TargetSlots
from tests.conftest import slow
from tests.decode.tiny import END, TINY, TinyPairs, follow, masked_plain, tiny_grammar
from tests.engine.engines import answers
from tests.serve.toy_server import COMPLETIONS, Running
from tests.split.split_client import answered, left_alone, server_at
from tests.split.split_client import serving as serving_split
from tests.split.split_server import PAIRING

NEW = 24
STATIC = DraftShape.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
CHAIN, WIDE = DraftShape(4), DraftShape(2, 16, 40)  # of 64 tokens, so that some are accepted
SHAPES = {"chain": CHAIN, "tree": DraftShape(4, 3, 8), "static": STATIC, "wide": WIDE}
LONG = DraftShape(6)
BAD = ((1,), *((a, (a + step) % 64) for a in range(1, 64, 2) for step in (0, 2)))[:64]
REQUESTS = [
    Request((5, 17, 60, 33, 9, 5, 17), NEW, ()),
    Request((50, 3, 44), 17, (), Sampling(0.7, top_k=20, top_p=0.9, seed=3)),
    Request((7,), NEW, (), Sampling(1.0, min_p=0.02, repetition_penalty=1.3, seed=9)),
    Request(
        (2, 4, 8, 16, 32),
        NEW,
        (20,),
        Sampling(repetition_penalty=1.2, logit_bias=((5, 2.0), (7, -100.0))),
    ),
    Request((11,) * 9, NEW, (), Sampling(0.7, presence_penalty=0.5, frequency_penalty=0.8, seed=2)),
    Request(tuple(3 * i * i % 61 for i in range(30)), 20, ()),
    Request((9, 3), NEW, (*range(0, 64, 2),), Sampling(0.8, seed=6, min_tokens=13, bad_words=BAD)),
]
GRAMMARS = {  # by request: drafts may be right, JSON, text without an end, and a forced choice
    0: text_of("regex", "[a-z ]{4,30}"),
    1: json_schema(
        {
            "type": "object",
            "properties": {"ab": {"enum": ["bc", "Abc"]}, "n": {"type": "integer"}},
            "required": ["ab", "n"],
            "additionalProperties": False,
        },
        flexible=False,
    ),
    4: json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    5: text_of("choice", ["yes", "no", "bcbcab"]),
}
FAST = ["engine:moa-1:tree:grammar"]
SLOW = """
    engine:moa-1:tree engine:moa-1:wide:grammar batch:eagle:wide http:lookup:chain
    alone:lookup:chain alone:moa-2:lagging batch:moa-0:static batch:moa-1:lagging
    batch:eagle-authors:wide batch:eagle3:lagging batch:eagle3-ids:wide batch:glide:tree
    batch:independent:lagging batch:moa-1+fp8:chain batch:borrowed+int8:tree
    alone:moa-1+experts:chain batch:eagle+int8+experts:wide engine:moa-1+experts:lagging
    engine:eagle3:tree engine:moa-2:lagging engine:moa-1:chain:greedy engine:moa-1+words:tree
    engine:eagle3:tree:grammar engine:lookup:chain:grammar engine:moa-2+gemma:lagging:grammar
    split:eagle:tree split:eagle3:chain split:glide:chain split:independent:chain
    split:borrowed:tree split:moa-1+int8:chain
    batch:moa-2+gemma:wide engine:moa-2+gemma:lagging split:independent+gemma:chain
    alone:lookup+gemma:chain batch:moa-1+gemma:lagging engine:glide+gemma:tree
""".split()


class Case(NamedTuple):
    """A driver's pair, its draft shape, and requests."""

    target: Target
    drafter: LoadedDrafter
    vocabulary: DraftVocabulary | None
    shape: str
    requests: list[Request]

    @property
    def lags(self) -> bool:
        return self.shape == "lagging"

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the settings of a session or engine, with or without a choice of shapes."""
        lagging = {"ways": (turns_of(self)[2][0],), "costs": CostTable()} if self.lags else {}
        return {"vocabulary": self.vocabulary} | lagging | ({"chunk": 4} if self.windows else {})

    @property
    def windows(self) -> bool:
        return any(self.target.config.sliding_windows)


class Texts(NamedTuple):
    """New tokens by request, and the number of accepted draft tokens."""

    token_ids: list[list[int]]
    num_accepted: int


def case_of(name: str, pairs: TinyPairs = TINY, mesh: Mesh | None = None) -> Case:
    driver, words, shape, *rest = name.split(":")
    kind, *options = words.split("+")
    pairs = pairs.gemma if "gemma" in options else pairs.experts if "experts" in options else pairs
    weights = next((each for each in options if each in FORMATS), None)
    vocabulary = None
    if "words" in options:
        size = pairs.config.vocab_size
        vocabulary = DraftVocabulary(np.arange(0, size, 2), size)
    requests = REQUESTS
    if "greedy" in rest:
        requests = [dataclasses.replace(each, sampling=Sampling()) for each in REQUESTS]
    if "grammar" in rest:
        requests = list(REQUESTS)
        for index, text in GRAMMARS.items():
            stops, grammar = (*REQUESTS[index].stop_ids, END), tiny_grammar(text)
            requests[index] = dataclasses.replace(requests[index], grammar=grammar, stop_ids=stops)
    if "gemma" in options:
        longer = lambda each: dataclasses.replace(each, max_new_tokens=3 * each.max_new_tokens)
        requests = [*map(longer, requests)]
    absent = {"split": ("logit_bias", "bad_words"), "http": ("bad_words",)}.get(driver, ())
    for setting in absent:  # the protocol has no such field, or its words are not token ids
        requests = [each for each in requests if not getattr(each.sampling, setting)]
    pair = pairs.target(weights, mesh), pairs.drafter(kind, weights, mesh)
    return Case(*pair, vocabulary, shape, requests)


def turns_of(case: Case) -> list[tuple[DraftShape, int]]:
    """Returns shapes, and the rounds of a call."""
    other = LONG if case.drafter.method == "lookup" else WIDE  # lookup drafts no trees
    return [(CHAIN, 4), (NO_DRAFT, 3), (other, 2), (NO_DRAFT, 5)]


def arguments_of(request: Request) -> tuple[list[int], int, list[int], Sampling]:
    """Returns prompt, length, stop ids and sampling in the order of the arguments of methods."""
    stops = list(request.stop_ids)
    return list(request.prompt_ids), request.max_new_tokens, stops, request.sampling


def rows_of(session: Session, requests: list[Request]) -> list[Result]:
    """Returns the results of a batch."""
    return session.generate(*map(list, zip(*map(arguments_of, requests), strict=True)))


# ---- drivers ------------------------------------------------------------------------------


def session_of(case: Case) -> Session:
    shape = SHAPES.get(case.shape, CHAIN)
    found = Session(case.target, case.drafter, shape, **case.settings)
    return follow(found, *turns_of(case)) if case.lags else found


def alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """A session streams each request by itself."""
    session, rows = session_of(case), []
    for request in case.requests:
        *parts, result = session.stream(*arguments_of(request))
        assert sum(parts, []) == result.token_ids
        rows.append(result)
    return Texts([row.token_ids for row in rows], accepted(rows))


def batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """The requests are rows of a session's batch."""
    rows = rows_of(session_of(case), case.requests)
    assert not case.lags or {0, 3} <= {count for row in rows for count in row.drafted_levels}
    return Texts([row.token_ids for row in rows], accepted(rows))


def accepted(rows: list[Result]) -> int:
    return sum(count - 1 for row in rows for count in row.accept_lengths)


@contextlib.contextmanager
def engine_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with fewer slots than requests, which is not started."""
    shape = SHAPES.get(case.shape, CHAIN)
    most = 64 << case.windows
    settings = {"num_slots": 2, "max_tokens": most, "chunk": 16} | case.settings
    engine = Engine(case.target, case.drafter, shape, **settings)
    programs = engine.programs  # most of a test is compiling: one bucket, and one kind of rows
    programs.buckets = programs.buckets[-1:]
    kind = SAMPLED if any(each.sampling != Sampling() for each in case.requests) else GREEDY
    if case.lags:
        take_turns(engine, turns_of(case), monkeypatch)
    needed = lambda each: each.kind != "score" and (each.kind != "decode" or each.rows == kind)
    first = list(filter(needed, programs.first()))
    programs.first, programs.later = lambda: first, lambda: []
    engine._pacing.add_dummy_runs = lambda names: None
    engine.prepare()
    if any(each.grammar for each in case.requests):
        engine.prepare_masks()
        for shape in dict(turns_of(case) if case.lags else ()):
            programs.compile(ProgramName("decode", *programs.buckets, shape, SAMPLED, True))
    engine.session.background.submit = lambda *job, **rest: None
    yield engine
    if case.lags:
        assert set(engine.stats().rounds_by_shape) >= {shape for shape, _ in turns_of(case)}


def take_turns(
    engine: Engine, turns: list[tuple[DraftShape, int]], patch: pytest.MonkeyPatch
) -> None:
    """The engine uses these shapes and rounds in turn; each call covers all slots."""
    order, largest = itertools.cycle(turns), engine.programs.buckets
    costs = dict.fromkeys(shape for shape, _ in turns)
    for shape in costs:
        for length in engine._pacing.lengths():
            engine._pacing.costs.put(*largest, shape, length, 1.0)
        engine.programs.compile(ProgramName("decode", *largest, shape, SAMPLED))
    choose = lambda costs, *lags_ms: ShapeChoice(*next(order))
    patch.setattr(engine.session.controller, "next", choose)
    patch.setattr(engine.programs, "shapes", lambda batch: list(costs))


def engine(case: Case, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """An engine gets all requests at once, and before a grammar one with masks that fail."""
    broken = [with_broken_masks(each, monkeypatch) for each in case.requests if each.grammar][:1]
    with engine_for(case, monkeypatch) as found, contextlib.closing(found):
        steps = steps_of(found, monkeypatch)
        found.start()
        listeners = answers(found, broken + case.requests)
        ahead = itertools.pairwise(itertools.pairwise(steps))
        alone = broken == [] or found.programs.splits_slots
        assert alone or (("verify", "read"), ("read", "masked")) in ahead
        ends = [each.all[-1].error for each in listeners[: len(broken)]]
        assert all(error.endswith("at this request: its grammar: no mask") for error in ends)
        rows = [each.token_ids for each in listeners[len(broken) :]]
        return Texts(rows, found.stats().accepted_tokens)


def steps_of(found: Engine, patch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the kinds of an engine's programs, and "read" for each read call."""
    steps, run, read = [], found.programs.run, found._batch.read
    kind = lambda name: "masked" if name.masked else name.kind
    patch.setattr(found.programs, "run", lambda *call: (steps.append(kind(call[0])), run(*call))[1])
    patch.setattr(found._batch, "read", lambda call: (steps.append("read"), read(call))[1])
    return steps


def with_broken_masks(request: Request, patch: pytest.MonkeyPatch) -> Request:
    """The request with a grammar whose fourth path, and each later one, has no masks."""
    row, fill, count = request.grammar.row(), masks._fill_paths, itertools.count()

    def broken(jobs: list[Any], *rest: Any) -> None:
        if any(job[0] is row.matcher for job in jobs) and next(count) >= 3:
            raise RuntimeError("no mask")
        fill(jobs, *rest)

    patch.setattr(masks, "_fill_paths", broken)
    grammar = SimpleNamespace(bitmask_W=request.grammar.bitmask_W, row=lambda: row)
    return dataclasses.replace(request, grammar=grammar)


def http(case: Case, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Clients send all requests to the OpenAI server at once; half of the answers are streamed."""

    def post(server: Any, index: int) -> list[int]:
        request = case.requests[index]
        settings = dataclasses.asdict(request.sampling)
        body = {
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(request.stop_ids),
            "return_token_ids": True,
            **settings,
            "logit_bias": {str(token): bias for token, bias in request.sampling.logit_bias},
        }
        if index % 2:
            return server.post(COMPLETIONS, body).json()["choices"][0]["token_ids"]
        *events, end = server.stream(COMPLETIONS, body)
        assert end == "[DONE]"
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    everyone = range(len(case.requests))
    with engine_for(case, monkeypatch) as found, Running(found) as server:
        with ThreadPoolExecutor(len(everyone)) as pool:
            texts = list(pool.map(functools.partial(post, server), everyone))
        return Texts(texts, found.stats().accepted_tokens)


def split(case: Case, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Clients with their own drafters share a server's passes; rows are sent in float32."""
    monkeypatch.setattr("moa_jax.split.server_target.NODES", (16,))
    monkeypatch.setattr("moa_jax.split.server_target.SESSIONS", (4,))
    most = 64 << case.windows
    sizes = {"num_slots": 3 << case.windows, "max_tokens": most, "max_nodes": 16, "chunk": 16}
    slots = TargetSlots(case.target, case.drafter, **sizes)
    drafts = ClientDrafter(case.target, case.drafter, max_tokens=most)
    shape = SHAPES[case.shape]
    options = ClientOptions(shape) if shape.breadth > 1 else ClientOptions(lengths=(1, 3))

    async def responses(port: int) -> list[Any]:
        server = server_at(port, timeout=60.0)
        with ThreadPoolExecutor(1) as worker:
            clients = [SplitClient(drafts.twin(), server, options, worker) for _ in case.requests]
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(answered(client, *arguments_of(each), seconds=300))
                    for client, each in zip(clients, case.requests, strict=True)
                ]
            for client in clients:
                await client.session.close()
            await left_alone()
            return [answer.result() for answer in answers]

    with serving_split(slots, PAIRING, case.target.config.vocab_size) as server:
        found = asyncio.run(responses(server.port))
    lengths = [count for each in found for count in each.counts.accept_lengths]
    return Texts([each.tokens for each in found], sum(count - 1 for count in lengths))


DRIVERS = {driver.__name__: driver for driver in (alone, batch, engine, http, split)}


def drafted_texts(name: str, case: Case) -> Texts:
    """Returns the texts of the case's driver; rings have no more rows than they need."""
    with pytest.MonkeyPatch.context() as patch:
        if case.windows:
            patch.setattr("moa_jax.model.cache.TILE", 1)
        return DRIVERS[name.partition(":")[0]](case, patch)


@functools.cache
def plain_session(pairs: TinyPairs, weights: str | None) -> Session:
    return Session(pairs.target(weights))


def plain_texts(name: str, case: Case, pairs: TinyPairs = TINY) -> list[list[int]]:
    """Returns the texts of a session without a drafter on one device."""
    weights = next((word for word in FORMATS if word in name), None)
    pairs = pairs.gemma if "gemma" in name else pairs.experts if "experts" in name else pairs
    rows = rows_of(plain_session(pairs, weights), case.requests)
    return [
        masked_plain(case.target, request) if request.grammar else row.token_ids
        for request, row in zip(case.requests, rows, strict=True)
    ]


@pytest.mark.parametrize("name", [*FAST, *map(slow, SLOW)])
def test_drafted_text_equals_plain_text(name):
    case = case_of(name)
    if name.startswith("alone"):  # each setting is a program of its own
        case = case._replace(requests=[case.requests[0], case.requests[2]])
    found = drafted_texts(name, case)
    assert found.token_ids == plain_texts(name, case)
    assert found.num_accepted > 0, "no draft was accepted, so nothing was shown"
