"""infer.bench --split: flags, what is counted over toy servers, outages, its tables."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from infer import bench
from infer.bench.network import Proxy, in_thread
from infer.bench.split import alone as alone_texts
from infer.bench.split import run, table
from infer.bench.split.flags import parser_of
from infer.bench.split.pairs import SplitBench, SplitPair, Way, options_of
from infer.cli import program
from infer.cli.program import Progress
from infer.split_client.answering import SplitClient
from infer.split_client.drafter import PIECE
from infer.split_client.figures import figures_of, timed
from infer.split_client.state import AnswerEvent, ClientOptions
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from tests.pairs import NO_STOP, random_pair_of
from tests.split.split_client import ToyHalf, alone, server_at
from tests.split.split_server import PAIRING, ToySlots, plain, running

PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, [5, 6]]
NEW = 24
REFUSED = {  # flags, and what the one line says
    "--modes chain,rail": "--modes chain,rail; choose from stream, plain, chain, tree, offline",
    "--profiles 6g": "choose from loopback, wired, 5g, 4g, far",
    "--tree 1,2,3": "--tree takes depth (2 or more)",
    "--client-slowdown 0.5": "choose 1 or more",
    "--target absent": "--target without --draft",
    "--draft a/x --draft b/x": "two drafters have one name",
    "--clients 8 --rate 2": "unrecognized arguments: --clients 8 --rate 2",
    "--plot file.png": "unrecognized arguments: --plot file.png",
    "--outages 3,x": "at least 0",
    "--draft x=./absent": "absent is not a folder",
    "--draft lookup": "--draft lookup cannot write token by token, as chain, offline asks",
    "--sweep-depth 2": "unrecognized arguments: --sweep-depth 2",
}


@pytest.mark.parametrize("line", REFUSED)
def test_split_bench_refuses_bad_flags_with_one_line(line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        program.run(bench.main, ["--split", *line.split()])
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "") and shown.err.count("\n") == 1
    assert REFUSED[line] in shown.err


@pytest.fixture(scope="module")
def server():
    with running(ToySlots(8), max_queue=64) as found:
        yield found
        assert found.metric("split_failures_total") == 0


def toy_bench(*modes: str, **flags) -> SplitBench:
    """What is measured, over a toy pair."""
    args = parser_of("").parse_args(["--codec", "float32", "--client-slowdown", "1"])
    vars(args).update({"max_new_tokens": NEW, "modes": list(modes)} | flags)
    drafter = SimpleNamespace(method="moa", config=SimpleNamespace(target_layer_inference=1))
    pair = SplitPair("toy", drafter, ToyHalf(), PAIRING, [])
    ways = [Way(mode, pair, options_of(args, mode)) for mode in modes]
    own = [plain(prompt, NEW) for prompt in PROMPTS]
    target = SimpleNamespace(params={"embed": np.zeros(1, np.float32)})
    return SplitBench(args, target, [pair], ways, PROMPTS, own, [1.0])


@pytest.fixture
def at(server):
    """The port of the toy pair's server."""
    return {"toy": server.port}


def test_split_bench_counts_what_each_way_costs(at):
    found, differences = toy_bench("stream", "plain", "chain", "tree"), []
    profile = run.measure_network(found, "loopback", at, found.ways, differences, Progress())
    assert not differences
    stream, one_by_one, chain, tree = profile["ways"]
    assert [row["way"] for row in profile["ways"]] == ["stream", "plain", "toy chain", "toy tree"]
    assert all(row["same_as_plain"] == row["answers"] == 4 for row in profile["ways"])
    assert all(row["tokens"] == 4 * NEW for row in profile["ways"])

    assert stream["server_calls"] == 2 and one_by_one["server_calls"] == NEW
    assert stream["target_passes"] == one_by_one["target_passes"] == NEW
    assert stream["tau"] == one_by_one["tau"] == 1
    for drafted in (chain, tree):
        assert drafted["tau"] > 1.3 and drafted["target_passes"] < NEW
        assert drafted["draft"] == "toy" and drafted["target_layer_inference"] == 1
    assert stream["draft"] is None and stream["drafting_s"] == 0
    assert stream["bytes_up"] < one_by_one["bytes_up"]
    assert stream["bytes_down"] < one_by_one["bytes_down"]  # which has rows
    assert stream["speedup_over_stream"] == one_by_one["speedup_over_plain"] == 1
    assert min(stream["speedup_over_plain"], one_by_one["speedup_over_stream"]) > 0


def test_split_bench_speedups_are_ratios_of_the_same_prompt():
    rates = lambda *values: [{"tokens_per_s": value} for value in values]
    found = run.ratios(rates(6.0, 9.0, None, 1.0), rates(2.0, 1.0, 5.0, 0.0))
    assert found == [3.0, 9.0]


def test_split_bench_tells_answers_that_differ(at):
    found, differences = toy_bench("chain"), []
    found.own[2][5] += 1
    profile = run.measure_network(found, "loopback", at, found.ways, differences, Progress())
    assert differences == [{"profile": "loopback", "way": "toy chain", "prompt": 2}]
    assert profile["ways"][0]["same_as_plain"] == 3
    assert profile["ways"][0]["speedup_over_stream"] is None  # which was not asked for


def test_disconnect_for_good_leaves_just_the_tokens_before_it_to_the_target(server):
    ways = ClientOptions(lengths=(), policy="keep", reconnect_seconds=0.0)

    async def cut(proxy: Proxy, after: int) -> list[int]:
        with ThreadPoolExecutor(1) as worker:
            answering = SplitClient(ToyHalf(), server_at(proxy.port), ways, worker)
            found = await run.answer(answering, PROMPTS[0], NEW - after, proxy, after)
            await answering.close()
            return found["token_ids"]

    with in_thread(Proxy("127.0.0.1", server.port)) as proxy:
        for after in (0, 4, 9):
            found = asyncio.run(cut(proxy, after))
            before = plain(PROMPTS[0], max(after, 1))
            assert found == before + alone(PROMPTS[0] + before, NEW - len(before))


@pytest.mark.slow
def test_disconnect_quality_is_what_the_target_thinks(tmp_path):
    pair = random_pair_of("llama", 0, tmp_path)
    prompt = [5, 9, 4, 17, 23]
    (own,) = pair.plain.generate([prompt], 12, NO_STOP)
    own = own.token_ids
    view = alone_texts.judge(pair.target, prompt, own)
    assert view.chosen == 1.0
    other = [*own[:4], (own[4] + 1) % 90, *own[5:]]
    assert alone_texts.judge(pair.target, prompt, other).log_likelihood < view.log_likelihood
    one = alone_texts.judge(pair.target, [*prompt, *own[:3]], own[3:5])
    two = [alone_texts.judge(pair.target, [*prompt, *own[:i]], own[i : i + 1]) for i in (3, 4)]
    mean = np.mean([each.log_likelihood for each in two])
    np.testing.assert_allclose(one.log_likelihood, mean, rtol=1e-5)
    found = alone_texts.compare(pair.target, prompt, own, other, 2)
    assert (found["tokens"], found["first_disagreement"]) == (10, 2)
    assert found["agreement"] == 0.9
    assert found["own_log_likelihood"] > found["log_likelihood"]
    whole = alone_texts.compare(pair.target, prompt, own, own, 2)
    assert (whole["agreement"], whole["first_disagreement"]) == (1.0, 10)
    assert alone_texts.compare(pair.target, prompt, own, own[:2], 2) == {"tokens": 0}


@pytest.mark.slow
def test_split_bench_says_why_a_server_does_not_start():
    flags = ["--target", "./absent", "--draft", "./absent"]
    with (
        pytest.raises(InputError, match="did not start: infer.server: .*absent is not a folder"),
        run.servers({"one": flags}),
    ):
        pass


def document(at, monkeypatch) -> dict:
    """A whole document over toys, whose texts no target judges."""
    quality = {"tokens": 9, "agreement": 0.5, "first_disagreement": 2.5, "chosen_by_target": 0.25}
    quality |= {"log_likelihood": -1.5, "own_log_likelihood": -0.5, "answers": 4}
    monkeypatch.setattr(alone_texts, "compare_all", lambda *_: quality)
    monkeypatch.setattr(run, "servers", lambda flags: contextlib.nullcontext(at))
    found = toy_bench(
        "stream",
        "chain",
        "offline",
        profiles=["loopback", "4g"],
        outages=(0, 16),
        max_new_tokens=16,
    )
    made = run.measure(found._replace(own=[plain(prompt, 24) for prompt in PROMPTS]))
    return json.loads(json.dumps(made))


def test_split_first_tokens_of_a_drafter_alone_are_a_piece():
    async def work():
        with ThreadPoolExecutor(1) as worker:
            answering = SplitClient(ToyHalf(), None, ClientOptions(), worker)
            events = answering.answer(PROMPTS[0], len(PROMPTS[0]) + NEW, NO_STOP, Sampling())
            times = await timed(answering, events)
            return times, figures_of(answering, PROMPTS[0], times)

    times, found = asyncio.run(work())
    assert times.count == PIECE < NEW == len(found["token_ids"])
    assert found["tokens_per_s"] == (NEW - PIECE) / found["decode_s"]
    nothing = SimpleNamespace(text=SimpleNamespace(answer=[]))
    times = asyncio.run(timed(nothing, no_events()))
    assert times.begin < times.first == times.end and not times.count


async def no_events() -> AsyncIterator[AnswerEvent]:
    """What comes of an answer that is lost before its first token."""
    yield AnswerEvent(0)


def test_split_bench_tables_show_all(at, monkeypatch):
    made = document(at, monkeypatch)
    assert not made["differences"] and made["settings"]["modes"] == ["stream", "chain", "offline"]
    assert [row["after"] for row in made["outages"]] == [0, 16]
    assert made["offline"][0]["tokens_per_s"] > 0 and made["offline"][0]["way"] == "toy offline"
    shown = table.render(made)
    lines = shown.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert sum(line.startswith("| ---") for line in rows) == 2
    heads = [lines[i - 1] for i, line in enumerate(lines) if line.startswith("| ---")]
    widths = [head.count("|") for head in heads]
    assert {line.count("|") for line in rows} == set(widths)
    for said in (
        "toy chain",
        "4/4",
        "| 16 | toy | 9 | 50 % | 2.5 |",
        "| never linked | toy |",
        "25 %",
    ):
        assert said in shown
    assert "DIFFER" not in shown
    made["differences"] = [{"profile": "4g", "way": "toy chain", "prompt": 0}]
    assert "1 answers DIFFER" in table.render(made)


@pytest.mark.slow
def test_split_bench_end_to_end_on_the_bundled_pair(capsys):
    flags = "--profiles loopback,wired --prompts 1 --max-new-tokens 12 --lengths 2,3 --json"
    assert bench.main(f"--split {flags} --outages 0,4".split()) == 0
    made = json.loads(capsys.readouterr().out)
    for profile in made["profiles"]:
        assert [row["way"] for row in profile["ways"]] == ["stream", "plain", "bundled chain"]
        assert all(row["same_as_plain"] == 1 for row in profile["ways"])
        assert profile["ways"][2]["target_passes"] < 12
    assert made["offline"][0]["tokens_per_s"] > 0
    assert [row["after"] for row in made["outages"]] == [0, 4]
    assert all(row["log_likelihood"] < 0 for row in made["outages"])
